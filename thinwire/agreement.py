"""What the workers agree on when somebody wants to evaluate or export the model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .calls import apart
from .cost import wire_bytes
from .header import Header
from .live import Live
from .replica import Replica, local, model, sharded_as
from .transport import Key, PeerLost

if TYPE_CHECKING:
    from .fleet import Fleet
    from .row import Row


class Agreement:
    """One call's worth of agreement. `finished`: the parameters themselves, no outer copies.

    Its tensors are new, and sharded as the model's are.
    """

    def __init__(self, fleet: Fleet, finished: bool = False) -> None:
        self.fleet, self.finished = fleet, finished
        self.live = self.live_tensors(fleet.replicas[0])
        if not fleet._begun:
            fleet._begin()

    @staticmethod
    def live_tensors(replica: Replica) -> dict[str, Tensor]:
        parameters = {name: local(parameter.detach()) for name, parameter in replica.trainable.items()}
        return {**parameters, **replica.statistics}

    def tensors(self) -> dict[str, Tensor]:
        shared = {} if self.finished else self._outer_copies()
        if self.fleet.transport.elastic and not self.finished:  # nobody may be waited for outside of a round
            agreed = {**shared, **self._present([name for name in self.live if name not in shared])}
            return {name: agreed[name] for name in self.live}
        first = [name for name in self._names_with("first") if name not in shared]
        mean = [name for name in self.live if name not in shared and name not in first]
        agreed = {**shared, **self._first(first), **self._mean(mean)}
        return {name: agreed[name] for name in self.live}

    def _rows(self) -> list[Row]:
        return [row for row in self.fleet.rows if row.sync.view.kind in ("params", "buffers")]

    def _names_with(self, agreement: str) -> list[str]:
        return [name for row in self._rows() if row.sync.rule.agreement == agreement for name in row.names]

    def _outer_copies(self) -> dict[str, Tensor]:
        rows = [row for row in self._rows() if row.sync.rule.agreement == "shared" and row.names]
        if not self._at_one_round(rows):
            return self._first([name for row in rows for name in row.names])
        return {name: value for row in rows for name, value in self._anchor(row).items()}

    def _at_one_round(self, rows: list[Row]) -> bool:
        """Whether all came with as many rounds landed: one that skipped a step may lack the last."""
        if not rows or self.fleet.transport.elastic:
            return True
        place = hash(tuple(row.landed for row in rows)) % 2**62
        return len({header.checksum for header in meet(self.fleet, "consensus", place=place)}) == 1

    def _anchor(self, row: Row) -> dict[str, Tensor]:
        with row.lanes[0].borrowed(to_read=True) as state:
            anchor = state["anchor"]
            assert anchor is not None
            return self._named(row.names, row.layout.views(anchor), copy=True)

    def _first(self, names: list[str]) -> dict[str, Tensor]:
        """Worker 0's outer copy; at the end, its parameters. Where they are not finite, those of the next worker."""
        if not names:
            return {}
        meet(self.fleet, "consensus")
        lives = self._lives(names)
        buffers = [self._flat(live, lane, copies=not self.finished) for lane, live in enumerate(lives)]
        healthy = self._healthy(buffers)
        everybody = self.fleet.transport.talk([b"\1" if each else b"\0" for each in healthy])
        source = everybody.index(b"\1") if b"\1" in everybody else 0
        if source:
            self._tell_the_sick(healthy)
        first = self.fleet.transport.broadcast(buffers, source)
        self._count("broadcast", first)
        return self._named(lives[0].names, lives[0].layout.views(first))

    def _mean(self, names: list[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        headers = meet(self.fleet, "consensus", equal=self._equal(names))
        lives = self._lives(names)
        if all(header.equal for header in headers) and self._bits_agree(lives):
            return self._present(names)
        buffers = [live.read() for live in lives]
        counters = self._counters(lives, buffers)
        total = self._mean_of_healthy(buffers)
        for name, view in zip(lives[0].names, lives[0].layout.views(total), strict=True):
            if name in counters:
                view.fill_(counters[name])
        self._count("mean", total)
        return self._named(lives[0].names, lives[0].layout.views(total))

    def _count(self, kind: str, buffer: Tensor) -> None:
        moved = wire_bytes(kind, self.fleet.island.total(buffer.nbytes), 0, self.fleet.workers)
        self.fleet.wire_sent += moved
        self.fleet.wire_received += moved

    def _counters(self, lives: list[Live], buffers: list[Tensor]) -> dict[str, float]:
        """BatchNorm's numbers of batches: as in a round, the most that any worker has."""
        names = [name for name in lives[0].names if not lives[0].table[name].is_floating_point()]
        if not names:
            return {}
        standing = []
        for live, buffer in zip(lives, buffers, strict=True):
            views = dict(zip(live.names, live.layout.views(buffer), strict=True))
            standing.append(json.dumps([float(views[name]) for name in names]).encode())
        heard = [json.loads(blob) for blob in self.fleet.transport.talk(standing)]
        return dict(zip(names, map(max, zip(*heard, strict=True)), strict=True))

    def _mean_of_healthy(self, buffers: list[Tensor]) -> Tensor:
        """As in a round, a worker with a value that is not finite is left out, unless all have one."""
        fleet, healthy = self.fleet, self._healthy(buffers)
        count = int(fleet.transport.add([b.new_tensor([float(h)]) for b, h in zip(buffers, healthy, strict=True)]))
        if count:
            self._tell_the_sick(healthy)
            for buffer, there in zip(buffers, healthy, strict=True):
                if not there:
                    buffer.zero_()
        return fleet.transport.add(buffers).div_(count or fleet.workers)

    def _healthy(self, buffers: list[Tensor]) -> list[bool]:
        """Of each worker hosted here, whether all values are finite on all of its ranks."""
        sums = [float(buffer.sum()) for buffer in buffers]
        return [math.isfinite(self.fleet.island.agree(0.0 * total, 0.0)[0]) for total in sums]

    def _tell_the_sick(self, healthy: list[bool]) -> None:
        text = "a parameter was not finite: this worker is left out of the consensus"
        for lane in (lane for lane, there in enumerate(healthy) if not there):
            self.fleet.events.add("sick", self.fleet.steps, text, workers=[self.fleet.worker + lane])

    def _equal(self, names: list[str]) -> bool:
        """Whether nothing has moved since these tensors were made the same on all workers."""
        equal = {name for row in self._rows() if row.equal_at == self.fleet.steps for name in row.names}
        equal |= {name for row in self.fleet.gradient_rows() for name in row.names}  # see _bits_agree
        return equal.issuperset(names)

    def _bits_agree(self, lives: list[Live]) -> bool:
        """Equal gradients do not make equal steps where optimizer states differ, as they may after a switch."""
        if not self.fleet.gradient_rows():
            return True
        sums = [str(live.checksum(live.read())).encode() for live in lives]
        return len(set(self.fleet.transport.talk(sums))) == 1

    def _lives(self, names: list[str]) -> list[Live]:
        """These tensors of every hosted replica."""
        return [Live(model.where(set(names).__contains__), replica, align=1) for replica in self.fleet.replicas]

    def _flat(self, live: Live, lane: int, copies: bool) -> Tensor:
        """The tensors, or the outer copies of those that have one."""
        buffer = live.read()
        views = dict(zip(live.names, live.layout.views(buffer), strict=True))
        for row in self._rows() if copies else []:
            anchor = row.lanes[lane].state.get("anchor")
            if anchor is not None:
                for name, copy in zip(row.names, row.layout.views(anchor), strict=True):
                    if name in views:
                        views[name].copy_(copy)
        return buffer

    def _present(self, names: list[str]) -> dict[str, Tensor]:
        """Copies of the tensors as they are."""
        replica = self.fleet.replicas[0]
        if replica.line is not None:
            return replica.line.copies(replica, names)
        return self._named(names, [self.live[name] for name in names], copy=True)

    def _named(self, names: list[str], values: Sequence[Tensor], copy: bool = False) -> dict[str, Tensor]:
        """These values, which a lead has whole, as tensors of the model's types and shards."""
        replica = self.fleet.replicas[0]
        if replica.line is not None:
            return replica.line.hand_out(replica, names, values)
        table = model.table(replica)
        entries = [(name, table[name], value) for name, value in zip(names, values, strict=True)]
        return {name: sharded_as(entry, value.to(entry.dtype, copy=copy)) for name, entry, value in entries}


@apart
def swap_in(replica: Replica, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put these values into the model; what they replace."""
    live = Agreement.live_tensors(replica)
    before = {name: live[name].clone() for name in tensors}
    for name, tensor in tensors.items():
        live[name].copy_(local(tensor))
    return before


def meet(fleet: Fleet, kind: str, equal: bool = False, place: int = 0) -> list[Header]:
    """Wait for every worker to make this call; a round that a peer has already launched is launched here first.

    `place` is a number to compare.
    """
    if not fleet._begun:
        fleet._begin()
    fleet.calls += 1
    headers = [Header(equal=equal, checksum=place).pack(fleet.header_length) for _ in fleet.replicas]
    try:
        heard = fleet.transport.meet(Key(kind, 0, fleet.calls), headers, lambda key: _follow(fleet, key, kind))
    except PeerLost as error:
        error.step = fleet.steps
        raise
    return [Header.unpack(blob, 0) for blob in heard]


def _follow(fleet: Fleet, key: Key, kind: str) -> None:
    row = fleet.rows[key.row]
    if key.round != row.launched + 1 or fleet.steps <= row.sync.every.launch_step(row.launched):
        why = f"called {kind}() after step {fleet.steps}"
        fleet.transport.leave("finished: it " + why)
        raise PeerLost(
            f"a peer has gone on to {key}, but this worker {why}: every worker must take the same number of steps",
            row=key.row, round=key.round, step=fleet.steps,
        )  # fmt: skip
    every = row.sync.every
    while row.flights and every.landing_step(row.flights[0].number) <= every.launch_step(key.round):
        row.land()  # before the launch, as the peer has done
    row.launch()
    if every.delay == 0:
        while row.flights:
            row.land()
