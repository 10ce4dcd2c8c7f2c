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
from .sparse import Entries, TopK
from .triton import usable

if TYPE_CHECKING:
    from .triton.dct import Table

FEW = 64  # coefficients of a block that are worth transforming back one by one


@dataclass(frozen=True, eq=False)
class Streamed:
    """`inner` on those of a row's tensors that are cut into full blocks. Entries: (blocks, k)."""

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
        self._place((index, sent.view(index.shape)), out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._place(self._read(payload), out)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], out: Tensor) -> None:
        """`weights` are numbers, or one number per tensor of the row."""
        read = [self._read(payload) for payload in payloads]
        shares = [self._per_block(weight) for weight in weights]
        if self._few(out.device):
            return self._merge_fused(read, shares, out)
        for strip, mine, tensor in self._strips(out):
            found = [(index[mine], values[mine]) for index, values in read]
            parts = [share[mine] if isinstance(share, Tensor) else share for share in shares]
            total = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
            strip.inverse(self.inner.mean(total, found, parts, parts), tensor)

    def _merge_fused(self, read: list[Entries], weights: Sequence[Weight], out: Tensor) -> None:
        from .triton import dct as kernels

        index, values = (torch.stack(part) for part in zip(*read, strict=True))
        merged = kernels.mean(index, values, _side_by_side(weights, out.device), self.inner.rule == "senders")
        kernels.inverse(index, merged, *self._places(out.device), out)

    def _select(self, buffer: Tensor) -> Entries:
        if self._fused(buffer.device):
            from .triton import dct as kernels

            index, values = kernels.forward(buffer, *self._places(buffer.device), self.inner.k)
            return (index if self.inner.k <= FEW else index.to(torch.int64)), values
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = torch.empty(self._count, self.inner.k, device=buffer.device)
        for strip, mine, tensor in self._strips(buffer):
            found = strip.forward(tensor)
            index[mine] = largest(found, self.inner.k)
            torch.gather(found, 1, index[mine], out=values[mine])
        return index, values

    def _place(self, sent: Entries, out: Tensor) -> None:
        if self._few(out.device):
            from .triton import dct as kernels

            return kernels.inverse(sent[0][None], sent[1][None], *self._places(out.device), out)
        for strip, mine, tensor in self._strips(out):
            if self.inner.k <= min(FEW, strip.blocks.wide):
                strip.put(few(sent[0][mine], sent[1][mine], strip.blocks.wide), tensor)
            else:
                found = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
                strip.inverse(found.scatter_(1, sent[0][mine], sent[1][mine]), tensor)

    def _write(self, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.write([index.view(-1)], self._streams, values.view(-1), self._kept)

    def _read(self, payload: Tensor) -> Entries:
        found, values = self.inner.read(payload, self._streams, self._kept)
        index = found[0] if self._few(payload.device) else found[0].to(torch.int64)
        return index.view(-1, self.inner.k), values.view(-1, self.inner.k)

    def _strips(self, buffer: Tensor) -> Iterator[tuple[Strip, slice, Tensor]]:
        """Each strip, its blocks among all, and its tensor."""
        first, outside = 0, self.plan.outside
        for which, cut in zip(self.plan.tensors, self.plan.blocks, strict=True):
            tensor = buffer[outside.offsets[which] : outside.offsets[which] + outside.sizes[which]]
            for strip in cut.strips(buffer.device):
                yield strip, slice(first + strip.mine.start, first + strip.mine.stop), tensor
            first += cut.count

    def _fused(self, device: torch.device) -> bool:
        """Whether kernels do it: what they multiply must be of these sizes."""
        return self._count > 0 and usable(device) and self.plan.blocks[0].wide in (16, 32, 64)

    def _few(self, device: torch.device) -> bool:
        """Whether kernels do the way back too."""
        return self._fused(device) and self.inner.k <= FEW

    def _places(self, device: torch.device) -> tuple[Table, Tensor]:
        return table(self.plan, device), cosines(self.plan.blocks[0].wide, device)

    def _per_block(self, weight: Weight) -> Weight:
        """(blocks, 1), so that it goes with the entries of a block."""
        if not isinstance(weight, Tensor):
            return weight
        mine = weight[torch.tensor(self.plan.tensors, dtype=torch.int64, device=weight.device)]
        counts = torch.tensor([cut.count for cut in self.plan.blocks], dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(counts, output_size=self._count)[:, None]

    @cached_property
    def _count(self) -> int:
        return sum(cut.count for cut in self.plan.blocks)

    @cached_property
    def _kept(self) -> Layout:
        return Layout(tuple(torch.Size([cut.count * self.inner.k]) for cut in self.plan.blocks))

    @cached_property
    def _streams(self) -> Streams:
        return [(self._kept.total, (self.inner.chunk - 1).bit_length())]


def few(index: Tensor, values: Tensor, wide: int) -> Tensor:
    """The blocks (blocks, wide, wide) that a few coefficients are: sums of outer products of cosines."""
    rows = cosines(wide, index.device)
    down = rows.index_select(0, index.view(-1) // wide).view(*index.shape, wide)
    across = rows.index_select(0, index.view(-1) % wide).view(*index.shape, wide)
    return product(down.transpose(1, 2), across.mul_(values[:, :, None]))


def _side_by_side(weights: Sequence[Weight], device: torch.device) -> Tensor:
    """(workers, blocks), or (workers, 1) where all are numbers."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        return torch.tensor(weights, dtype=torch.float32)[:, None].to(device)
    columns = [torch.as_tensor(weight, dtype=torch.float32, device=device).view(1, -1) for weight in weights]
    return torch.cat([column.expand(1, max(c.shape[1] for c in columns)) for column in columns])


@lru_cache(maxsize=64)
def table(plan: Plan, device: torch.device) -> Table:
    """Where each block lies in a buffer."""
    from .triton.dct import Table

    parts = []
    for which, cut in zip(plan.tensors, plan.blocks, strict=True):
        down = torch.arange(cut.down).repeat_interleave(cut.across) * cut.high
        across = torch.arange(cut.across).repeat(cut.down) * cut.wide
        base = plan.outside.offsets[which] + down * cut.columns + across
        stride = torch.full_like(base, cut.columns)
        parts.append(torch.stack([base, stride, (cut.rows - down).clamp(max=cut.high), cut.columns - across]))
    return Table(*torch.cat(parts, 1).to(device).unbind())
