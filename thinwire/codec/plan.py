"""Which parts of a row's tensors are transformed together, and where their coefficients go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .base import Layout, on_host
from .cosine import Blocks


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, or all of it, as a matrix in the row's buffer."""

    tensor: int
    first: int  # its first value in the buffer
    stride: int  # from one of its rows to the next
    blocks: Blocks

    def view(self, buffer: Tensor) -> Tensor:
        """(rows, columns)"""
        return buffer[self.first :].as_strided((self.blocks.rows, self.blocks.columns), (self.stride, 1))


@dataclass(frozen=True, eq=False)
class Plan:
    """Some of a row's pieces, largest blocks first, so that equal blocks lie together."""

    pieces: tuple[Piece, ...]
    inside: Layout  # of the coefficients, one block a row
    batches: tuple[Batch, ...]

    @property
    def tensors(self) -> list[int]:
        """Whose piece each is."""
        return [piece.tensor for piece in self.pieces]


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbours that are stacked and transformed as one tall matrix: hundreds of small vectors above all."""

    pieces: tuple[Piece, ...]
    blocks: Blocks  # of the tall matrix
    first: int  # of its coefficients
    whole: bool  # whether its rows are rows of the buffer, seen as a matrix of that width

    def found(self, coefficients: Tensor) -> Tensor:
        shape = self.blocks.shape
        return coefficients[self.first : self.first + shape.numel()].view(shape)

    def read(self, buffer: Tensor) -> Tensor:
        """The tall matrix."""
        if self.whole:
            return buffer.view(-1, self.blocks.columns).index_select(0, rows(self, buffer.device))
        views = [piece.view(buffer) for piece in self.pieces]
        return views[0] if len(views) == 1 else torch.cat(views)

    def target(self, buffer: Tensor) -> Tensor:
        """Where to put a tall matrix before `write`."""
        if len(self.pieces) == 1:
            return self.pieces[0].view(buffer)
        return buffer.new_empty(self.blocks.rows, self.blocks.columns)

    def write(self, tall: Tensor, buffer: Tensor) -> None:
        if self.whole:
            buffer.view(-1, self.blocks.columns).index_copy_(0, rows(self, buffer.device), tall)
        elif len(self.pieces) > 1:
            views = [piece.view(buffer) for piece in self.pieces]
            torch._foreach_copy_(views, list(tall.split([len(view) for view in views])))


@lru_cache(maxsize=256)
@on_host
def rows(batch: Batch, device: torch.device) -> Tensor:
    starts = [piece.first // batch.blocks.columns for piece in batch.pieces]
    pieces = [torch.arange(at, at + p.blocks.rows) for at, p in zip(starts, batch.pieces, strict=True)]
    return torch.cat(pieces).to(device)


@lru_cache(maxsize=256)
def whole_plan(layout: Layout, chunk: int, align: int) -> Plan:
    """Of all tensors, each with its padding."""
    return _plan(layout, align, _pieces(layout, chunk, apart=False))


@lru_cache(maxsize=256)
def piece_plan(layout: Layout, chunk: int, full: bool) -> Plan:
    """Of the full blocks, or of the others: within a piece, all blocks have as many real values."""
    pieces = _pieces(layout, chunk, apart=True)
    return _plan(layout, 1, [p for p in pieces if full == (p.blocks.real == chunk * chunk)])


def _pieces(layout: Layout, chunk: int, apart: bool) -> list[Piece]:
    """Of each tensor that is not empty; those that are padded taken apart or not."""
    found = []
    for which, (at, shape) in enumerate(zip(layout.offsets, layout.shapes, strict=True)):
        cut = Blocks.of(shape, chunk)
        for first, part in cut.parts() if apart else [(0, cut)]:
            found.append(Piece(which, at + first, cut.columns if cut.rows > 1 else part.columns, part))
    return [piece for piece in found if piece.blocks.count]


def _plan(layout: Layout, align: int, pieces: Sequence[Piece]) -> Plan:
    chosen = tuple(sorted(pieces, key=lambda piece: piece.blocks.order))
    real = tuple(piece.blocks.real for piece in chosen)
    inside = Layout(tuple(piece.blocks.shape for piece in chosen), align, real)
    return Plan(chosen, inside, tuple(_batches(layout, chosen, inside)))


def _batches(layout: Layout, pieces: tuple[Piece, ...], inside: Layout) -> Iterator[Batch]:
    """Runs of pieces that stack, without gaps between their coefficients."""
    at = 0
    while at < len(pieces):
        end = at + 1
        while end < len(pieces) and pieces[end - 1].blocks.stacks(pieces[end].blocks) and _touch(inside, end):
            end += 1
        mine, cut = pieces[at:end], pieces[at].blocks
        blocks = Blocks(sum(piece.blocks.rows for piece in mine), cut.columns, cut.high, cut.wide)
        whole = len(mine) > 1 and layout.align == cut.columns and all(piece.stride == cut.columns for piece in mine)
        yield Batch(mine, blocks, inside.offsets[at], whole)
        at = end


def _touch(layout: Layout, place: int) -> bool:
    return layout.sizes[place - 1] == layout.spans[place - 1]
