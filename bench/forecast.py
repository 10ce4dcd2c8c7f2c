"""A rule on trial, not part of the library: with a late answer, go on from where all workers are likely to be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.live import Live
from thinwire.rule import Nesterov, Reduced, Rule, Scope, State
from thinwire.rule.state import buffer


@dataclass(frozen=True)
class Forecast(Rule):
    """One shared anchor steps when the answer lands, as in `Carry`; what the workers did meanwhile is estimated.

        A = step(A, mean) ; x = A + keep * own progress since the launch - expect * mean

    The answer says nothing of the steps made while it travelled. A worker knows its own, which is noisy, and how far
    all went in the period before, which is old: `keep` and `expect` weigh the two. (1, 0) is `Carry`.
    `offset`, what x has beyond the anchor and the progress, is no progress and is left out of the next message.

    >>> Forecast(Nesterov(0.7, 0.6), keep=0.5, expect=0.5).agreement
    'shared'
    """

    step: Nesterov
    keep: float = 1.0
    expect: float = 0.0
    agreement = "shared"

    def init(self, x: Live, scope: Scope) -> State:
        zeros = {slot: x.layout.zeros(x.device) for slot in (*self.step.slots, "offset")}
        return {"anchor": x.read(), **zeros}

    def uses_own(self, scope: Scope) -> bool:
        return True

    def send(self, x: Live, state: State, scope: Scope) -> torch.Tensor:
        return x.drift(buffer(state, "anchor")).add_(buffer(state, "offset"))

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor, offset = buffer(state, "anchor"), buffer(state, "offset")
        if answer.sick or answer.own is None:
            progress = torch.zeros_like(anchor)
        else:
            progress = x.read().sub_(anchor).sub_(offset).add_(answer.own)
        torch.mul(progress, self.keep - 1.0, out=offset).add_(answer.mean, alpha=-self.expect)
        self.step.step(anchor, state, answer.mean)
        x.write(progress.add_(offset).add_(anchor))
