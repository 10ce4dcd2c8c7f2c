"""The outer step, and what numbers it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .state import State, buffer, strips


@dataclass(frozen=True)
class Nesterov:
    """An outer step: `v = momentum*v + d ; x -= lr*(d + momentum*v)`, as `torch.optim.SGD(nesterov=True)` does it.

    >>> Nesterov(0.7, 0.9).slots
    ('velocity',)
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        check_step("an outer step", self.lr, "momentum", self.momentum)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def step(self, point: Tensor, state: State, drift: Tensor) -> None:
        """Move `point` in place; `drift` is used up."""
        if not self.momentum:
            point.add_(drift, alpha=-self.lr)
            return
        for p, v, d in strips(point, buffer(state, "velocity"), drift):
            v.mul_(self.momentum).add_(d)
            d.add_(v, alpha=self.momentum)
            p.add_(d, alpha=-self.lr)

    def step_part(self, which: slice, point: Tensor, state: State, drift: Tensor) -> None:
        """The same for some values only, of which `drift` is."""
        slots: State = {slot: buffer(state, slot)[which] for slot in self.slots}
        self.step(point[which], slots, drift)


def SGD(lr: float) -> Nesterov:  # noqa: N802 - named as the optimizer it is
    """An outer step without momentum.

    >>> SGD(0.7)
    Nesterov(lr=0.7, momentum=0.0)
    """
    return Nesterov(lr, 0.0)


def check_step(what: str, lr: float, name: str, momentum: float) -> None:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (lr, momentum))
    if not (numbers and 0 <= lr < math.inf and 0 <= momentum < 1):
        raise ValueError(f"{what} needs 0 <= lr and 0 <= {name} < 1, not {lr!r} and {momentum!r}")


def check_outer(step: Nesterov) -> None:
    if not isinstance(step, Nesterov):
        raise ValueError(f"an outer step is such as tw.Nesterov(0.7, 0.9), not {step!r}")


def check_fraction(name: str, value: float) -> None:
    """Refuse what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")
