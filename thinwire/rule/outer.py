"""An outer copy that takes a step on the mean drift when the answer lands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..live import Live
from .base import Rule, Scope
from .reduced import Reduced
from .state import State, buffer
from .step import Nesterov, check_fraction, check_outer


@dataclass(frozen=True)
class Outer(Rule):
    """One shared outer copy takes the outer step on the mean drift; x becomes `mix * x + (1 - mix) * copy`.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30), Outer(Nesterov(0.7, 0.9)), tw.Int8()))
    params | every 30 | Outer(step=Nesterov(lr=0.7, momentum=0.9), mix=0.0) | Int8()
    """

    step: Nesterov
    mix: float = 0.0
    agreement = "shared"
    keeps_rest = False
    overlaps = True

    def __post_init__(self) -> None:
        check_outer(self.step)
        check_fraction("mix", self.mix)

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), **{slot: x.layout.zeros(x.device) for slot in self.step.slots}}

    def shared_slots(self) -> tuple[str, ...]:
        return self.step.slots

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(buffer(state, "anchor"))

    def uses_own(self, scope: Scope) -> bool:
        return False

    def equalises(self, scope: Scope) -> bool:
        return not self.mix

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor = buffer(state, "anchor")
        if self.mix and not answer.sick:
            self.step.step(anchor, state, answer.mean)
            x.mix(anchor, self.mix)
        else:
            x.write_along(anchor, lambda which: self.step.step_part(which, anchor, state, answer.part(which)))


@dataclass(frozen=True)
class Carry(Rule):
    """One shared anchor steps when the answer lands; x keeps the progress made since the launch.

    `A = step(A, mean) ; x += (A - A before) + own`: the same as `x = A + (x - x at launch)`, without a copy at launch.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Carry(Nesterov(0.7, 0.6))))
    params | every 30, delay 30 | Carry(step=Nesterov(lr=0.7, momentum=0.6)) | Float32()
    """

    step: Nesterov
    agreement = "shared"

    def __post_init__(self) -> None:
        check_outer(self.step)

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), **{slot: x.layout.zeros(x.device) for slot in self.step.slots}}

    def shared_slots(self) -> tuple[str, ...]:
        return self.step.slots

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(buffer(state, "anchor"))

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor = buffer(state, "anchor")
        before = None if answer.sick or answer.own is None else anchor.clone()
        self.step.step(anchor, state, answer.mean)
        if before is None or answer.own is None:
            x.write(anchor)
        else:
            x.add(torch.sub(anchor, before, out=before).add_(answer.own))
