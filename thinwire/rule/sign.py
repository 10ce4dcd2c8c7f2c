"""Gradients of which the sign of the mean is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..live import Live
from .base import Rule, Scope
from .reduced import Reduced
from .state import State


@dataclass(frozen=True)
class Sign(Rule):
    """Gradients: sends `lr * g`, and hands the sign of the mean to plain SGD.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.grads, tw.Every(1), Sign()))
    grads | every 1 | Sign() | Float32()
    """

    keeps_rest = False
    signs = True

    def check(self, x: Live) -> None:
        for optimizer in x.replica.optimizers:
            plain = isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
            if not plain:
                raise ValueError(
                    f"demo hands plain SGD the sign of the update, but the optimizer is {type(optimizer).__name__}: "
                    "use torch.optim.SGD(params, lr, momentum=0)"
                )

    def init(self, x: Live, scope: Scope) -> State:
        return {}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        self.check(x)  # again: a schedule, or a new group, may have brought momentum
        message = x.read()
        for view, lr in zip(x.layout.views(message), x.rates(), strict=True):
            view.mul_(lr)
        return message

    def uses_own(self, scope: Scope) -> bool:
        return False

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        x.write(answer.mean.sign_(), answer.held)
