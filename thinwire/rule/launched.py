"""Outer steps that are taken at launch, with the answers that have landed by then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..live import Live
from .base import Rule, Scope
from .reduced import Reduced
from .state import State, buffer
from .step import Nesterov, check_outer


class _AtLaunch(Rule):
    """Delayed and eager updates: the outer step is taken at launch, with the answers that have landed by then."""

    at_launch = True
    keeps_rest = False
    overlaps = True
    step: Nesterov

    def __post_init__(self) -> None:
        check_outer(self.step)

    def init(self, x: Live, scope: Scope) -> State:
        zeros = {slot: x.layout.zeros(x.device) for slot in self.step.slots}
        return {"anchor": x.read(), "answer": x.layout.zeros(x.device), "backlog": None, **zeros}

    def shared_slots(self) -> tuple[str, ...]:
        return self.step.slots

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        message, backlog = x.drift(buffer(state, "anchor")), state["backlog"]
        return message if backlog is None else message.add_(backlog)

    def uses_own(self, scope: Scope) -> bool:
        return False

    def equalises(self, scope: Scope) -> bool:
        return False  # the answer is only put by; x moves at launch

    def keeps(self, scope: Scope) -> int:
        return 1

    def _step(self, state: State, fresh: Tensor | None) -> None:
        answer = buffer(state, "answer")
        if fresh is not None:
            answer.add_(fresh)
        self.step.step(buffer(state, "anchor"), state, answer)
        answer.zero_()

    def settle(self, x: Live, state: State) -> None:
        """One outer step with the answer in hand; the steps since the last launch stay in x."""
        if not bool(buffer(state, "answer").any()):
            return
        before = buffer(state, "anchor").clone()
        self._step(state, fresh=None)
        x.add(torch.sub(buffer(state, "anchor"), before, out=before))

    def _owe(self, state: State, message: Tensor) -> None:
        """A lost message is added to the next one."""
        backlog = state["backlog"]
        state["backlog"] = message if backlog is None else backlog.add_(message)


@dataclass(frozen=True)
class Delayed(_AtLaunch):
    """`x = p = step(p, mean of one phase ago)`.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Delayed(Nesterov(0.4, 0.9))))
    params | every 30, delay 30 | Delayed(step=Nesterov(lr=0.4, momentum=0.9)) | Float32()
    """

    step: Nesterov
    agreement = "shared"

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        self._step(state, fresh=None)
        x.write(buffer(state, "anchor"))
        state["backlog"] = None
        return message.clone()

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        buffer(state, "answer").add_(answer.mean)

    def lose(self, x: Live, state: State, kept: Tensor | None, scope: Scope) -> None:
        assert kept is not None
        self._owe(state, kept)


@dataclass(frozen=True)
class Eager(_AtLaunch):
    """`g = mean before - early before + early ; x = p = step(p, g)`, early = own drift / workers, as it was applied.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Eager(Nesterov(0.4, 0.9))))
    params | every 30, delay 30 | Eager(step=Nesterov(lr=0.4, momentum=0.9)) | Float32()
    """

    step: Nesterov

    def shared_copy(self, state: State) -> Tensor | None:
        return None  # each worker has its own point

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        early = message.div(scope.world)
        self._step(state, fresh=early)
        x.write(buffer(state, "anchor"))
        state["backlog"] = None
        return early

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        assert answer.kept is not None
        buffer(state, "answer").add_(answer.mean).sub_(answer.kept)

    def lose(self, x: Live, state: State, kept: Tensor | None, scope: Scope) -> None:
        assert kept is not None
        buffer(state, "answer").sub_(kept)
        self._owe(state, kept.mul(scope.world))
