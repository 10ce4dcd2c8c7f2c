"""Codecs that carry a few values and say where they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from .base import Codec, Layout, Weight, divide_by_weights, on_host
from .bits import pack, packed, unpack
from .blocks import gather, spread
from .cut import Cut, Streams, counted, cut
from .dense import Float32
from .select import chosen
from .triton import usable
from .twobit import TwoBit

Entries = tuple[Tensor, Tensor]  # where values go, int64 [entries], and the values
TINY = torch.finfo(torch.float32).tiny


class TopK(Codec):
    """The `k` values of largest magnitude in each `chunk` of a flattened tensor, ties to the lower index.

    A shorter chunk keeps as large a part of its values, but at least one. A payload is the indices, each of as many
    bits as its chunk needs, then the values, written by the codec `values`. `merge` is the mean over the workers
    that sent a value ("senders") or over all ("mean").

    >>> layout = Layout((torch.Size([4]),), align=4)
    >>> codec = TopK(2, chunk=4)
    >>> codec.decode(codec.encode(torch.tensor([3.0, 1.0, -2.0, 2.0]), layout), layout)
    tensor([ 3.,  0., -2.,  0.])
    """

    def __init__(
        self, k: int, chunk: int = 4096, values: Codec | None = None, merge: Literal["senders", "mean"] = "senders"
    ) -> None:
        if not (type(k) is int and type(chunk) is int and 1 <= k <= chunk <= 1 << 16):
            raise ValueError(f"TopK keeps k of each chunk, 1 <= k <= chunk <= 65536: got k={k}, chunk={chunk}")
        if merge not in ("senders", "mean"):
            raise ValueError(f'merge is "senders" or "mean", not {merge!r}')
        if isinstance(values, TopK) or not isinstance(values, Codec | None):
            raise ValueError(f"TopK writes its values with a dense codec such as BFloat16(), not with {values!r}")
        self.k, self.chunk, self.values, self.rule = k, chunk, values or Float32(), merge
        self.align = chunk

    def size(self, layout: Layout) -> int:
        self._check(layout)
        return self.written(*counted(layout, self.chunk, self.k))

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return self._encode(buffer, layout)[0]

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        payload, index, sent = self._encode(buffer, layout)
        where = self._cut(layout, buffer.device).origin + index
        return payload, torch.zeros_like(buffer).scatter_(0, where, sent)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        plan = self._cut(layout, payload.device)
        found, values = self.read(payload[None], plan.streams, plan.values)
        return layout.zeros(payload.device).scatter_(0, plan.origin + plan.join(found).view(-1), values[0])

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        plan, total = self._cut(layout, payloads[0].device), layout.zeros(payloads[0].device)
        if not plan.groups:
            return total
        found, values = self.read(torch.stack(list(payloads)), plan.streams, plan.values)
        index = plan.join(found)
        if usable(total.device) and not any(isinstance(weight, Tensor) for weight in weights):
            from .triton import merge as kernels

            shares = side_by_side(tuple(weights), total.device)
            return kernels.merge(index, values, shares, self.rule == "senders", kernels.rows(plan), total)
        where = plan.origin + index
        at = [w[there] if isinstance(w, Tensor) else w for there, w in zip(where, weights, strict=True)]
        return self.mean((total, torch.zeros_like(total)), list(zip(where, values, strict=True)), at, weights)

    def mean(
        self, zeros: Sequence[Tensor], read: Sequence[Entries], at: Sequence[Weight], weights: Sequence[Weight]
    ) -> Tensor:
        """The merge of entries into the first of two [n] of zeros, in place; the other is worked in.

        `at`: the weights of the entries, or the same for all.
        """
        total, heard = zeros
        _add(total, read, at)
        return _over_senders(total, heard, read, at) if self.rule == "senders" else divide_by_weights(total, weights)

    def parts(self, zeros: Tensor, where: Tensor, values: Tensor, weights: Sequence[Weight]) -> Tensor:
        """Entries (workers, n) -> what each adds to the merge; `weights` are numbers. The zeros are worked in."""
        column = torch.stack([torch.as_tensor(weight, dtype=torch.float32, device=where.device) for weight in weights])
        parts = values * column[:, None]
        if self.rule == "mean":
            return divide_by_weights(parts, weights)
        for mine, weight in zip(where, column, strict=True):
            zeros.scatter_add_(0, mine, weight.expand(mine.shape))
        return parts.div_(zeros[where].clamp_(min=TINY))

    def written(self, streams: Streams, kept: Layout) -> int:
        """Bytes of what `write` gives."""
        return sum(packed(*stream) for stream in streams) + self.values.size(self._body(kept))

    def write(self, found: Sequence[Tensor], streams: Streams, values: Tensor, kept: Layout) -> tuple[Tensor, Tensor]:
        """Indices, one tensor for each number of bits, and values, those of each tensor together -> the payload, and
        the values as the others will read them."""
        head = [pack(index, bits) for index, (_, bits) in zip(found, streams, strict=True)]
        body = self._body(kept)
        codes, sent = self.values.encode_with_own(spread(values, body), body)
        return torch.cat([*head, codes]), gather(sent, body)

    def read(self, payloads: Tensor, streams: Streams, kept: Layout) -> tuple[list[Tensor], Tensor]:
        """The other way: payloads (n, bytes) -> indices (n, count) for each number of bits, and values (n, kept)."""
        body = self._body(kept)
        *heads, codes = payloads.split([packed(*stream) for stream in streams] + [self.values.size(body)], 1)
        found = [unpack(head, *stream) for head, stream in zip(heads, streams, strict=True)]
        return found, gather(self.values.decode_all(codes, body), body)

    def _encode(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The payload, its indices, and the values as sent."""
        plan = self._cut(layout, buffer.device)
        index, values = chosen(buffer, plan)
        payload, sent = self.write(plan.split(index), plan.streams, values, plan.values)
        return payload, index, sent

    def _cut(self, layout: Layout, device: torch.device) -> Cut:
        self._check(layout)
        return cut(layout, self.chunk, self.k, device)

    def _check(self, layout: Layout) -> None:
        assert layout.blocks is not None or layout.align == self.chunk, f"{self!r} reads a buffer of whole chunks"

    def _body(self, kept: Layout) -> Layout:
        """The values kept, as the codec that writes them wants them; two bits have one table per tensor."""
        return _aligned(kept, 1 if isinstance(self.values, TwoBit) else self.values.align)

    def __repr__(self) -> str:
        return f"TopK({self.k}, chunk={self.chunk}, values={self.values!r}, merge={self.rule!r})"


@lru_cache(maxsize=64)
@on_host
def side_by_side(weights: tuple[float, ...], device: torch.device) -> Tensor:
    """(workers, 1)"""
    return torch.tensor(weights, dtype=torch.float32)[:, None].to(device)


@lru_cache(maxsize=256)
def _aligned(layout: Layout, align: int) -> Layout:
    return Layout(layout.shapes, align)


def _add(total: Tensor, read: Sequence[Entries], weights: Sequence[Weight]) -> None:
    """`total[where] += values * weight` in turn; no index comes twice within a payload, so that this is one order."""
    for (where, values), weight in zip(read, weights, strict=True):
        total.scatter_add_(0, where, values * weight)


def _over_senders(total: Tensor, heard: Tensor, read: Sequence[Entries], weights: Sequence[Weight]) -> Tensor:
    """`total` over the weight of those who sent a value, in place; what nobody sent stays 0."""
    _add(heard, [(where, torch.ones_like(values)) for where, values in read], weights)
    return total.div_(heard.clamp_(min=TINY))
