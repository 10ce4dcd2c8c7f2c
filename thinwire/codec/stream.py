"""Top-k of the cosine transform of full blocks, a strip at a time: the coefficients are never all there at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Layout, Weight
from .cosine import Strip, cosines
from .cut import Streams
from .plan import Plan
from .select import largest
from .sparse import Entries, TopK, side_by_side
from .triton import usable

if TYPE_CHECKING:
    from .triton.merge import Places


@dataclass(frozen=True, eq=False)
class Streamed:
    """`inner` on those pieces of a row's tensors that are full blocks. Entries: (blocks, k)."""

    inner: TopK
    plan: Plan

    @cached_property
    def size(self) -> int:
        return self.inner.written(self._streams, self._kept)

    def encode(self, buffer: Tensor) -> Tensor:
        return self._write(*self._select(buffer))[0]

    def encode_with_own(self, buffer: Tensor, out: Tensor) -> Tensor:
        index, values = self._select(buffer)
        payload, sent = self._write(index, values)
        self._place(index[None], sent.view(1, *index.shape), out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._place(*self._read(payload[None]), out)

    def merge(self, payloads: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Payloads (workers, size); `weights` are numbers, or one number per tensor of the row."""
        index, values = self._read(payloads)
        if self._fused(out.device):
            shares = _together([self._per_block(weight) for weight in weights], out.device)
            return self._merge_fused(index, values, shares, out)
        self._merge_strips(index, values, weights, out)

    def _merge_strips(self, index: Tensor, values: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Entries (workers, blocks, k), a strip at a time, in the same memory each time."""
        most = max((strip.size for strip, _, _, _ in self._strips(out)), default=0)
        spare = [torch.zeros(most, device=out.device) for _ in range(2)]
        for strip, mine, tensor, which in self._strips(out):
            where = strip.places(index[:, mine].to(torch.int64))
            found = list(zip(where, values[:, mine].flatten(1), strict=True))
            shares = [weight[which] if isinstance(weight, Tensor) else weight for weight in weights]
            merged = self.inner.mean([zeros[: strip.size] for zeros in spare], found, shares, shares)
            strip.inverse_in_place(merged, tensor)
            merged.scatter_(0, where.view(-1), 0.0)

    def _select(self, buffer: Tensor) -> Entries:
        if self._fused(buffer.device):
            from .triton import dct as kernels

            return kernels.forward(buffer, *self._places(buffer.device))
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = torch.empty(self._count, self.inner.k, device=buffer.device)
        for strip, mine, tensor, _ in self._strips(buffer):
            found = strip.forward(tensor)
            index[mine] = largest(found, self.inner.k)
            torch.gather(found, 1, index[mine], out=values[mine])
        return index, values

    def _place(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """The entries (1, blocks, k) of one worker."""
        if self._fused(out.device):
            return self._merge_fused(index, values, side_by_side((1.0,), out.device), out)
        self._merge_strips(index, values, [1.0], out)

    def _merge_fused(self, index: Tensor, values: Tensor, weights: Tensor, out: Tensor) -> None:
        """Coefficients go where the values of their block belong, and are transformed there."""
        from .triton import dct, merge

        places, wave = self._places(out.device)
        merge.merge(index.flatten(1), values.flatten(1), weights, self.inner.rule == "senders", places, out)
        dct.inverse(out, places, wave)

    def _write(self, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.write([index.view(-1)], self._streams, values.view(-1), self._kept)

    def _read(self, payloads: Tensor) -> Entries:
        """(workers, blocks, k)"""
        found, values = self.inner.read(payloads, self._streams, self._kept)
        shape = (len(payloads), self._count, self.inner.k)
        return found[0].view(shape), values.view(shape)

    def _strips(self, buffer: Tensor) -> Iterator[tuple[Strip, slice, Tensor, int]]:
        """Each strip, its blocks among all, its matrix, and which tensor that is of."""
        first = 0
        for piece in self.plan.pieces:
            tensor = piece.view(buffer)
            for strip in piece.blocks.strips(buffer.device):
                yield strip, slice(first + strip.mine.start, first + strip.mine.stop), tensor, piece.tensor
            first += piece.blocks.count

    def _fused(self, device: torch.device) -> bool:
        """Whether kernels do it: what they multiply must be of these sizes."""
        return self._count > 0 and usable(device) and self.plan.pieces[0].blocks.wide in (16, 32, 64)

    def _places(self, device: torch.device) -> tuple[Places, Tensor]:
        return places(self.plan, self.inner.k, device), cosines(self.plan.pieces[0].blocks.wide, device)

    def _per_block(self, weight: Weight) -> Weight:
        """(blocks, 1), so that it goes with the entries of a block."""
        if not isinstance(weight, Tensor):
            return weight
        mine = weight[torch.tensor(self.plan.tensors, dtype=torch.int64, device=weight.device)]
        counts = [piece.blocks.count for piece in self.plan.pieces]
        each = torch.tensor(counts, dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(each, output_size=self._count)[:, None]

    @cached_property
    def _count(self) -> int:
        return sum(piece.blocks.count for piece in self.plan.pieces)

    @cached_property
    def _kept(self) -> Layout:
        return Layout(tuple(torch.Size([piece.blocks.count * self.inner.k]) for piece in self.plan.pieces))

    @cached_property
    def _streams(self) -> Streams:
        return [(self._kept.total, (self.inner.chunk - 1).bit_length())]


def _together(weights: Sequence[Weight], device: torch.device) -> Tensor:
    """(workers, blocks), or (workers, 1) where all are numbers."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        return side_by_side(tuple(weights), device)
    columns = [torch.as_tensor(weight, dtype=torch.float32, device=device).view(1, -1) for weight in weights]
    return torch.cat([column.expand(1, max(c.shape[1] for c in columns)) for column in columns])


@lru_cache(maxsize=64)
def places(plan: Plan, k: int, device: torch.device) -> Places:
    """Where each block lies in a buffer."""
    from .triton.merge import Places

    parts = []
    for piece in plan.pieces:
        cut = piece.blocks
        down = torch.arange(cut.down).repeat_interleave(cut.across) * cut.high
        across = torch.arange(cut.across).repeat(cut.down) * cut.wide
        base = piece.first + down * piece.stride + across
        parts.append(torch.stack([base, torch.full_like(base, piece.stride), torch.full_like(base, k)]))
    base, stride, keeps = torch.cat(parts, 1).to(device).unbind()
    return Places.of(base, stride, plan.pieces[0].blocks.wide, keeps)
