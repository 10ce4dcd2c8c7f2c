"""Top-k of the cosine transform of full blocks, a strip at a time: the coefficients are never all there at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Layout, Weight
from .cosine import Strip, cosines, product
from .cut import Streams
from .plan import Plan
from .select import largest
from .sparse import Entries, TopK, side_by_side
from .triton import usable

if TYPE_CHECKING:
    from .triton.merge import Places

FEW = 64  # coefficients of a block that are worth transforming back one by one


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
        shares = [self._per_block(weight) for weight in weights]
        if self._fused(out.device):
            return self._merge_fused(index, values, _together(shares, out.device), out)
        for strip, mine, tensor in self._strips(out):
            found = [(i.to(torch.int64), v) for i, v in zip(index[:, mine], values[:, mine], strict=True)]
            parts = [share[mine] if isinstance(share, Tensor) else share for share in shares]
            total = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
            strip.inverse(self.inner.mean(total, found, parts, parts), tensor)

    def _select(self, buffer: Tensor) -> Entries:
        if self._fused(buffer.device):
            from .triton import dct as kernels

            return kernels.forward(buffer, *self._places(buffer.device))
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = torch.empty(self._count, self.inner.k, device=buffer.device)
        for strip, mine, tensor in self._strips(buffer):
            found = strip.forward(tensor)
            index[mine] = largest(found, self.inner.k)
            torch.gather(found, 1, index[mine], out=values[mine])
        return index, values

    def _place(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """The entries (1, blocks, k) of one worker."""
        if self._fused(out.device):
            return self._merge_fused(index, values, side_by_side((1.0,), out.device), out)
        for strip, mine, tensor in self._strips(out):
            there, sent = index[0, mine].to(torch.int64), values[0, mine]
            if self.inner.k <= min(FEW, strip.blocks.wide):
                strip.put(few(there, sent, strip.blocks.wide), tensor)
            else:
                found = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
                strip.inverse(found.scatter_(1, there, sent), tensor)

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

    def _strips(self, buffer: Tensor) -> Iterator[tuple[Strip, slice, Tensor]]:
        """Each strip, its blocks among all, and its matrix."""
        first = 0
        for piece in self.plan.pieces:
            tensor = piece.view(buffer)
            for strip in piece.blocks.strips(buffer.device):
                yield strip, slice(first + strip.mine.start, first + strip.mine.stop), tensor
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


def few(index: Tensor, values: Tensor, wide: int) -> Tensor:
    """The blocks (blocks, wide, wide) that a few coefficients are: sums of outer products of cosines."""
    rows = cosines(wide, index.device)
    down = rows.index_select(0, index.view(-1) // wide).view(*index.shape, wide)
    across = rows.index_select(0, index.view(-1) % wide).view(*index.shape, wide)
    return product(down.transpose(1, 2), across.mul_(values[:, :, None]))


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
