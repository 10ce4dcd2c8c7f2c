"""Muon for torch before 2.9: the same arguments, state and numbers as `torch.optim.Muon`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the quintic that is steepest at zero, from Keller Jordan's post


class Muon(Optimizer):
    """Momentum, made orthogonal: for 2-D matrices only; give embeddings, heads, norms and biases to AdamW.

        B = momentum*B + (1 - momentum)*g ;  x = x - lr * weight_decay * x - adjusted lr * orthogonal(B)

    with `g + momentum * (B - g)` in the place of B for Nesterov. State: `momentum_buffer` (B).

    >>> x = torch.nn.Parameter(torch.eye(2))
    >>> optimizer = Muon([x], lr=0.1, weight_decay=0.0)
    >>> x.sum().backward()
    >>> optimizer.step()
    >>> list(optimizer.state[x])
    ['momentum_buffer']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and momentum >= 0):
            raise ValueError(f"lr, weight_decay and momentum must be >= 0, not {lr}, {weight_decay} and {momentum}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn must be None, "original" or "match_rms_adamw", not {adjust_lr_fn!r}')
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim != 2:
                raise ValueError(f"Muon takes 2-D matrices; give the parameter of shape {tuple(p.shape)} to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        direction = orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(direction, alpha=-lr * lr_ratio(p.shape, group["adjust_lr_fn"]))


def lr_ratio(shape: torch.Size, adjust: str | None) -> float:
    """What keeps the size of the update alike for matrices of all shapes."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """[n, m] -> bf16 [n, m] with singular values near 1, by Newton-Schulz."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x  # the smaller Gram matrix of the two
    x = x / x.norm().clamp(min=eps)  # a new tensor: a bf16 momentum buffer must not be scaled in place
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
