"""Delayed and eager updates (arXiv 2502.12996), and "carry", a rule of our own: a full period of overlap.

    delayed  x = p = Nesterov(p, D of one phase ago)
    eager    x = p = Nesterov(p, D of one phase ago + (own drift now - own drift then) / M)
    carry    A = Nesterov(A, D) when D lands ; x = A + (x - x at launch)

Eager with one worker is DiLoCo.
"""

from __future__ import annotations

from ..codec import Codec
from ..rule import Carry, Delayed, Eager, Nesterov
from ..schedule import Every
from ..table import Method
from .common import Fragments, parameter_rows, table


def delayed_diloco(
    every: int,
    fragments: Fragments | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec | None = None,
) -> Method:
    """The outer step uses the mean drift of one phase ago, so that it travels during a whole phase.

    >>> print(delayed_diloco(every=30).rows[0].when)
    every 30, delay 30
    """
    rule = Delayed(Nesterov(outer_lr, outer_momentum))
    return table("delayed_diloco", *parameter_rows(fragments, every, every, rule, codec), every=every)


def eager_diloco(
    every: int,
    fragments: Fragments | None = None,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    codec: Codec | None = None,
    phases: int = 1,
) -> Method:
    """Delayed, but a worker's own part of the mean is fresh. `phases=2` gives a message two phases to arrive.

    >>> print(eager_diloco(every=30, phases=2).rows[0].when)
    every 30, delay 60
    """
    if type(phases) is not int or phases < 1:
        raise ValueError(f"phases must be a whole number, at least 1, not {phases!r}")
    rule, delay = Eager(Nesterov(outer_lr, outer_momentum)), phases * Every(every).period
    return table("eager_diloco", *parameter_rows(fragments, every, delay, rule, codec), every=every)


def carry_diloco(
    every: int,
    delay: int | None = None,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    codec: Codec | None = None,
) -> Method:
    """Training goes on without a reset; when the mean lands, the shared anchor steps and local progress is kept.

    `delay` None is a whole period; it cannot be longer, or progress would be sent twice.

    >>> print(carry_diloco(every=30).rows[0].when)
    every 30, delay 30
    """
    delay = every if delay is None else delay
    when = Every(every, delay=delay)
    if when.delay > when.period:
        raise ValueError(f"delay must be at most every ({every}), not {delay}")
    rule = Carry(Nesterov(outer_lr, outer_momentum))
    return table("carry_diloco", *parameter_rows(None, every, delay, rule, codec), every=every)
