"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).

    d_m = X - x_m ; X = Nesterov(X, E[d_m]) ; x_m = X

Outer lr 1 and momentum 0 give Local SGD. Streaming with one fragment, delay 0 and mix 0 is DiLoCo.
"""

from __future__ import annotations

from ..codec import E3M0, Codec
from ..rule import Nesterov, Outer
from ..table import Method
from .common import Fragments, parameter_rows, table


def diloco(every: int, outer_lr: float = 0.7, outer_momentum: float = 0.9, codec: Codec | None = None) -> Method:
    """Workers train alone; every `every` steps one shared outer copy takes a Nesterov step on the mean drift.

    >>> print(diloco(every=500).rows[0])
    params | every 500 | Outer(step=Nesterov(lr=0.7, momentum=0.9), mix=0.0) | Float32()
    """
    rule = Outer(Nesterov(outer_lr, outer_momentum))
    return table("diloco", *parameter_rows(None, every, 0, rule, codec), every=every)


def streaming_diloco(
    every: int,
    fragments: Fragments,
    delay: int = 1,
    mix: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec | None = E3M0(),  # noqa: B008 - codecs have no state
) -> Method:
    """DiLoCo one fragment at a time, each landing `delay` steps after its launch and mixed into the live parameters.

    `x = mix * x + (1 - mix) * outer copy`: with mix 0 the local steps made meanwhile are discarded.

    >>> print(streaming_diloco(30, [["0.*"], ["1.*"]], codec=None).rows[1].when)
    every 30, offset 15, delay 1
    """
    rule = Outer(Nesterov(outer_lr, outer_momentum), mix)
    return table("streaming_diloco", *parameter_rows(fragments, every, delay, rule, codec), every=every)
