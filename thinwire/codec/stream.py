"""Top-k of the cosine transform of full blocks, a strip at a time: the coefficients are never all there at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .base import Layout, Weight
from .cosine import Strip
from .cut import Streams
from .plan import Plan
from .select import largest
from .sparse import Entries, TopK


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
        self._merge(index[None], sent.view(1, *index.shape), [1.0], out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._merge(*self._read(payload[None]), [1.0], out)

    def merge(self, payloads: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Payloads (workers, size); `weights` are numbers, or one number per tensor of the row."""
        self._merge(*self._read(payloads), weights, out)

    def _merge(self, index: Tensor, values: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Entries (workers, blocks, k), a strip at a time, in the same memory each time."""
        most = max((strip.size for strip, _, _, _ in self._strips(out)), default=0)
        spare = torch.empty(3, most, device=out.device)
        for strip, mine, tensor, which in self._strips(out):
            *zeros, room = spare[:, : strip.size]
            where = strip.places(index[:, mine])
            found = list(zip(where, values[:, mine].flatten(1), strict=True))
            shares = [weight[which] if isinstance(weight, Tensor) else weight for weight in weights]
            merged = self.inner.mean([x.zero_() for x in zeros], found, shares, shares)
            strip.inverse_in_place(merged, tensor, room)

    def _select(self, buffer: Tensor) -> Entries:
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = torch.empty(self._count, self.inner.k, device=buffer.device)
        for strip, mine, tensor, _ in self._strips(buffer):
            found = strip.forward(tensor)
            index[mine] = largest(found, self.inner.k)
            torch.gather(found, 1, index[mine], out=values[mine])
        return index, values

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

    @cached_property
    def _count(self) -> int:
        return sum(piece.blocks.count for piece in self.plan.pieces)

    @cached_property
    def _kept(self) -> Layout:
        return Layout(tuple(torch.Size([piece.blocks.count * self.inner.k]) for piece in self.plan.pieces))

    @cached_property
    def _streams(self) -> Streams:
        return [(self._kept.total, (self.inner.chunk - 1).bit_length())]
