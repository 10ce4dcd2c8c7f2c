"""Top-k of the cosine transform of full blocks, a strip at a time: the coefficients are never all there at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Layout, Weight
from .cosine import Blocks, Strip, cosines, product
from .cut import Streams
from .select import largest
from .sparse import Entries, TopK
from .triton import usable

if TYPE_CHECKING:
    from .triton.dct import Table

FEW = 64  # coefficients of a block that are worth transforming back one by one


@dataclass(frozen=True)
class Streamed:
    """`inner` on those of a row's `tensors` that are cut into full blocks, as `blocks` says. Entries: (blocks, k)."""

    inner: TopK
    tensors: tuple[int, ...]
    blocks: tuple[Blocks, ...]

    @property
    def size(self) -> int:
        return self.inner.written(self._streams, self._kept)

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return self._write(*self._select(buffer, layout))[0]

    def encode_with_own(self, buffer: Tensor, layout: Layout, out: Tensor) -> Tensor:
        index, values = self._select(buffer, layout)
        payload, sent = self._write(index, values)
        self._place((index, sent.view(index.shape)), layout, out)
        return payload

    def decode(self, payload: Tensor, layout: Layout, out: Tensor) -> None:
        self._place(self._read(payload), layout, out)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout, out: Tensor) -> None:
        """`weights` are numbers, or one number per tensor of the row."""
        read = [self._read(payload) for payload in payloads]
        if self._fused(out.device) and self.inner.k <= FEW:
            return self._merge_fused(read, weights, layout, out)
        shares = [self._per_block(weight) for weight in weights]
        for strip, mine, tensor in self._strips(layout.views(out)):
            found = [(index[mine], values[mine]) for index, values in read]
            parts = [share[mine] if isinstance(share, Tensor) else share for share in shares]
            total = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
            strip.inverse(self.inner.mean(total, found, parts, parts), tensor)

    def _merge_fused(self, read: list[Entries], weights: Sequence[Weight], layout: Layout, out: Tensor) -> None:
        from .triton import dct as kernels

        index, values = (torch.stack(part) for part in zip(*read, strict=True))
        shares = _side_by_side([self._per_block(weight) for weight in weights], out.device)
        place = table(layout, self.tensors, self.blocks, out.device), cosines(self.blocks[0].wide, out.device)
        kernels.merge(index, values, shares, self.inner.rule == "senders", *place, out)

    def _select(self, buffer: Tensor, layout: Layout) -> Entries:
        if self._fused(buffer.device):
            from .triton import dct as kernels

            place = table(layout, self.tensors, self.blocks, buffer.device)
            return kernels.forward(buffer, place, cosines(self.blocks[0].wide, buffer.device), self.inner.k)
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = torch.empty(self._count, self.inner.k, device=buffer.device)
        for strip, mine, tensor in self._strips(layout.views(buffer)):
            found = strip.forward(tensor)
            index[mine] = largest(found, self.inner.k)
            torch.gather(found, 1, index[mine], out=values[mine])
        return index, values

    def _place(self, sent: Entries, layout: Layout, out: Tensor) -> None:
        if self._fused(out.device) and self.inner.k <= FEW:
            from .triton import dct as kernels

            place = table(layout, self.tensors, self.blocks, out.device)
            return kernels.inverse(*sent, place, cosines(self.blocks[0].wide, out.device), out)
        for strip, mine, tensor in self._strips(layout.views(out)):
            if self.inner.k <= min(FEW, strip.blocks.wide):
                strip.put(few(sent[0][mine], sent[1][mine], strip.blocks.wide), tensor)
            else:
                found = torch.zeros(mine.stop - mine.start, self.inner.chunk, device=tensor.device)
                strip.inverse(found.scatter_(1, sent[0][mine], sent[1][mine]), tensor)

    def _write(self, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.write([index.view(-1)], self._streams, values.view(-1), self._kept)

    def _read(self, payload: Tensor) -> Entries:
        found, values = self.inner.read(payload, self._streams, self._kept)
        return found[0].to(torch.int64).view(-1, self.inner.k), values.view(-1, self.inner.k)

    def _strips(self, tensors: list[Tensor]) -> Iterator[tuple[Strip, slice, Tensor]]:
        """Each strip, its blocks among all, and its tensor."""
        first = 0
        for which, cut in zip(self.tensors, self.blocks, strict=True):
            for strip in cut.strips(tensors[which].device):
                yield strip, slice(first + strip.mine.start, first + strip.mine.stop), tensors[which]
            first += cut.count

    def _fused(self, device: torch.device) -> bool:
        """Whether kernels do it: what they multiply must be of these sizes."""
        return bool(self.blocks) and usable(device) and self.blocks[0].wide in (16, 32, 64)

    def _per_block(self, weight: Weight) -> Weight:
        """(blocks, 1), so that it goes with the entries of a block."""
        if not isinstance(weight, Tensor):
            return weight
        mine = weight[torch.tensor(self.tensors, dtype=torch.int64, device=weight.device)]
        counts = torch.tensor([cut.count for cut in self.blocks], dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(counts, output_size=self._count)[:, None]

    @cached_property
    def _count(self) -> int:
        return sum(cut.count for cut in self.blocks)

    @cached_property
    def _kept(self) -> Layout:
        return Layout(tuple(torch.Size([cut.count * self.inner.k]) for cut in self.blocks))

    @property
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
    numbers = [weight if isinstance(weight, Tensor) else torch.tensor([[float(weight)]]) for weight in weights]
    columns = [number.to(device, torch.float32).view(1, -1) for number in numbers]
    return torch.cat([column.expand(1, max(c.shape[1] for c in columns)) for column in columns])


@lru_cache(maxsize=64)
def table(layout: Layout, tensors: tuple[int, ...], blocks: tuple[Blocks, ...], device: torch.device) -> Table:
    """Where each block of these tensors lies in a buffer of this layout."""
    from .triton.dct import Table

    parts = []
    for which, cut in zip(tensors, blocks, strict=True):
        down = torch.arange(cut.down).repeat_interleave(cut.across) * cut.high
        across = torch.arange(cut.across).repeat(cut.down) * cut.wide
        base = layout.offsets[which] + down * cut.columns + across
        stride = torch.full_like(base, cut.columns)
        parts.append(torch.stack([base, stride, (cut.rows - down).clamp(max=cut.high), cut.columns - across]))
    return Table(*torch.cat(parts, 1).to(device).unbind())
