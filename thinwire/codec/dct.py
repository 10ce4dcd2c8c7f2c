"""The discrete cosine transform of blocks of a tensor, and any codec on its coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from .base import Codec, Layout, Weight
from .cosine import Blocks, exact
from .sparse import TopK
from .stream import Streamed


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
        return sum(way.size for way in self._ways(layout))

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        with exact(buffer.device):
            return torch.cat([way.encode(buffer, layout) for way in self._ways(layout)])

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        own = layout.zeros(buffer.device)
        with exact(buffer.device):
            return torch.cat([way.encode_with_own(buffer, layout, own) for way in self._ways(layout)]), own

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        out = layout.zeros(payload.device)
        ways = self._ways(layout)
        with exact(out.device):
            for way, part in zip(ways, payload.split([way.size for way in ways]), strict=True):
                way.decode(part, layout, out)
        return out

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        """As Codec.merge; a weight given per value must be the same throughout a tensor."""
        out = layout.zeros(payloads[0].device)
        ways = self._ways(layout)
        parts = [payload.split([way.size for way in ways]) for payload in payloads]
        heads = [_per_tensor(weight, layout) for weight in weights]
        with exact(out.device):
            for way, mine in zip(ways, zip(*parts, strict=True), strict=True):
                way.merge(mine, heads, layout, out)
        return out

    def _ways(self, layout: Layout) -> list[Streamed | Whole]:
        """Top-k of full blocks goes strip by strip; what is left, and any other codec, by all coefficients at once."""
        if not isinstance(self.inner, TopK):
            return [Whole(self.inner, plan(layout, self.chunk, self.inner.align, None))]
        full, rest = (plan(layout, self.chunk, 1, which) for which in (True, False))
        return [Streamed(self.inner, full.tensors, full.blocks), Whole(self.inner, rest)]

    def __repr__(self) -> str:
        return f"DCT({self.inner!r}, chunk={self.chunk})"


@dataclass(frozen=True)
class Plan:
    """Some of the tensors, largest blocks first, so that equal blocks lie together; and their coefficients' layout.

    `batches`: neighbours that can be stacked and transformed at once, hundreds of small vectors above all.
    """

    tensors: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    layout: Layout
    batches: tuple[slice, ...]


@lru_cache(maxsize=256)
def plan(layout: Layout, chunk: int, align: int, full: bool | None) -> Plan:
    """Of the tensors with full blocks, of those without, or of all; the empty ones have no coefficients."""
    cuts = [Blocks.of(shape, chunk) for shape in layout.shapes]
    mine = [which for which, cut in enumerate(cuts) if full is None or full == (cut.high == cut.wide == chunk)]
    order = sorted((which for which in mine if cuts[which].count), key=lambda which: cuts[which].order)
    chosen = tuple(cuts[which] for which in order)
    shapes = tuple(cut.shape for cut in chosen)
    return Plan(tuple(order), chosen, Layout(shapes, align, blocks=True), tuple(_batches(chosen, align)))


def _batches(blocks: tuple[Blocks, ...], align: int) -> Iterator[slice]:
    """Runs of equal blocks without padding below and without a gap behind their coefficients."""
    at = 0
    while at < len(blocks):
        cut, end = blocks[at], at + 1
        while cut.rows % cut.high == cut.shape.numel() % align == 0 and end < len(blocks) and blocks[end] == cut:
            end += 1
        yield slice(at, end)
        at = end


@dataclass(frozen=True)
class Whole:
    """`inner` on all coefficients of some tensors, in one buffer."""

    inner: Codec
    plan: Plan

    @property
    def size(self) -> int:
        return self.inner.size(self.plan.layout)

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return self.inner.encode(self._forward(buffer, layout), self.plan.layout)

    def encode_with_own(self, buffer: Tensor, layout: Layout, out: Tensor) -> Tensor:
        payload, own = self.inner.encode_with_own(self._forward(buffer, layout), self.plan.layout)
        self._inverse(own, layout, out)
        return payload

    def decode(self, payload: Tensor, layout: Layout, out: Tensor) -> None:
        self._inverse(self.inner.decode(payload, self.plan.layout), layout, out)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout, out: Tensor) -> None:
        """`weights` are numbers, or one number per tensor of the row."""
        spread = [self._per_coefficient(weight) for weight in weights]
        self._inverse(self.inner.merge(payloads, spread, self.plan.layout), layout, out)

    def _forward(self, buffer: Tensor, layout: Layout) -> Tensor:
        coefficients = self.plan.layout.zeros(buffer.device)
        for batch, tensors, found in self._batches(layout.views(buffer), coefficients):
            tall = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
            for strip in batch.strips(found.device):
                found[strip.mine] = strip.forward(tall)
        return coefficients

    def _inverse(self, coefficients: Tensor, layout: Layout, out: Tensor) -> None:
        for batch, tensors, found in self._batches(layout.views(out), coefficients):
            tall = tensors[0] if len(tensors) == 1 else torch.empty(batch.rows, batch.columns, device=out.device)
            for strip in batch.strips(found.device):
                strip.inverse(found[strip.mine], tall)
            if len(tensors) > 1:
                torch._foreach_copy_(tensors, list(tall.view(len(tensors), *tensors[0].shape).unbind()))

    def _batches(self, tensors: list[Tensor], coefficients: Tensor) -> Iterator[tuple[Blocks, list[Tensor], Tensor]]:
        """Each batch as one tall matrix: its blocks, its tensors and its coefficients."""
        for batch in self.plan.batches:
            members = [tensors[which] for which in self.plan.tensors[batch]]
            cut, first = self.plan.blocks[batch.start], self.plan.layout.offsets[batch.start]
            tall = replace(cut, rows=cut.rows * len(members))
            yield tall, members, coefficients[first : first + tall.shape.numel()].view(tall.shape)

    def _per_coefficient(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        layout = self.plan.layout
        mine = weight[torch.tensor(self.plan.tensors, dtype=torch.int64, device=weight.device)]
        spans = torch.tensor(layout.spans, dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(spans, output_size=layout.total)


def _per_tensor(weight: Weight, layout: Layout) -> Weight:
    """One number per value -> one per tensor; that of an empty tensor means nothing."""
    if not isinstance(weight, Tensor):
        return weight
    first = torch.tensor(layout.offsets, dtype=torch.int64, device=weight.device)
    return weight[first.clamp_(max=max(0, layout.total - 1))] if layout.total else weight.new_zeros(len(layout.shapes))
