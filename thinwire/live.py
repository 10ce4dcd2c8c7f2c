"""The live tensors of a row as one flat buffer: where the engine reads from the model, and writes to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .codec.base import Layout
from .header import checksum, wrapped
from .replica import Replica, View, local


class Spare:
    """One used buffer, for the next message that fits into it: host memory only.

    Fresh memory costs a page fault every 4 kB; a GPU's allocator keeps it by itself.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def take(self, layout: Layout, device: torch.device) -> Tensor:
        """Its gaps are zero; what lies between them is to be overwritten."""
        buffer = self.buffer
        if device.type != "cpu" or buffer is None or buffer.numel() < layout.total:
            return layout.zeros(device)
        self.buffer = None
        buffer = buffer[: layout.total]
        return buffer if layout.total == layout.values else buffer.zero_()

    def give(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu" and (self.buffer is None or self.buffer.numel() < buffer.numel()):
            self.buffer = buffer


@dataclass(frozen=True)
class Known:
    """A number taken from a buffer in passing, and true until the buffer is written to."""

    buffer: Tensor
    version: int
    value: float

    def of(self, buffer: Tensor) -> bool:
        return buffer is self.buffer and buffer._version == self.version


class Live:
    """The live tensors of one row on one replica, read and written as one flat fp32 buffer.

    On the lead of an island the buffer is that of the whole tensors, and the other ranks take part in every call.

    >>> from thinwire import params
    >>> model = torch.nn.Linear(2, 1)
    >>> live = Live(params, Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)), align=1)
    >>> live.names, live.read().shape
    (['weight', 'bias'], torch.Size([3]))
    >>> live.write(torch.tensor([1.0, 2.0, 3.0]))
    >>> model.weight.tolist(), model.bias.tolist()
    ([[1.0, 2.0]], [3.0])
    """

    def __init__(self, view: View, replica: Replica, align: int, spare: Spare | None = None) -> None:
        self.view, self.replica = view, replica
        self.spare = spare or Spare()
        self.names = view.names(replica)
        self.table = view.table(replica)
        self.layout = Layout(tuple(self._shape(self.table[name]) for name in self.names), align)
        self.device = replica.device
        self._norm: Known | None = None
        self._checksum: Known | None = None

    def _shape(self, tensor: Tensor) -> torch.Size:
        return tensor.shape if self.replica.is_whole else local(tensor).shape

    def tensors(self) -> list[Tensor | None]:
        """This rank's parts."""
        return [self.view.tensor(self.replica, name, self.table[name]) for name in self.names]

    def each(self) -> Iterable[Tensor | None]:
        """The tensors as they stand in the buffer: on a lead they are gathered one by one."""
        return self.tensors() if self.replica.line is None else self.replica.line.read(self)

    def present(self) -> list[bool]:
        if self.view.kind not in ("grads", "moment"):  # only these come to be during training
            return [True] * len(self.names)
        return [tensor is not None for tensor in self.tensors()]

    def dtypes(self) -> list[str]:
        return [str(self.table[name].dtype).removeprefix("torch.") for name in self.names]

    def read(self) -> Tensor:
        """A new buffer with the present values; zeros where a tensor is absent."""
        buffer = self.spare.take(self.layout, self.device)
        if buffer.is_meta:  # of a model that is only being priced
            return buffer
        pairs = []
        for view, tensor in zip(self.layout.views(buffer), self.each(), strict=True):
            if tensor is None:
                view.zero_()
            elif self.replica.line is not None:
                view.copy_(tensor)  # at once, so that one gathered tensor is held at a time
            else:
                pairs.append((view, tensor))
        _copy_all(pairs)
        return buffer

    def drift(self, anchor: Tensor) -> Tensor:
        """A new buffer with `anchor - x`, the anchor rounded as x is: no training is no drift."""
        buffer = self.spare.take(self.layout, self.device)
        if (flat := self._flat()) is not None:
            self._drift_in_strips(buffer, anchor, flat)
            return buffer
        for parts in zip(self.each(), self.layout.views(anchor), self.layout.views(buffer), strict=True):
            _subtract(*parts)
        return buffer

    def _drift_in_strips(self, buffer: Tensor, anchor: Tensor, flat: list[Tensor | None]) -> None:
        """And, while a strip is in the cache, the sums that a header needs of it."""
        square, words = 0.0, 0
        for strip in self.layout.strips:
            for tensor, first, last in strip.pieces:
                x, here = flat[tensor], self.layout.values_of(tensor, first, last)
                _subtract(None if x is None else x[first:last], anchor[here], buffer[here])
            made = buffer[strip.span]
            square += float(torch.dot(made, made))
            words += checksum(anchor[strip.span])
        self._norm = Known(buffer, buffer._version, math.sqrt(square))
        self._checksum = Known(anchor, anchor._version, wrapped(words))

    def norm(self, buffer: Tensor) -> float:
        """Of a message; known already if `drift` made it just now, and nobody has written to it since."""
        known, self._norm = self._norm, None
        norm = known.value if known and known.of(buffer) else float(torch.linalg.vector_norm(buffer))
        if not math.isfinite(norm):  # the square of a large value may have no room in fp32
            norm = float(torch.linalg.vector_norm(buffer, dtype=torch.float64))
        return norm

    def checksum(self, buffer: Tensor) -> int:
        """Of a shared copy; known already if `drift` has just read it."""
        known, self._checksum = self._checksum, None
        return int(known.value) if known and known.of(buffer) else checksum(buffer)

    def _flat(self) -> list[Tensor | None] | None:
        """The tensors as vectors, where the work can be done strip by strip: on a CPU, and in one piece."""
        if self.device.type != "cpu" or self.replica.line is not None:
            return None
        tensors = self.tensors()
        if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
            return None
        return [None if tensor is None else tensor.view(-1) for tensor in tensors]

    def write(self, buffer: Tensor, held: list[bool] | None = None) -> None:
        """x = buffer. There is a gradient then where `held` says that some worker has one, and nowhere else."""
        wanted = held or [True] * len(self.names)
        if self.view.kind == "grads":
            self.replica.match_gradients(self.names, wanted)
        tensors, views = self.tensors(), self.layout.views(buffer)
        chosen = [needed and x is not None for needed, x in zip(wanted, tensors, strict=True)]
        if self.replica.line is not None:
            self.replica.line.write(self, views, chosen)
        else:
            _copy_all([(x, b) for x, b, c in zip(tensors, views, chosen, strict=True) if c and x is not None])

    def write_along(self, buffer: Tensor, compute: Callable[[slice], None]) -> None:
        """x = buffer, which `compute` makes slice by slice: on a CPU in strips, each written while it is at hand."""
        if (flat := self._flat()) is None:
            compute(slice(None))
            return self.write(buffer)
        for strip in self.layout.strips:
            compute(strip.span)
            pairs = []
            for tensor, first, last in strip.pieces:
                if (x := flat[tensor]) is not None:
                    pairs.append((x[first:last], buffer[self.layout.values_of(tensor, first, last)]))
            _copy_all(pairs)

    def add(self, buffer: Tensor, scales: list[float] | None = None) -> None:
        """x += scale * buffer, in fp32 and then rounded as x is."""
        factors = scales or [1.0] * len(self.names)
        if self.replica.line is not None:
            self.replica.line.add(self, self.layout.views(buffer), factors)
            return
        for tensor, view, factor in zip(self.tensors(), self.layout.views(buffer), factors, strict=True):
            if tensor is not None:
                add_scaled(tensor, view, factor)

    def keep_above_zero(self) -> None:
        """x = max(x, 0)."""
        if self.replica.line is not None:
            self.write(self.read().clamp_(min=0))
            return
        for tensor in self.tensors():
            if tensor is not None:
                tensor.clamp_(min=0)

    def mix(self, buffer: Tensor, keep: float) -> None:
        """x = keep * x + (1 - keep) * buffer, in fp32 and then rounded as x is."""
        if self.replica.line is not None:
            self.write(self.read().mul_(keep).add_(buffer, alpha=1 - keep))
            return
        for tensor, view in zip(self.tensors(), self.layout.views(buffer), strict=True):
            if tensor is not None and tensor.dtype is torch.float32:
                tensor.mul_(keep).add_(view, alpha=1 - keep)
            elif tensor is not None:
                tensor.copy_(tensor.float().mul_(keep).add_(view, alpha=1 - keep))

    def drop_gradients(self) -> None:
        """Every worker skips the inner step that is due."""
        if self.replica.line is not None:
            self.replica.line.order("drop_gradients", self)
        self.replica.drop_gradients()

    def restart_states(self) -> None:
        """Start the optimizer state of these parameters anew."""
        if self.replica.line is not None:
            self.replica.line.order("restart_states", self)
        self.replica.restart_states(self.names)

    def set_steps(self, steps: Sequence[float]) -> None:
        """How many steps these parameters' optimizer states are to say that they have taken."""
        if self.replica.line is not None:
            self.replica.line.order("set_steps", self, steps)
        self.replica.set_steps(self.names, steps)

    def rates(self) -> list[float]:
        """The learning rate of each tensor."""
        return [float(group["lr"]) if group else 0.0 for group in self._groups()]

    def decays(self) -> list[float]:
        """By how much this state shrinks in one optimizer step: beta, from each tensor's parameter group."""
        states = [self.view.state_of(self.replica, name) or "" for name in self.names]
        return [_beta(state, group or {}) for state, group in zip(states, self._groups(), strict=True)]

    def _groups(self) -> list[dict[str, Any] | None]:
        found = [self.replica.group_of(name) for name in self.names]
        return [pair[1] if pair else None for pair in found]


def _subtract(x: Tensor | None, start: Tensor, out: Tensor) -> None:
    """`start - x`, rounded as x is; nothing where there is no x."""
    if x is None:
        out.zero_()
    elif x.dtype is torch.float32:
        torch.sub(start, x, out=out)
    else:
        out.copy_(start.to(x.dtype)).sub_(x)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Each second into its first."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])


def add_scaled(tensor: Tensor, more: Tensor, scale: float) -> None:
    """`tensor += scale * more`, in fp32 and then rounded as the tensor is."""
    tensor.copy_(torch.add(tensor.float(), more, alpha=scale))


def _beta(state: str, group: dict[str, Any]) -> float:
    if state == "momentum_buffer" and "momentum" in group:
        return float(group["momentum"])
    if state in ("exp_avg", "exp_avg_sq") and "betas" in group:
        return float(group["betas"][("exp_avg", "exp_avg_sq").index(state)])
    raise ValueError(f"the parameter group names no decay for the state {state}: synchronise it with delay=0")
