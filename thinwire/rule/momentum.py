"""A momentum whose strongest components are shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..live import Live
from .base import Rule, Scope
from .reduced import Reduced
from .state import State, buffer
from .step import check_step


@dataclass(frozen=True)
class SharedMomentum(Rule):
    """Each worker's momentum gives its strongest components away and takes the merge of all back.

    `m = b*m + g ; m = m - own + mean ; anchor -= lr*(g + b*m)`: workers are never made equal, so the first one's
    parameters are what to evaluate.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30), SharedMomentum(0.7, 0.9)))
    params | every 30 | SharedMomentum(lr=0.7, decay=0.9) | Float32()
    """

    lr: float
    decay: float
    agreement = "first"

    def __post_init__(self) -> None:
        check_step("a shared momentum", self.lr, "decay", self.decay)

    def shared_copy(self, state: State) -> Tensor | None:
        return None  # each worker has its own anchor

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), "momentum": x.layout.zeros(x.device)}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(buffer(state, "anchor")).add_(buffer(state, "momentum"), alpha=self.decay)

    def uses_own(self, scope: Scope) -> bool:
        return True

    def keeps(self, scope: Scope) -> int:
        return int(scope.delay > 0)

    def scratch(self, scope: Scope) -> int:
        return 1

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        """With a delay the drift at launch cannot be had again at landing."""
        return message.sub(buffer(state, "momentum"), alpha=self.decay) if scope.delay else None

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor, momentum = buffer(state, "anchor"), buffer(state, "momentum")
        drift = self._drift(x, anchor, answer)
        momentum.mul_(self.decay).add_(drift)
        if not answer.sick:
            assert answer.own is not None
            momentum.add_(answer.mean).sub_(answer.own)
        before = anchor.clone() if scope.delay and not answer.sick else None
        anchor.add_(drift, alpha=-self.lr).add_(momentum, alpha=-self.lr * self.decay)
        if before is None:
            x.write(anchor)
        else:
            x.add(torch.sub(anchor, before, out=before).add_(drift))

    def _drift(self, x: Live, anchor: Tensor, answer: Reduced) -> Tensor:
        if answer.sick:
            return answer.mean.mul(1 - self.decay)  # the drift that such a momentum comes of
        return x.drift(anchor) if answer.kept is None else answer.kept
