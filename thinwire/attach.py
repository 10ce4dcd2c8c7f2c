"""Hooks on an optimizer, so that nothing in a training loop changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .fleet import Fleet
from .replica import Replica, local
from .table import Method
from .transport import Transport


def attach(
    model: nn.Module,
    optimizer: Any,
    method: Method,
    transport: Transport | None = None,
    offload: bool = False,
    weight: float = 1,
    clip: float | None = None,
    inside: Any = None,
) -> Fleet:
    """Make `model` one replica of a fleet; `optimizer.step()` then does the synchronising. `fleet.detach()` undoes it.

    `optimizer` may be a list: a step ends when the last has stepped. `clip` clips the gradient norm after gradient
    rows have met. `offload` keeps anchors and outer momentum in host memory. `inside` is the process group of ranks
    that hold equal copies of this replica, where the model is not wrapped in DDP yet.

    >>> import torch, thinwire as tw
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> fleet = tw.attach(model, optimizer, tw.desloc(every=2))
    >>> for _ in range(4):
    ...     model(torch.randn(8, 4)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> fleet.steps, fleet.bytes_sent
    (4, 40)
    """
    fleet = Fleet([Replica(model, optimizer, weight, inside)], method, transport, offload, clip)
    Hooks(fleet).register()
    return fleet


_ONCE = (
    "but gradients meet once a step: make all backward passes before the first optimizer steps, "
    "or use a method that exchanges parameters"
)


class Hooks:
    """Turns the steps of one replica's optimizers into steps of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.optimizers = fleet.replicas[0].optimizers
        self.stepped: dict[int, Callable[[], Tensor | None]] = {}  # a gradient that each has stepped with
        self.gradients: list[Callable[[], Tensor | None]] = []  # one of each optimizer's when the step began
        self.marks: dict[int, tuple[int, int] | None] = {}  # and how it stood then, clipped
        self.trial = False  # whether the step under way is none

    def register(self) -> None:
        if any(isinstance(getattr(hook, "__self__", None), Hooks) for o in self.optimizers for hook in _hooks_of(o)):
            raise ValueError("this optimizer is attached to a fleet already: call its fleet.detach() first")
        for optimizer in self.optimizers:
            self.fleet._hooks.append(optimizer.register_step_pre_hook(self.before))
            self.fleet._hooks.append(optimizer.register_step_post_hook(self.after))

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.trial = _is_trial(optimizer)
        if self.trial:
            return None
        if id(optimizer) in self.stepped or self._was_skipped(optimizer):
            self._note_skipped()
            self._end()  # a GradScaler skipped others: that step is over
        if self.fleet.gradient_rows() or self.fleet.clip is not None:
            _refuse_scaled(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._meet(optimizer)
            return None
        calls = 0

        def closure_then_meet() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and self.fleet.gradient_rows():
                raise ValueError(f"{type(optimizer).__name__} calls its closure several times a step, {_ONCE}")
            loss = closure()
            self._meet(optimizer)
            return loss

        return (args[0],), {**kwargs, "closure": closure_then_meet}

    def _meet(self, optimizer: Optimizer) -> None:
        """Once a step: what later optimizers hold then has met, and must be what they step with."""
        if not self.stepped:
            self.fleet.before_step()
            self.gradients = [_first_gradient(each) for each in self.optimizers]
            self.marks = {id(each): _mark(each) for each in self.optimizers}
        elif self.fleet.gradient_rows() and _is_other(optimizer, self._seen(optimizer)):
            raise ValueError(f"an optimizer steps with gradients of a backward pass after another's step, {_ONCE}")
        elif self.marks[id(optimizer)] != _mark(optimizer):
            ahead = [each for each in self.optimizers if id(each) not in self.stepped]
            self.fleet.clip_gradients(p for each in ahead for p in _parameters(each))

    def _seen(self, optimizer: Optimizer) -> Callable[[], Tensor | None]:
        """Its first gradient when the step began."""
        return next(seen for each, seen in zip(self.optimizers, self.gradients, strict=True) if each is optimizer)

    def _was_skipped(self, optimizer: Optimizer) -> bool:
        """Later ones have stepped already, and it and one of those hold gradients of another backward pass."""
        place = next(i for i, each in enumerate(self.optimizers) if each is optimizer)
        later = [each for each in self.optimizers[place + 1 :] if id(each) in self.stepped]
        anew = [
            each for each in later if _first_gradient(each)() is not None and _is_other(each, self.stepped[id(each)])
        ]
        return bool(anew) and _is_other(optimizer, self._seen(optimizer))

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.trial:
            return
        self.stepped[id(optimizer)] = _first_gradient(optimizer)
        if len(self.stepped) == len(self.optimizers):
            self._end()

    def _note_skipped(self) -> None:
        """A GradScaler decides for each worker by itself, and what has met is for all."""
        pairs = zip(self.optimizers, self.marks.values(), strict=True)
        skipped = [i for i, (each, mark) in enumerate(pairs) if mark is not None and id(each) not in self.stepped]
        if skipped and self.fleet.gradient_rows():
            text = (
                f"optimizer {skipped[0]} did not step, though its gradients had met: workers whose optimizer did step "
                "are another model now. Under a GradScaler use one optimizer, or bf16"
            )
            self.fleet.events.add("unfinished", self.fleet.steps_begun, text)

    def _end(self) -> None:
        self.stepped.clear()
        self.fleet.after_step()


def _is_trial(optimizer: Optimizer) -> bool:
    """A step of nothing, at a rate of 0: so torch's checkpoints have an optimizer without state make its state."""
    if optimizer.state or any(float(group.get("lr", 1)) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
    return bool(gradients) and not any(bool(local(gradient).any()) for gradient in gradients)


def _refuse_scaled(optimizer: Optimizer) -> None:
    """A GradScaler hands a fused optimizer scaled gradients, and whether to skip: each worker by itself."""
    if getattr(optimizer, "found_inf", None) is not None:
        raise ValueError(
            f"a fused {type(optimizer).__name__} unscales and skips within its own step, after the gradients have met: "
            "with a GradScaler use fused=False"
        )


def _hooks_of(optimizer: Optimizer) -> list[Any]:
    return list(optimizer._optimizer_step_pre_hooks.values())


def _is_other(optimizer: Optimizer, seen: Callable[[], Tensor | None]) -> bool:
    """Whether there was another backward pass since: its first gradient is another tensor."""
    return seen() is not _first_gradient(optimizer)()


def _first_gradient(optimizer: Optimizer) -> Callable[[], Tensor | None]:
    """A weak reference: gradients must not live longer for it."""
    found = next((p.grad for p in _parameters(optimizer) if p.grad is not None), None)
    return (lambda: None) if found is None else weakref.ref(found)


def _mark(optimizer: Optimizer) -> tuple[int, int] | None:
    """It changes when there was another backward pass, into a new gradient or into the old one."""
    found = _first_gradient(optimizer)()
    return None if found is None else (id(found), found._version)


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
