"""Which tensors of a row are transformed together, and where their coefficients go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .base import Layout
from .cosine import Blocks


@dataclass(frozen=True, eq=False)
class Plan:
    """Some of a row's tensors, largest blocks first, so that equal blocks lie together."""

    outside: Layout  # of the row
    tensors: tuple[int, ...]
    blocks: tuple[Blocks, ...]
    inside: Layout  # of the coefficients, one block a row
    batches: tuple[Batch, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbours that are stacked and transformed as one tall matrix: hundreds of small vectors above all."""

    outside: Layout
    tensors: tuple[int, ...]
    blocks: Blocks  # of the tall matrix
    first: int  # of its coefficients

    @property
    def whole(self) -> bool:
        """Whether its rows are rows of the buffer, seen as a matrix of that width."""
        return len(self.tensors) > 1 and self.blocks.columns == self.outside.align

    def found(self, coefficients: Tensor) -> Tensor:
        shape = self.blocks.shape
        return coefficients[self.first : self.first + shape.numel()].view(shape)

    def read(self, buffer: Tensor) -> Tensor:
        """The tall matrix."""
        if self.whole:
            return buffer.view(-1, self.blocks.columns).index_select(0, rows(self, buffer.device))
        views = self._views(buffer)
        return views[0] if len(views) == 1 else torch.cat(views)

    def target(self, buffer: Tensor) -> Tensor:
        """Where to put a tall matrix before `write`."""
        if len(self.tensors) == 1:
            return self._views(buffer)[0]
        return torch.empty(self.blocks.rows, self.blocks.columns, device=buffer.device)

    def write(self, tall: Tensor, buffer: Tensor) -> None:
        if self.whole:
            buffer.view(-1, self.blocks.columns).index_copy_(0, rows(self, buffer.device), tall)
        elif len(self.tensors) > 1:
            views = self._views(buffer)
            torch._foreach_copy_(views, list(tall.view(-1).split([len(view) for view in views])))

    def _views(self, buffer: Tensor) -> list[Tensor]:
        at, sizes = self.outside.offsets, self.outside.sizes
        return [buffer[at[which] : at[which] + sizes[which]] for which in self.tensors]


@lru_cache(maxsize=256)
def rows(batch: Batch, device: torch.device) -> Tensor:
    wide, at, sizes = batch.blocks.columns, batch.outside.offsets, batch.outside.sizes
    pieces = [torch.arange(at[which] // wide, (at[which] + sizes[which]) // wide) for which in batch.tensors]
    return torch.cat(pieces).to(device)


@lru_cache(maxsize=256)
def plan(layout: Layout, chunk: int, align: int, full: bool | None) -> Plan:
    """Of the tensors with full blocks, of those without, or of all; empty ones have no coefficients."""
    cuts = [Blocks.of(shape, chunk) for shape in layout.shapes]
    mine = [which for which, cut in enumerate(cuts) if full is None or full == (cut.high == cut.wide == chunk)]
    order = tuple(sorted((which for which in mine if cuts[which].count), key=lambda which: cuts[which].order))
    chosen = tuple(cuts[which] for which in order)
    inside = Layout(tuple(cut.shape for cut in chosen), align, blocks=True)
    return Plan(layout, order, chosen, inside, tuple(_batches(layout, order, chosen, inside)))


def _batches(layout: Layout, order: tuple[int, ...], blocks: tuple[Blocks, ...], inside: Layout) -> Iterator[Batch]:
    """Runs of tensors that stack, without gaps between their coefficients."""
    at = 0
    while at < len(blocks):
        cut, end, height = blocks[at], at + 1, blocks[at].rows
        while end < len(blocks) and blocks[end - 1].stacks(blocks[end]) and _touch(inside, end):
            height += blocks[end].rows
            end += 1
        yield Batch(layout, order[at:end], Blocks(height, cut.columns, cut.high, cut.wide), inside.offsets[at])
        at = end


def _touch(layout: Layout, place: int) -> bool:
    return layout.sizes[place - 1] == layout.spans[place - 1]
