"""Top-k of the cosine transform by kernels: blocks are transformed and selected from without leaving the chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Weight, on_host
from .cosine import cosines
from .cut import Cut, cut
from .plan import Piece, Plan
from .sparse import Entries, TopK, side_by_side
from .whole import Whole

if TYPE_CHECKING:
    from .triton.dct import Tiles

WIDEST = 64  # an axis of a block that kernels hold
MOST = 128  # entries of a block, of all workers together, up to which they are multiplied one by one


@dataclass(frozen=True, eq=False)
class Fused:
    """`inner` on some pieces of a row's tensors, of `chunk` x `chunk` at most; payloads are those of `Whole`.

    Full blocks are to be put into a buffer before what is left: they may clear it.
    """

    inner: TopK
    plan: Plan
    chunk: int

    @cached_property
    def size(self) -> int:
        return self.inner.size(self.plan.inside)

    def encode(self, buffer: Tensor) -> Tensor:
        return self._write(*self._select(buffer))[0]

    def encode_with_own(self, buffer: Tensor, out: Tensor) -> Tensor:
        index, values = self._select(buffer)
        payload, sent = self._write(index, values)
        if self._few(1):
            self._spread(index[None], sent[None], side_by_side((1.0,), out.device), out)
        else:
            self.decode(payload, out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self.merge(payload[None], [1.0], out)

    def merge(self, payloads: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Payloads (workers, size); `weights` are numbers, or one number per tensor of the row."""
        if not self.plan.pieces:
            return
        few, full = self._few(len(payloads)), self._tiles(out.device).full
        if not few and not full:
            return Whole(self.inner, self.plan).merge(payloads, weights, out)
        plan = self._cut(out.device)
        found, values = self.inner.read(payloads, plan.streams, plan.values)
        shares = _together([self._per_block(weight) for weight in weights], out.device)
        put = self._spread if few else self._place
        put(plan.join(found), values, shares, out)

    def _select(self, buffer: Tensor) -> Entries:
        from .triton import dct as kernels

        return kernels.forward(buffer, self._tiles(buffer.device))

    def _write(self, index: Tensor, values: Tensor) -> Entries:
        plan = self._cut(index.device)
        return self.inner.write(plan.split(index), plan.streams, values, plan.values)

    def _spread(self, index: Tensor, values: Tensor, shares: Tensor, out: Tensor) -> None:
        from .triton import dct as kernels

        kernels.spread(index, values, shares, self.inner.rule == "senders", self._tiles(out.device), out)

    def _place(self, index: Tensor, values: Tensor, shares: Tensor, out: Tensor) -> None:
        """Many entries: they go where the values of their block belong, and are transformed there."""
        from .triton import dct, merge

        tiles = self._tiles(out.device)
        keeps = self._cut(out.device).chunks.keeps
        places = merge.Places.of(tiles.base, tiles.stride, self.chunk, keeps)
        merge.merge(index, values, shares, self.inner.rule == "senders", places, out.zero_())
        dct.inverse(out, tiles)

    def _few(self, workers: int) -> bool:
        return workers * self.inner.k <= MOST

    def _cut(self, device: torch.device) -> Cut:
        return cut(self.plan.inside, self.inner.chunk, self.inner.k, device)

    def _tiles(self, device: torch.device) -> Tiles:
        return tiles(self.plan, self._cut(device), self.chunk, device)

    def _per_block(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        mine = weight[torch.tensor(self.plan.tensors, dtype=torch.int64, device=weight.device)]
        counts = [piece.blocks.count for piece in self.plan.pieces]
        each = torch.tensor(counts, dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(each, output_size=sum(counts))


def _together(weights: Sequence[Weight], device: torch.device) -> Tensor:
    """(workers, blocks), or (workers, 1) where all are numbers."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        return side_by_side(tuple(weights), device)
    columns = [torch.as_tensor(weight, dtype=torch.float32, device=device).view(1, -1) for weight in weights]
    return torch.cat([column.expand(1, max(c.shape[1] for c in columns)) for column in columns])


@lru_cache(maxsize=64)
@on_host
def tiles(plan: Plan, cut: Cut, chunk: int, device: torch.device) -> Tiles:
    from .triton.dct import Tiles

    side = max(16, 1 << (chunk - 1).bit_length())
    sizes = sorted({size for piece in plan.pieces for size in (piece.blocks.high, piece.blocks.wide)}, reverse=True)
    waves = torch.zeros(max(1, len(sizes)), side, side, dtype=torch.float32)
    for wave, size in zip(waves, sizes, strict=False):
        wave[:size, :size] = cosines(size, wave.device)
    full = all(piece.blocks.real == side * side for piece in plan.pieces)
    lines = [_lines(piece, sizes) for piece in plan.pieces] or [torch.empty(0, 8, dtype=torch.int64)]
    base, stride, about = torch.cat(lines).split([1, 1, 6], 1)
    keeps, ends = cut.chunks.keeps.cpu(), cut.chunks.ends.cpu()
    about = torch.cat([about, keeps[:, None], (ends - keeps)[:, None]], 1).to(torch.int32)
    base, stride, about, waves = (x.contiguous().to(device) for x in (base.view(-1), stride.view(-1), about, waves))
    most = int(keeps.max()) if len(keeps) else 0
    return Tiles(base, stride, about, waves, full, most, int(keeps.sum()))


def _lines(piece: Piece, sizes: list[int]) -> Tensor:
    """int64 (blocks, 8): first value, stride, high, wide, real rows and columns, and which cosines both axes have."""
    b = piece.blocks
    down = torch.arange(b.down).repeat_interleave(b.across) * b.high
    across = torch.arange(b.across).repeat(b.down) * b.wide
    same = [piece.stride, b.high, b.wide, min(b.rows, b.high), min(b.columns, b.wide)]
    same += [sizes.index(b.high), sizes.index(b.wide)]
    base = piece.first + down * piece.stride + across
    return torch.cat([base[:, None], torch.tensor(same).expand(b.count, -1)], 1)
