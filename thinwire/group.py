"""The transport over `torch.distributed`: asynchronous collectives on a flat buffer, in chunks."""

from __future__ import annotations

import atexit
import datetime
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import units
from .conversation import Board, Conversation
from .site import Site, meet_at, ranks_of, site_of_group
from .transport import Exchange, Key, Order, PeerLost, Transport, add_in_order

CHUNK = 16 << 20  # bytes of one collective: large enough for full speed, small enough to pipeline
_opened: WeakSet[Group] = WeakSet()
_GLANCE = 0.001  # seconds between two looks at a work of NCCL
_PACE = 0.05  # seconds of line time that one chunk may take when the rate is limited


class Group(Transport):
    """The processes of a `torch.distributed` group (gloo or NCCL), or of one dimension of a `DeviceMesh`.

    thinwire opens connections of its own, so its traffic never mixes with the group's other collectives. Where workers
    are several processes, `mesh["workers"]` joins them rank by rank; workers of different sizes are joined by the group
    of their first processes, `Group(dist.new_group([0, 4, 12]))`, which every process passes, in it or not.
    `max_rate` (bytes per second, or text such as "50Mbit") paces the chunks; the lowest rate of all workers holds.

    >>> Group(max_rate="50Mbit").max_rate
    6250000.0
    """

    def __init__(self, process_group_or_mesh: Any = None, max_rate: float | str | None = None) -> None:
        self.group = process_group_or_mesh
        self.max_rate = units.rate(max_rate) if isinstance(max_rate, str) else max_rate
        if self.max_rate is not None and not self.max_rate > 0:
            raise ValueError(f'max_rate is bytes a second, more than zero, or text such as "50Mbit": not {max_rate}')
        self._site: Site | None = None  # of `connect`
        self._here: Site | None = None  # of the fleet that it serves
        self._nccl: Any = None
        self._back: Any = None
        self._back_nccl: Any = None
        self._postings: deque[_Posting] = deque()
        self._next_post = 0.0
        self._works: deque[Any] = deque()  # all that may still be under way
        self._two_shots: deque[_Underway] = deque()

    @classmethod
    def connect(
        cls, address: str, worker: int, workers: int, max_rate: float | str | None = None, timeout: float = 1800
    ) -> Group:
        """Join separate runs over one line: worker 0 listens at `address` ("HOST:PORT"), the others come to it.

        Each site runs its own torchrun with whatever it likes inside, and every process of it makes this same call:
        process r of one site meets process r of every other, or the first ones meet for all where sites differ in size
        or a message must be whole. No default process group is needed.
        """
        transport = cls(max_rate=max_rate)
        transport._site = meet_at(address, worker, workers, timeout)
        return transport

    # -- the world -------------------------------------------------------------------------------------------------

    def members(self) -> Sequence[int] | None:
        return None if self._site is not None else ranks_of(self.group)

    def open(self, hosted: int, header_length: int) -> None:
        site = self._site or site_of_group(self.group)
        self.openings += 1  # each with connections and a part of the store of its own
        site = self._here = replace(site, store=c10d.PrefixStore(f"fleet {self.openings}", site.store))
        self._back, self._works, self._postings, self._two_shots = None, deque(), deque(), deque()
        self.process, self.processes = site.rank, site.size
        self._control, self._data = self._connected(site)
        facts = self._gather_numbers([hosted, int(self.max_rate or 0)])
        self.hosted = [count for count, _ in facts]
        self.rate: float | None = min((rate for _, rate in facts if rate), default=None)
        firsts = [sum(self.hosted[:process]) for process in range(self.processes)]
        self.worker, self.workers = firsts[self.process], sum(self.hosted)
        self.parts = self.workers
        if self.workers > 2:  # for second legs; gloo's connections are opened here, since that waits for every peer
            self._back = site.gloo("back")
        board = Board(site.store, self.process, firsts, self.workers, site.timeout)
        self._header_length = header_length
        size = header_length * max(self.hosted)
        self._conversation = Conversation(self._gather_headers, board, size, self.notify)
        _opened.add(self)

    def share_line(self, processes: int) -> None:
        self.rate = self.rate / processes if self.rate is not None else None

    def _connected(self, site: Site) -> tuple[Any, Any]:
        try:
            return site.gloo("control"), site.gloo("data")
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise PeerLost(f"could not connect to all of the {site.size} processes ({reason})") from error

    def _gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return [row.tolist() for row in self._gather_now(torch.tensor(numbers, dtype=torch.int64, device="cpu"))]

    def _gather_now(self, mine: Tensor) -> list[Tensor]:
        work, everybody = self._gather_headers(mine)
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"a worker was lost at the start ({str(error).splitlines()[0]})") from error
        return everybody

    def _gather_headers(self, mine: Tensor) -> tuple[Any, list[Tensor]]:
        everybody = [torch.empty_like(mine) for _ in range(self.processes)]
        return self._control.allgather([everybody], [mine]), everybody

    def talk(self, blobs: Sequence[bytes]) -> list[bytes]:
        padded = [len(blob) for blob in blobs] + [0] * (max(self.hosted) - len(blobs))
        sizes = self._gather_numbers(padded)
        mine = torch.zeros(max(sum(row) for row in sizes) + 1, dtype=torch.uint8, device="cpu")
        joined = b"".join(blobs)
        mine[: len(joined) + 1] = torch.frombuffer(bytearray(joined + b"\0"), dtype=torch.uint8)
        heard = []
        for count, row, got in zip(self.hosted, sizes, self._gather_now(mine), strict=True):
            heard += _cut(bytes(got.numpy()), row)[:count]
        return heard

    # -- headers ---------------------------------------------------------------------------------------------------

    def _split(self, heard: list[bytes]) -> list[bytes]:
        size = self._header_length
        return [blob[i * size : (i + 1) * size] for n, blob in zip(self.hosted, heard, strict=True) for i in range(n)]

    def meet(self, key: Key, headers: list[bytes], on_ahead: Callable[[Key], None]) -> list[bytes]:
        self._conversation.say(key, b"".join(headers), 0)
        self._push_on()

        def follow(ahead: Key) -> None:
            on_ahead(ahead)
            self._push_on()

        return self._split(self._conversation.hear(key, follow))

    def _push_on(self) -> None:
        """Before waiting at a meeting: a peer that is a step ahead may be landing what has not left here yet."""
        while self._two_shots:
            self._two_shots[0]._reduce()
        self._pump(wait=True)

    def leave(self, why: str) -> None:
        self._conversation.leave(why)

    def watch(self, gone: Callable[[], list[int]]) -> None:
        """Have somebody else say which workers are gone, while this one waits for them."""
        self._conversation.gone = gone

    def wait_up_to(self, seconds: float) -> None:
        """How long a collective may take from now on."""
        for channel in (self._control, self._data, self._back):
            if channel is not None:
                channel.set_timeout(datetime.timedelta(seconds=seconds))
        self._conversation.board.timeout = seconds

    def idle(self) -> bool:
        """Whether every collective has ended, well or badly: only then may the connections be closed."""
        headers = [work for work, _ in self._conversation.outstanding]
        return all(work.is_completed() for work in [*self._works, *headers])

    # -- data ------------------------------------------------------------------------------------------------------

    def exchange(self, order: Order) -> Exchange:
        self._conversation.say(order.key, b"".join(order.headers), order.step)
        if order.kind == "mean":
            transfer = self._sum(add_in_order(order.contributions))
        elif order.kind == "gather":
            transfer = self._gather(order.contributions, self._data_for(order.contributions[0]))
        else:
            transfer = self._scatter(order.contributions)
        underway = _Underway(self, order, transfer)
        if order.kind == "two_shot":
            self._two_shots.append(underway)
        return underway

    def _data_for(self, tensor: Tensor) -> Any:
        """NCCL for tensors on a GPU where the parent group has it, gloo elsewhere."""
        assert self._here is not None
        if tensor.is_cuda and self._nccl is None:
            self._nccl = self._here.nccl() or self._data
        return self._nccl if tensor.is_cuda else self._data

    def _sum(self, buffer: Tensor) -> _Transfer:
        channel = self._data_for(buffer)
        staged = self._stage(buffer, channel)
        works: list[Any] = []
        for chunk in staged.split(self._chunk() // 4) if staged.numel() else ():
            sent = chunk.nbytes * 2 * (self.processes - 1) // self.processes
            self._postings.append(_Posting(sent, works, partial(channel.allreduce, [chunk])))
        return self._started(_Transfer(self, works, lambda: _unstage(staged, buffer)))

    def _gather(self, payloads: Sequence[Tensor], channel: Any) -> _Transfer:
        size, device = payloads[0].numel(), payloads[0].device
        room = torch.zeros(size * (max(self.hosted) - len(payloads)), dtype=torch.uint8, device=device)
        mine = self._stage(torch.cat([*payloads, room]), channel)
        everybody = [torch.empty_like(mine) for _ in range(self.processes)]
        works: list[Any] = []
        step = self._chunk()
        for at in range(0, mine.numel(), step):
            chunk, outs = mine[at : at + step], [out[at : at + step] for out in everybody]
            sent = chunk.numel() * (self.processes - 1)
            self._postings.append(_Posting(sent, works, partial(channel.allgather, [outs], [chunk])))

        def collect() -> list[Tensor]:
            there = [out.to(device, non_blocking=True) for out in everybody]
            return [row[i * size : (i + 1) * size] for n, row in zip(self.hosted, there, strict=True) for i in range(n)]

        return self._started(_Transfer(self, works, collect))

    def _scatter(self, payloads: Sequence[Sequence[Tensor]]) -> _Transfer:
        """The first leg of two-shot: every part goes to the process that hosts its owner."""
        sizes, owners = [part.numel() for part in payloads[0]], self._owners()
        channel, device = self._data_for(payloads[0][0]), payloads[0][0].device
        mine = self._stage(torch.cat([lane[part] for parts in owners for lane in payloads for part in parts]), channel)
        own = sum(sizes[part] for part in owners[self.process])
        out_splits = [own * count for count in self.hosted]
        in_splits = [len(payloads) * sum(sizes[part] for part in parts) for parts in owners]
        received = torch.empty(sum(out_splits), dtype=torch.uint8, device=mine.device)
        works: list[Any] = []
        post = partial(channel.alltoall_base, received, mine, out_splits, in_splits)
        self._postings.append(_Posting(mine.numel() - in_splits[self.process], works, post))

        def collect() -> list[Tensor]:
            return list(received.to(device, non_blocking=True).split([own] * self.workers))

        return self._started(_Transfer(self, works, collect))

    def _owners(self) -> list[list[int]]:
        """The parts, one per worker, that each process reduces."""
        edges = [sum(self.hosted[:process]) for process in range(self.processes + 1)]
        return [list(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]

    def _second_leg(self, order: Order, headers: list[bytes], lanes: list[Tensor], first_sizes: list[int]) -> _Transfer:
        """Reduce the parts owned here and hand them to everybody; parts differ by a block, so they are padded."""
        assert order.reduce is not None
        mine = self._owners()[self.process]
        cuts = [lane.split([first_sizes[part] for part in mine]) for lane in lanes]
        reduced = [order.reduce(part, [cut[i] for cut in cuts], headers) for i, part in enumerate(mine)]
        longest = max(order.second_sizes)
        padded = [torch.nn.functional.pad(part, (0, longest - part.numel())) for part in reduced]
        return self._gather(padded, self._back_for(padded[0]))

    def _back_for(self, tensor: Tensor) -> Any:
        """Second legs have a channel of their own: they come in another order than first legs."""
        if self._data_for(tensor) is self._data:
            return self._back
        assert self._here is not None
        self._back_nccl = self._back_nccl or self._here.nccl()
        return self._back_nccl

    def broadcast(self, buffers: Sequence[Tensor], source: int) -> Tensor:
        root = next(p for p, parts in enumerate(self._owners()) if source in parts)
        here = root == self.process
        buffer = buffers[source - self.worker].clone() if here else torch.empty_like(buffers[0])
        channel = self._data_for(buffer)
        staged = self._stage(buffer, channel)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        works: list[Any] = []
        for chunk in staged.split(self._chunk() // 4) if staged.numel() else ():
            post = partial(channel.broadcast, [chunk], options)
            self._postings.append(_Posting(chunk.nbytes if here else 0, works, post))
        return self._started(_Transfer(self, works, lambda: _unstage(staged, buffer))).wait(Key("consensus"))

    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        return self._sum(add_in_order(buffers)).wait(Key("consensus"))

    def _stage(self, tensor: Tensor, channel: Any) -> Tensor:
        """gloo reads host memory: the only place where tensors of a GPU are staged."""
        if not tensor.is_cuda or not isinstance(channel, dist.ProcessGroupGloo):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        return host

    # -- posting in order, paced -----------------------------------------------------------------------------------

    def _chunk(self) -> int:
        return CHUNK if self.rate is None else max(1 << 16, min(CHUNK, int(self.rate * _PACE) // 4 * 4))

    def _started(self, transfer: _Transfer) -> _Transfer:
        if len(self._postings) == transfer.expected:  # nothing waited: time in which nobody sent is not made up for
            self._next_post = max(self._next_post, time.monotonic())
        self._pump(wait=False)
        return transfer

    def _pump(self, wait: bool) -> None:
        """Post what may be posted, in order: the order is what lets the collectives of all processes pair up."""
        while self._postings:
            ahead = self._next_post - time.monotonic()
            if self.rate is not None and ahead > 0:
                if not wait:
                    return
                time.sleep(ahead)
            posting = self._postings.popleft()
            work = self._watched(posting.post())
            posting.works.append(work)
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)
            if self.rate is not None:
                self._next_post += posting.sent / self.rate  # a step may be long: what fell due in it goes at once

    def _watched(self, work: Any) -> Any:
        return _Watched(work) if self._nccl is not None and self._nccl is not self._data else work

    def _wait(self, work: Any, key: Key) -> None:
        self._conversation.wait(work, key)


@atexit.register
def _close() -> None:
    """While Python still runs: a gloo thread that lets go of a tensor after that would abort the process.

    Connections on which somebody is still waited for stay as they are, since closing them would wait too.
    """
    for group in [group for group in _opened if group.idle()]:
        group._control = group._data = group._back = None


class _Watched:
    """A work of NCCL, which aborts its connection when a wait with a limit runs out: so it is only looked at."""

    def __init__(self, work: Any) -> None:
        self.work, self.is_completed = work, work.is_completed

    def wait(self, limit: datetime.timedelta) -> None:
        deadline = time.monotonic() + limit.total_seconds()
        while not self.work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("under way")
            time.sleep(_GLANCE)
        self.work.wait()  # the stream waits for it; what went wrong is raised


@dataclass
class _Posting:
    """One collective to post: the bytes it sends, where its handle goes, and how to post it."""

    sent: int
    works: list[Any]
    post: Callable[[], Any]


@dataclass
class _Transfer:
    """A row of collectives that belong together, and how to read the answer off them."""

    group: Group
    works: list[Any]
    collect: Callable[[], Any]
    expected: int = field(init=False)

    def __post_init__(self) -> None:
        self.expected = sum(posting.works is self.works for posting in self.group._postings)

    def done(self) -> bool:
        self.group._pump(wait=False)
        return len(self.works) == self.expected and all(work.is_completed() for work in self.works)

    def wait(self, key: Key) -> Any:
        while len(self.works) < self.expected:
            self.group._pump(wait=True)
        for work in self.works:
            self.group._wait(work, key)
        return self.collect()


class _Underway(Exchange):
    """One round on its way: its headers, its data, and for two-shot its second leg."""

    def __init__(self, group: Group, order: Order, transfer: _Transfer) -> None:
        self.group, self.order, self.transfer = group, order, transfer
        self.two_shot = order.kind == "two_shot"
        self.first_sizes = [part.numel() for part in order.contributions[0]] if self.two_shot else []
        self.second: _Transfer | None = None
        self._headers: list[bytes] | None = None

    def poll(self) -> bool:
        if not self.two_shot:
            return self.transfer.done()
        if self.second is None and self._may_reduce():
            self._reduce()
        return self.second is not None and self.second.done()

    def _may_reduce(self) -> bool:
        """Second legs go in the order of the first ones, or those of two rounds would cross."""
        heard = self._headers is not None or self.group._conversation.arrived(self.order.key)
        return self.group._two_shots[0] is self and self.transfer.done() and heard

    def _reduce(self) -> None:
        headers, lanes = self.headers(), self.transfer.wait(self.order.key)
        self.second = self.group._second_leg(self.order, headers, lanes, self.first_sizes)
        self.group._two_shots.remove(self)

    def headers(self) -> list[bytes]:
        if self._headers is None:
            self._headers = self.group._split(self.group._conversation.hear(self.order.key))
        return self._headers

    def result(self) -> Tensor | list[Tensor]:
        key = self.order.key
        if not self.two_shot:
            return self.transfer.wait(key)
        while self.second is None:
            self.group._two_shots[0]._reduce()
        seconds = self.second.wait(key)
        return [payload[:size] for payload, size in zip(seconds, self.order.second_sizes, strict=True)]


def _unstage(host: Tensor, like: Tensor) -> Tensor:
    return like if host is like else like.copy_(host, non_blocking=True)


def _cut(blob: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(blob[at : at + size])
        at += size
    return pieces
