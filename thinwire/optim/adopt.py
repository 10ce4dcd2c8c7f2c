"""ADOPT (arXiv 2411.02853): Adam whose second moment is one step behind, so that any beta2 converges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class ADOPT(Optimizer):
    """The inner optimizer of the DES-LOC paper, with its defaults.

    The first gradient g of a parameter only sets v = g^2. Each later one does

        m = b1*m + (1-b1) * g / max(sqrt(v), eps) ;  x = x - lr*m ;  v = b2*v + (1-b2) * g^2

    so the v in use never holds the present gradient. State: `exp_avg` (m), `exp_avg_sq` (v) and `step`, the number of
    gradients seen. Weight decay is decoupled, as in AdamW. Zeroing all three starts a parameter afresh.

    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = ADOPT([x], lr=0.1)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     x.square().sum().backward()
    ...     optimizer.step()
    >>> x  # the second step moves by lr * (1 - b1) * g / |g|
    Parameter containing:
    tensor([0.9950, 0.9950, 0.9950], requires_grad=True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0021,
        betas: tuple[float, float] = (0.95, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and eps > 0):
            raise ValueError(f"lr and weight_decay must be >= 0 and eps > 0, not {lr}, {weight_decay} and {eps}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        # read before the counters move on; they are on the CPU, so nothing waits for a device
        fresh = [bool(self._state_of(p)["step"] == 0) for p in params]
        torch._foreach_add_([self.state[p]["step"] for p in params], 1)
        first = [p for p, is_fresh in zip(params, fresh, strict=True) if is_fresh]
        later = [p for p, is_fresh in zip(params, fresh, strict=True) if not is_fresh]
        for p in first:
            self.state[p]["exp_avg_sq"].copy_(p.grad.square())
        if later:
            self._update(later, group)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """The equations above, each over all tensors at once."""
        lr, (b1, b2) = float(group["lr"]), group["betas"]
        grads = [p.grad for p in params if p.grad is not None]
        m = [self.state[p]["exp_avg"] for p in params]
        v = [self.state[p]["exp_avg_sq"] for p in params]
        denominators = torch._foreach_sqrt(v)
        torch._foreach_clamp_min_(denominators, group["eps"])
        torch._foreach_lerp_(m, torch._foreach_div(grads, denominators), 1 - b1)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, m, alpha=-lr)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - b2)
