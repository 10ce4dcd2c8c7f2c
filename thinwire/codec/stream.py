"""Top-k of the cosine transform of full blocks, a strip at a time: the coefficients are never all there at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .base import Layout, Weight
from .cosine import Strip
from .crew import share
from .cut import Streams
from .plan import Piece, Plan
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
        self._merge([(index, sent.view(index.shape))], [1.0], out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._merge(self._read(payload[None]), [1.0], out)

    def merge(self, payloads: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Payloads (workers, size); `weights` are numbers, or one number per tensor of the row."""
        self._merge(self._read(payloads), weights, out)

    def _select(self, buffer: Tensor) -> Entries:
        index = torch.empty(self._count, self.inner.k, dtype=torch.int64, device=buffer.device)
        values = buffer.new_empty(self._count, self.inner.k)

        def work(strip: Strip, mine: slice, piece: Piece, room: Tensor) -> None:
            found = strip.forward(piece.view(buffer), room)
            index[mine] = largest(found, self.inner.k, room[1])
            torch.gather(found, 1, index[mine], out=values[mine])

        self._each(work, buffer.device)
        return index, values

    def _merge(self, read: list[Entries], weights: Sequence[Weight], out: Tensor) -> None:
        """The entries of each worker."""

        def work(strip: Strip, mine: slice, piece: Piece, room: Tensor) -> None:
            shares = [weight[piece.tensor] if isinstance(weight, Tensor) else weight for weight in weights]
            entries = torch.stack([index[mine] for index, _ in read]), torch.stack([values[mine] for _, values in read])
            self._put(strip, entries, shares, piece.view(out), room)

        self._each(work, out.device)

    def _put(self, strip: Strip, entries: Entries, weights: Sequence[Weight], tensor: Tensor, room: Tensor) -> None:
        """The merge of the entries (workers, blocks, k) of a strip, the way that takes least time for so many."""
        (index, values), side = entries, strip.blocks.high
        workers, _, k = index.shape
        if workers == 1 and k <= side:  # the mean over one worker is what it says, if it has any weight
            return strip.inverse_of_few(index[0], values[0] * (weights[0] > 0), tensor, room)
        first = torch.arange(0, strip.size, self.inner.chunk, device=index.device)[:, None]
        where, sent = (index + first).flatten(1), values.flatten(1)
        if workers * k <= 2 * side:
            parts = self.inner.parts(room[0].zero_(), where, sent, weights)
            strip.inverse_of_some(*_in_order(index, parts.view(values.shape)), tensor, room)
        else:
            found = list(zip(where, sent, strict=True))
            strip.inverse(self.inner.mean(list(room[:2].zero_()), found, weights, weights), tensor, room)

    def _each(self, work: Callable[[Strip, slice, Piece, Tensor], None], device: torch.device) -> None:
        """Every strip, its blocks among all, the piece that it is of, and three times its size of memory to work in,
        which is the same from one strip to the next."""
        strips = self._strips(device)
        most = max((strip.size for strip, _, _ in strips), default=0)

        def take(left: Iterator[tuple[Strip, slice, Piece]]) -> None:
            room = torch.empty(3, most, dtype=torch.float32, device=device)
            for strip, mine, piece in left:
                work(strip, mine, piece, room[:, : strip.size])

        share(strips, take, device)

    def _write(self, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.write([index.view(-1)], self._streams, values.view(-1), self._kept)

    def _read(self, payloads: Tensor) -> list[Entries]:
        """(workers, size) -> the entries of each."""
        read: list[Entries] = [(payloads, payloads)] * len(payloads)

        def work(left: Iterator[int]) -> None:
            for which in left:
                found, values = self.inner.read(payloads[which : which + 1], self._streams, self._kept)
                read[which] = found[0].view(-1, self.inner.k), values.view(-1, self.inner.k)

        share(range(len(payloads)), work, payloads.device)
        return read

    def _strips(self, device: torch.device) -> list[tuple[Strip, slice, Piece]]:
        found, first = [], 0
        for piece in self.plan.pieces:
            for strip in piece.blocks.strips(device):
                found.append((strip, slice(first + strip.mine.start, first + strip.mine.stop), piece))
            first += piece.blocks.count
        return found

    @cached_property
    def _count(self) -> int:
        return sum(piece.blocks.count for piece in self.plan.pieces)

    @cached_property
    def _kept(self) -> Layout:
        return Layout(tuple(torch.Size([piece.blocks.count * self.inner.k]) for piece in self.plan.pieces))

    @cached_property
    def _streams(self) -> Streams:
        return [(self._kept.total, (self.inner.chunk - 1).bit_length())]


def _in_order(index: Tensor, values: Tensor) -> Entries:
    """Entries (workers, blocks, k) -> (blocks, workers * k), ascending by index, and at one index by worker."""
    bits = (len(index) - 1).bit_length()
    worker = torch.arange(len(index), dtype=index.dtype, device=index.device)[:, None, None]
    keys, order = (index << bits | worker).transpose(0, 1).flatten(1).contiguous().sort(1)  # of one entry: a view
    return keys >> bits, values.transpose(0, 1).flatten(1).gather(1, order)
