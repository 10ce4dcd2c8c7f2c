"""Codecs that carry a few values and say where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .base import Codec, Layout, Weight, divide_by_weights
from .bits import pack, unpack
from .blocks import gather, spread
from .cut import Cut, cut
from .dense import Float32
from .select import select
from .twobit import TwoBit


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
        if not 1 <= k <= chunk <= 1 << 16:
            raise ValueError(f"TopK keeps k of each chunk, 1 <= k <= chunk <= 65536: got k={k}, chunk={chunk}")
        if merge not in ("senders", "mean"):
            raise ValueError(f'merge is "senders" or "mean", not {merge!r}')
        if isinstance(values, TopK):
            raise ValueError("TopK writes its values with a dense codec, not with another TopK")
        self.k, self.chunk, self.values, self.rule = k, chunk, values or Float32(), merge
        self.align = chunk

    def size(self, layout: Layout) -> int:
        plan = self._cut(layout, torch.device("cpu"))
        return sum(group.size for group in plan.groups) + self.values.size(self._written(plan))

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        plan = self._cut(layout, buffer.device)
        head, where = self._head(buffer, plan)
        written = self._written(plan)
        return torch.cat([*head, self.values.encode(spread(buffer[where], written), written)])

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        plan = self._cut(layout, buffer.device)
        head, where = self._head(buffer, plan)
        written = self._written(plan)
        body, own = self.values.encode_with_own(spread(buffer[where], written), written)
        return torch.cat([*head, body]), torch.zeros_like(buffer).scatter_(0, where, gather(own, written))

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        where, values = self._read(payload, self._cut(layout, payload.device))
        return layout.zeros(payload.device).scatter_(0, where, values)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        plan = self._cut(layout, payloads[0].device)
        read = [self._read(payload, plan) for payload in payloads]
        total = layout.zeros(payloads[0].device)
        for (where, values), weight in zip(read, weights, strict=True):
            _add(total, where, values * _at(weight, where))
        return _over_senders(total, read, weights) if self.rule == "senders" else divide_by_weights(total, weights)

    def _cut(self, layout: Layout, device: torch.device) -> Cut:
        assert layout.blocks or layout.align == self.chunk, f"{self!r} reads a buffer of whole chunks"
        return cut(layout, self.chunk, self.k, device)

    def _written(self, plan: Cut) -> Layout:
        """The values kept, as the codec that writes them wants them; two bits have one table per tensor."""
        return Layout(plan.values.shapes, 1 if isinstance(self.values, TwoBit) else self.values.align)

    def _head(self, buffer: Tensor, plan: Cut) -> tuple[list[Tensor], Tensor]:
        """The packed indices of each group, and where in the buffer the values kept are, in the order of tensors."""
        found = [select(buffer, group) for group in plan.groups]
        return [pack(index, group.bits) for index, group in zip(found, plan.groups, strict=True)], _where(found, plan)

    def _read(self, payload: Tensor, plan: Cut) -> tuple[Tensor, Tensor]:
        """Where the values of a payload go, and the values."""
        *heads, body = payload.split([group.size for group in plan.groups] + [self._rest(payload, plan)])
        found = [unpack(head, group.total, group.bits) for head, group in zip(heads, plan.groups, strict=True)]
        written = self._written(plan)
        return _where(found, plan), gather(self.values.decode(body, written), written)

    def _rest(self, payload: Tensor, plan: Cut) -> int:
        return payload.numel() - sum(group.size for group in plan.groups)

    def __repr__(self) -> str:
        return f"TopK({self.k}, chunk={self.chunk}, values={self.values!r}, merge={self.rule!r})"


def _where(found: list[Tensor], plan: Cut) -> Tensor:
    if not found:
        return torch.empty(0, dtype=torch.int64, device=plan.device)
    where = torch.cat([group.origin + index for index, group in zip(found, plan.groups, strict=True)])
    return where if plan.order is None else where[plan.order]


def _at(weight: Weight, where: Tensor) -> Weight:
    return weight[where] if isinstance(weight, Tensor) else weight


def _add(total: Tensor, where: Tensor, values: Tensor) -> None:
    """`total[where] += values`; no index comes twice within a payload, so the order of sums is that of the calls."""
    total.scatter_(0, where, total.gather(0, where) + values)


def _over_senders(total: Tensor, read: list[tuple[Tensor, Tensor]], weights: Sequence[Weight]) -> Tensor:
    """`total` over the weight of those who sent a value, in place; only what was sent is touched."""
    heard = torch.zeros_like(total)
    for (where, values), weight in zip(read, weights, strict=True):
        _add(heard, where, torch.ones_like(values) * _at(weight, where))
    shares = [total.gather(0, where) / _or_one(heard.gather(0, where)) for where, _ in read]
    for (where, _), share in zip(read, shares, strict=True):
        total.scatter_(0, where, share)
    return total


def _or_one(weight: Tensor) -> Tensor:
    """What nobody counts for stays 0: it is divided by 1."""
    return weight.where(weight > 0, 1.0)
