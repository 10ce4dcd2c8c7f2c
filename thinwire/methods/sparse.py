"""Decoupled momentum with the DCT (arXiv 2510.03371), DeMo (arXiv 2411.19870) and SparseLoCo (arXiv 2508.15706).

    decoupled  g = X - y ; m = b*m + g ; T = strongest(DCT(m)) ; m = m - T + merge(T) ; X -= lr*(g + b*m) ; y = X
    DeMo       e = b*e + lr*g ; T = strongest(DCT(e)) ; e -= T ; x -= lr*sign(merge(T))          every step
    SparseLoCo e = b*e + (X - y) ; T = two-bit(strongest(e)) ; e -= T ; X -= lr*merge(T) ; y = X

Decoupled "paper" and "mean" with one worker, or identical workers, are DiLoCo; "consensus" with every component is
DiLoCo without outer momentum.
"""

from __future__ import annotations

from typing import Literal

from ..codec import DCT, BFloat16, Codec, TopK, TwoBit
from ..codec.dct import check_chunk
from ..replica import grads, params
from ..rule import SGD, Outer, SharedMomentum, Sign, check_fraction
from ..schedule import Every
from ..table import Method, Sync
from .common import table

Variant = Literal["paper", "mean", "consensus"]


def decoupled_momentum(
    every: int,
    chunk: int = 64,
    topk: int = 32,
    decay: float = 0.9,
    outer_lr: float = 0.7,
    variant: Variant = "consensus",
    values: Codec = BFloat16(),  # noqa: B008 - codecs have no state
) -> Method:
    """Only the `topk` strongest DCT components of each chunk x chunk block of the momentum travel.

    "paper" merges over those who sent a component, "mean" divides by all workers; neither makes workers equal, so
    evaluate worker 0's. "consensus" keeps what was not sent as error feedback, and workers equal.

    >>> print(decoupled_momentum(every=128).rows[0].codec)
    DCT(TopK(32, chunk=4096, values=BFloat16(), merge='senders'), chunk=64)
    """
    if variant not in ("paper", "mean", "consensus"):
        raise ValueError(f'variant must be "paper", "mean" or "consensus", not {variant!r}')
    codec = _strongest(topk, chunk, values, "mean" if variant == "mean" else "senders")
    if variant == "consensus":
        check_fraction("decay", decay)
        row = Sync(params, Every(every), Outer(SGD(outer_lr)), codec, feedback=decay)
    else:
        row = Sync(params, Every(every), SharedMomentum(outer_lr, decay), codec)
    return table("decoupled_momentum", row, every=every)


def demo(chunk: int = 64, topk: int = 32, decay: float = 0.999, values: Codec = BFloat16()) -> Method:  # noqa: B008
    """Gradients meet at every step as their strongest DCT components, and plain SGD takes the sign of the merge.

    >>> print(demo().rows[0].rule)
    Sign()
    """
    check_fraction("decay", decay)
    row = Sync(grads, Every(1), Sign(), _strongest(topk, chunk, values, "senders"), feedback=decay)
    return table("demo", row, every=1)


def _strongest(topk: int, chunk: int, values: Codec, merge: Literal["senders", "mean"]) -> Codec:
    """The DCT components that travel."""
    check_chunk(chunk)
    return DCT(TopK(topk, chunk * chunk, values, merge), chunk)


def sparseloco(every: int, chunk: int = 4096, topk: int = 64, decay: float = 0.95, outer_lr: float = 1.0) -> Method:
    """The strongest components of drift and error feedback, in two bits each.

    >>> print(sparseloco(every=15).rows[0].feedback)
    0.95
    """
    check_fraction("decay", decay)
    row = Sync(params, Every(every), Outer(SGD(outer_lr)), TopK(topk, chunk, values=TwoBit()), feedback=decay)
    return table("sparseloco", row, every=every)
