"""The discrete cosine transform of blocks of a tensor, and any codec on its coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sqrt

import torch
from torch import Tensor

from .base import Codec, Layout, Weight
from .sparse import TopK

STEP = 1 << 20  # values transformed at once on a CPU: what stays in its caches


class DCT(Codec):
    """`inner` on the orthonormal DCT-II of blocks: `chunk` x `chunk` of a matrix, rows of `chunk` of a vector.

    An axis shorter than `chunk` is taken whole, a longer one padded with zeros to a multiple of it; more than two
    axes are read as (first, rest). With `inner` a TopK(k), k of each full block are kept, whatever its own chunk.
    Payloads are merged as coefficients and transformed back once.

    >>> layout = Layout((torch.Size([2, 2]),), align=64)
    >>> codec, buffer = DCT(TopK(1)), layout.zeros(torch.device("cpu"))
    >>> buffer[:4] = 1.0
    >>> codec.decode(codec.encode(buffer, layout), layout)[:4]
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, inner: Codec, chunk: int = 64) -> None:
        if not 1 <= chunk <= 256:
            raise ValueError(f"DCT transforms blocks of 1 to 256 along an axis, not {chunk}")
        if isinstance(inner, TopK):
            inner = TopK(inner.k, chunk * chunk, inner.values, inner.rule)
        self.inner, self.chunk = inner, chunk
        self.align = chunk

    def size(self, layout: Layout) -> int:
        return self.inner.size(self._coefficients(layout))

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return self.inner.encode(self.forward(buffer, layout), self._coefficients(layout))

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        payload, own = self.inner.encode_with_own(self.forward(buffer, layout), self._coefficients(layout))
        return payload, self.inverse(own, layout)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        return self.inverse(self.inner.decode(payload, self._coefficients(layout)), layout)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        """As Codec.merge; a weight given per value must be the same throughout a tensor."""
        inside = self._coefficients(layout)
        spread = [_per_coefficient(weight, layout, self._plan(layout)) for weight in weights]
        return self.inverse(self.inner.merge(payloads, spread, inside), layout)

    def forward(self, buffer: Tensor, layout: Layout) -> Tensor:
        """A buffer -> its coefficients, in the layout of `inner`."""
        inside = self._coefficients(layout)
        out = inside.zeros(buffer.device)
        with exact(buffer.device):
            for blocks, values, found in self._pairs(buffer, out, layout):
                blocks.forward(values, found)
        return out

    def inverse(self, coefficients: Tensor, layout: Layout) -> Tensor:
        """The other way."""
        out = layout.zeros(coefficients.device)
        with exact(out.device):
            for blocks, values, found in self._pairs(out, coefficients, layout):
                blocks.inverse(found, values)
        return out

    def _pairs(self, buffer: Tensor, coefficients: Tensor, layout: Layout) -> Iterator[tuple[Blocks, Tensor, Tensor]]:
        plan = self._plan(layout)
        views, found = layout.views(buffer), plan.layout.views(coefficients)
        for place, which in enumerate(plan.order):
            if views[which].numel():
                yield plan.blocks[place], views[which], found[place]

    def _plan(self, layout: Layout) -> Plan:
        align = 1 if isinstance(self.inner, TopK) else self.inner.align
        return _plan(layout, self.chunk, align)

    def _coefficients(self, layout: Layout) -> Layout:
        return self._plan(layout).layout

    def __repr__(self) -> str:
        return f"DCT({self.inner!r}, chunk={self.chunk})"


@dataclass(frozen=True)
class Blocks:
    """One tensor read as a matrix and cut into `down` x `across` blocks of `high` x `wide`."""

    rows: int
    columns: int
    high: int
    wide: int

    @property
    def down(self) -> int:
        return -(-self.rows // self.high)

    @property
    def across(self) -> int:
        return -(-self.columns // self.wide)

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        return self.down, self.across, self.high, self.wide

    def forward(self, values: Tensor, out: Tensor) -> None:
        """The tensor -> (blocks, high * wide) coefficients."""
        matrix, target = values.view(self.rows, self.columns), out.view(self._grid)
        left, right = cosines(self.high, values.device), cosines(self.wide, values.device).T
        for strips in self._strips(values.device):
            part = self._padded(matrix[strips.start * self.high : strips.stop * self.high])
            piece = part.view(-1, self.high, self.across, self.wide).transpose(1, 2)
            target[strips] = left @ (piece @ right)

    def inverse(self, coefficients: Tensor, out: Tensor) -> None:
        matrix, source = out.view(self.rows, self.columns), coefficients.view(self._grid)
        left, right = cosines(self.high, out.device).T, cosines(self.wide, out.device)
        for strips in self._strips(out.device):
            part = (left @ (source[strips] @ right)).transpose(1, 2)
            target = matrix[strips.start * self.high : strips.stop * self.high]
            target.copy_(part.reshape(-1, self.across * self.wide)[: len(target), : self.columns])

    def _strips(self, device: torch.device) -> list[slice]:
        """Whole rows of blocks, a few at a time on a CPU."""
        step = max(1, STEP // (self.high * self.across * self.wide)) if device.type == "cpu" else self.down
        return [slice(at, min(at + step, self.down)) for at in range(0, self.down, step)]

    def _padded(self, part: Tensor) -> Tensor:
        right, below = -self.columns % self.wide, -len(part) % self.high
        return torch.nn.functional.pad(part, (0, right, 0, below)) if right or below else part


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """fp32 matrix products, whatever precision the user has chosen for training."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass(frozen=True)
class Plan:
    """The tensors in the order of their coefficients: largest blocks first, so that equal blocks lie together."""

    order: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    layout: Layout


@lru_cache(maxsize=256)
def _plan(layout: Layout, chunk: int, align: int) -> Plan:
    cuts = [_blocks(shape, chunk) for shape in layout.shapes]
    order = sorted(range(len(cuts)), key=lambda which: -cuts[which].high * cuts[which].wide)
    chosen = tuple(cuts[which] for which in order)
    shapes = tuple(torch.Size([b.down * b.across, b.high * b.wide]) for b in chosen)
    return Plan(tuple(order), chosen, Layout(shapes, align, blocks=True))


def _blocks(shape: torch.Size, chunk: int) -> Blocks:
    rows = shape[0] if len(shape) > 1 else 1
    columns = shape.numel() // rows if rows else 0
    return Blocks(rows, columns, max(1, min(rows, chunk)), max(1, min(columns, chunk)))


@lru_cache(maxsize=256)
def cosines(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II matrix, fp32 (frequency, place), worked out in double precision."""
    rows = [
        [sqrt((1 if k == 0 else 2) / size) * cos(pi * ((2 * n + 1) * k % (4 * size)) / (2 * size)) for n in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32).to(device)


def _per_coefficient(weight: Weight, layout: Layout, plan: Plan) -> Weight:
    if not isinstance(weight, Tensor):
        return weight
    out = torch.zeros(plan.layout.total, dtype=weight.dtype, device=weight.device)
    sources = layout.views(weight)
    for view, which in zip(plan.layout.views(out), plan.order, strict=True):
        if view.numel():
            view.copy_(sources[which].view(-1)[:1].view(1, 1).expand_as(view))
    return out
