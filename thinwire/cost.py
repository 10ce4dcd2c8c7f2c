"""What a method costs before it runs: bytes, wire and memory, from the same table that the engine executes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn

from .codec.base import Codec
from .header import header_length
from .live import Live
from .replica import Replica
from .schedule import Every
from .table import Method, Sync, a_method

FLOAT = 4


def exchange_kind(codec: Codec, workers: int) -> str:
    """How messages of this codec meet: "mean" (an all-reduce), "gather" or "two_shot"."""
    if codec.linear:
        return "mean"
    return "two_shot" if codec.second is not None and workers > 2 else "gather"


def wire_bytes(kind: str, size: int, second: int, workers: int) -> int:
    """What one worker sends, and receives, for one message of `size` bytes (`second` in the second leg).

    Of a "broadcast", which workers pass on in a tree, it is the mean over them all.
    """
    others = workers - 1
    if kind == "broadcast":
        return others * size // workers
    if kind == "mean":
        return 2 * others * size // workers
    return others * size if kind == "gather" else others * (size + second) // workers


@dataclass(frozen=True)
class RowCost:
    """One row's price: `bytes` of a message, wire bytes of a round (headers included), how and when it meets."""

    row: str
    bytes: int
    kind: str
    sent: int
    received: int
    when: Every
    before_step: bool
    state: int
    flying: int
    working: int

    def in_flight(self, step: int) -> int:
        """Rounds under way after this many steps."""
        return self.when.rounds_due(step) - self.when.rounds_due(step - self.when.delay)

    @property
    def in_passing(self) -> int:
        """Bytes of memory that one round passes through."""
        return self.flying + self.working

    @property
    def per_step(self) -> float:
        return self.bytes / self.when.period


@dataclass(frozen=True)
class Cost:
    """The price of a method; see `cost`.

    >>> import thinwire as tw
    >>> price = tw.cost(tw.local_sgd(every=10), nn.Linear(3, 1), workers=2)
    >>> price.bytes(30), price.bytes_per_step, len(price.rows)
    (48, 1.6, 1)
    """

    rows: tuple[RowCost, ...]

    def bytes(self, steps: int) -> int:
        """What `fleet.bytes_sent` will be after so many steps."""
        _check_steps(steps)
        return sum(row.bytes * row.when.rounds_due(steps) for row in self.rows)

    @property
    def bytes_per_step(self) -> float:
        """The long-run mean."""
        return sum(row.per_step for row in self.rows)

    def wire(self, steps: int) -> tuple[int, int]:
        """What one worker will have sent and received after so many steps."""
        _check_steps(steps)
        rounds = [row.when.rounds_due(steps) for row in self.rows]
        sent = sum(row.sent * n for row, n in zip(self.rows, rounds, strict=True))
        return sent, sum(row.received * n for row, n in zip(self.rows, rounds, strict=True))

    def memory(self, offload: bool = False) -> tuple[int, int]:
        """Extra bytes at the peak, on the device and on the host.

        With `offload` the outer state lives on the host and one row's at a time visits the device.
        """
        state = sum(row.state for row in self.rows)
        passing = max((self._passing(step, offload) for step in self._busy_steps()), default=0)
        return (passing, state) if offload else (passing + state, 0)

    def _busy_steps(self) -> set[int]:
        """Steps after which a round is launched or landed, until most rows have met most others on their way."""
        whens = [row.when for row in self.rows]
        end = 2 + max((2 * when.period + when.offset + when.delay for when in whens), default=0)
        launches = [(step, when) for when in whens for step in range(when.launch_step(1), end, when.period)]
        return {at for step, when in launches for at in (step, step + when.delay) if at < end}

    def _passing(self, step: int, offload: bool) -> int:
        """What the rounds of one step take: all that fly at its start or end, and the work on one of them."""
        flying = sum(row.flying * max(row.in_flight(step - 1), row.in_flight(step)) for row in self.rows)
        busy = [row for row in self.rows if _moves(row, step)]
        own = [(row.flying if not row.when.delay else 0) + row.working + (row.state if offload else 0) for row in busy]
        return flying + max(own, default=0)


def _check_steps(steps: Any) -> None:
    if not isinstance(steps, Integral) or steps < 0:  # NumPy's too
        raise ValueError(f"steps must be a whole number, at least 0, not {steps!r}")


def cost(method: Method, model: nn.Module, workers: int, optimizer: Any = None) -> Cost:
    """The price of `method` on `model`, which may live on the meta device.

    Without an optimizer every trainable tensor is taken to have every named state. A price is that of a worker:
    where its shards meet those of other workers, each process takes its part of the memory; where one process leads,
    it takes all of it, and room for one unsharded tensor while it gathers.

    >>> import thinwire as tw
    >>> tw.cost(tw.desloc(every=256), nn.Linear(100, 10), workers=4).bytes_per_step
    23.67...
    """
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers must be a whole number, at least 1, not {workers!r}")
    replica = Replica(model, optimizer if optimizer is not None else [])
    replica.is_whole = True  # a message is of unsharded tensors, however many processes hold them
    table = a_method(method).resolved(replica).rows
    rows = [(str(row), row, Live(row.view, replica, row.codec.align)) for row in table]
    header = header_length(replica.most_tensors)
    return Cost(tuple(_price(text, row, live, workers, header) for text, row, live in rows if live.names))


def _price(text: str, row: Sync, live: Live, workers: int, header: int) -> RowCost:
    size = 0 if row.rule.silent else row.codec.size(live.layout)
    kind = exchange_kind(row.codec, workers)
    second = row.codec.second.size(live.layout) if row.codec.second else 0
    moved = 0 if row.rule.silent else wire_bytes(kind, size, second, workers) + (workers - 1) * header
    state, flying, working = _memory(row, live, workers, size)
    return RowCost(text, size, kind, moved, moved, row.every, row.view.kind == "grads", state, flying, working)


def _moves(row: RowCost, step: int) -> bool:
    """Whether a round of this row is launched or landed after this step."""
    return any(row.when.rounds_due(at) > row.when.rounds_due(at - 1) for at in (step, step - row.when.delay))


def _memory(row: Sync, live: Live, workers: int, size: int) -> tuple[int, int, int]:
    """Bytes of a row's lasting state, of one round while it is under way, and of the work at its launch and landing."""
    live.device = torch.device("meta")
    scope, whole = row.scope(workers), FLOAT * live.layout.total
    if row.rule.silent:
        return 0, 0, 0
    feedback = int(row.feedback is not None and not row.codec.lossless)
    buffers = [tensor for tensor in row.rule.init(live, scope).values() if tensor is not None]
    state = sum(tensor.nbytes for tensor in buffers) + feedback * whole
    kept = (row.rule.keeps(scope) + row.rule.uses_own(scope) + feedback) * whole
    if row.codec.linear:  # the message itself is on its way, and becomes the mean
        return state, whole + kept, row.rule.scratch(scope) * whole
    legs = workers if exchange_kind(row.codec, workers) == "gather" else 2
    return state, kept + size * (1 + legs), (1 + row.rule.scratch(scope)) * whole
