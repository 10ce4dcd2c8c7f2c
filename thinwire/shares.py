"""Equal copies inside a worker: each rank exchanges its share of every message, so that one copy crosses the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Exchange, Key, Order, PeerLost, Transport

if TYPE_CHECKING:
    from .island import Island

Answer = TypeVar("Answer")


class Shares(Transport):
    """A transport between the workers, seen by the `ranks` processes that hold equal copies of one replica.

    Rank r meets rank r of every other worker with 1/ranks of each message, and all ranks gather the answers inside.
    A round that one rank loses is lost for all of them.
    """

    def __init__(self, inner: Transport, island: Island) -> None:
        self.inner, self.island = inner, island
        self.group = island.groups[0]
        self.rank, self.ranks = dist.get_rank(self.group), len(island.ranks)
        self.survives, self.worker, self.workers = inner.survives, inner.worker, inner.workers
        self.parts = inner.parts * self.ranks

    def open(self, hosted: int, header_length: int) -> None:
        raise AssertionError("the transport inside is open already")

    def talk(self, blobs: Sequence[bytes]) -> list[bytes]:
        return self.together(lambda: self.inner.talk(blobs))

    def meet(self, key: Key, headers: list[bytes], on_ahead: Callable[[Key], None]) -> list[bytes]:
        return self.together(lambda: self.inner.meet(key, headers, on_ahead))

    def leave(self, why: str) -> None:
        self.inner.leave(why)

    def exchange(self, order: Order) -> Exchange:
        return _Sharing(self, order)

    def broadcast(self, buffers: Sequence[Tensor], source: int) -> Tensor:
        mine = self.together(lambda: self.inner.broadcast([self.share(buffer) for buffer in buffers], source))
        return self.gather(mine).view(-1)[: buffers[0].numel()]

    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        mine = self.together(lambda: self.inner.add([self.share(buffer) for buffer in buffers]))
        return self.gather(mine).view(-1)[: buffers[0].numel()]

    # -- inside ----------------------------------------------------------------------------------------------------

    def together(self, call: Callable[[], Answer]) -> Answer:
        """The call's answer, if no rank of the worker loses it."""
        answer, lost = None, None
        try:
            answer = call()
        except _LostTogether:
            raise
        except PeerLost as error:
            lost = error
        if not self.island.all(lost is None):
            lost = lost or PeerLost("lost by another process of this worker")
            raise _LostTogether(str(lost), lost.workers, lost.row, lost.round, lost.step) from lost
        return cast(Answer, answer)

    def share(self, buffer: Tensor) -> Tensor:
        """This rank's share of a flat buffer: equal for all ranks, so the last ones may end in zeros."""
        length = -(-buffer.numel() // self.ranks)
        mine = buffer[self.rank * length : (self.rank + 1) * length]
        return mine if mine.numel() == length else torch.cat([mine, mine.new_zeros(length - mine.numel())])

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, stacked in rank order."""
        everything = mine.new_empty(self.ranks, *mine.shape)
        self.gather_into(everything.view(-1), mine.reshape(-1))
        return everything

    def gather_into(self, everything: Tensor, mine: Tensor) -> None:
        if mine.numel():
            dist.all_gather_into_tensor(everything, mine, group=self.group)


class _LostTogether(PeerLost):
    """The ranks of the worker have agreed that this is lost."""


class _Sharing(Exchange):
    """One round, of which this rank carries its share."""

    def __init__(self, shares: Shares, order: Order) -> None:
        self.shares, self.kind = shares, order.kind
        self.message = order.contributions[0]
        self.size = 0 if order.kind == "two_shot" else self.message.numel()
        self.second_sizes = order.second_sizes
        own = self._parts(order) if order.kind == "two_shot" else self._slices(order)
        self.inner = shares.inner.exchange(own)

    def _slices(self, order: Order) -> Order:
        return replace(order, contributions=[self.shares.share(given) for given in order.contributions])

    def _parts(self, order: Order) -> Order:
        count = self.shares.inner.parts
        first = self.shares.rank * count
        mine = slice(first, first + count)

        def reduce(index: int, payloads: Sequence[Tensor], headers: list[bytes]) -> Tensor:
            assert order.reduce is not None
            return order.reduce(first + index, payloads, headers)

        given = [parts[mine] for parts in order.contributions]
        return replace(order, contributions=given, reduce=reduce, second_sizes=order.second_sizes[mine])

    def poll(self) -> bool:
        return self.inner.poll()

    def headers(self) -> list[bytes]:
        return self.shares.together(self.inner.headers)

    def confirm(self, complete: bool) -> bool:
        return self.inner.confirm(complete)

    def result(self) -> Tensor | list[Tensor]:
        answer = self.shares.together(self.inner.result)
        if isinstance(answer, Tensor):
            return self._summed(answer)
        if self.kind == "gather":  # (ranks, workers, length) -> one payload a worker
            everything = self.shares.gather(torch.stack(answer)).transpose(0, 1).flatten(1)
            return [payload[: self.size] for payload in everything]
        longest = max(self.second_sizes)
        mine = torch.stack([torch.nn.functional.pad(part, (0, longest - part.numel())) for part in answer])
        everything = self.shares.gather(mine).flatten(0, 1)
        return [payload[:size] for payload, size in zip(everything, self.second_sizes, strict=True)]

    def _summed(self, share: Tensor) -> Tensor:
        """The sum of all workers, in the message's own memory where the shares come out even."""
        if self.size % self.shares.ranks:
            return self.shares.gather(share).view(-1)[: self.size]
        self.shares.gather_into(self.message, share.clone())
        return self.message
