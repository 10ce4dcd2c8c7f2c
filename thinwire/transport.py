"""HOW messages travel: what every transport offers, and the one that stays in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# (part, its payloads and the headers in worker order) -> payload of the second leg
Reduce = Callable[[int, Sequence[Tensor], list[bytes]], Tensor]


class PeerLost(RuntimeError):
    """A round was lost. The engine lands nothing of it.

    `workers` are those not heard from; `row`, `round` and `step` say where it happened.

    >>> PeerLost("worker 3 not heard from", workers=[3], row=0, round=7).workers
    (3,)
    """

    def __init__(
        self, why: str, workers: Sequence[int] = (), row: int | None = None, round: int | None = None, step: int = 0
    ) -> None:
        super().__init__(why)
        self.workers, self.row, self.round, self.step = tuple(workers), row, round, step


class AllSick(PeerLost):
    """No worker had anything finite to say: the round is lost, whatever the transport."""


@dataclass(frozen=True)
class Key:
    """Names one meeting, the same on every worker: a round of a row, or a call such as `consensus`."""

    kind: str
    row: int = 0
    round: int = 0

    def __str__(self) -> str:
        return f"row {self.row}, round {self.round}" if self.kind == "round" else f"{self.kind}()"


@dataclass
class Order:
    """One exchange to make. `contributions` has one entry per hosted replica and is given up to the transport.

    mean      fp32 buffers, already scaled by their weights; the answer is their sum
    gather    payloads; the answer is every worker's payload, in worker order
    two_shot  lists of payloads, one per part; `reduce` turns a part's payloads into one of the second leg, of
              `second_sizes[part]` bytes; the answer is every part's second payload
    """

    key: Key
    headers: list[bytes]
    kind: str
    contributions: list[Any]
    reduce: Reduce | None = None
    second_sizes: list[int] = field(default_factory=list)
    step: int = 0


class Exchange(ABC):
    """A round under way."""

    @abstractmethod
    def poll(self) -> bool:
        """Push it on without waiting; true once the answer is here."""

    @abstractmethod
    def headers(self) -> list[bytes]:
        """Every worker's header, waited for."""

    @abstractmethod
    def result(self) -> Tensor | list[Tensor]:
        """The answer, waited for."""

    def confirm(self, complete: bool) -> bool:
        """Whether the round may be applied; `complete` says whether this worker has its answer."""
        return complete


class Transport(ABC):
    """Joins the replicas of all processes into one world, in rank order.

    `survives`: a lost round is an event, and training goes on; otherwise `PeerLost` reaches the user.
    `elastic`: workers come and go, so `renew` is called before rounds, and nobody may wait for all outside of them.

    >>> import thinwire as tw
    >>> transport = tw.Local()
    >>> transport.open(hosted=2, header_length=8)
    >>> transport.workers, transport.talk([b"one", b"two"])
    (2, [b'one', b'two'])
    """

    survives: bool = False
    elastic: bool = False
    worker: int = 0  # the first replica hosted here
    workers: int = 1
    parts: int = 1  # into how many parts a two-shot message is cut
    settings: dict[str, Any]  # of an elastic one: what else must be the same on all, beside the method
    beginning: bool = True  # whether all workers are at their start
    openings: int = 0  # fleets that have had it to themselves, one after another
    notify: Callable[[str, Sequence[int], str], None] = staticmethod(lambda kind, workers, text: None)

    def members(self) -> Sequence[int] | None:
        """The ranks of the default process group that it joins; None where they are of no group in common."""
        return None

    @abstractmethod
    def open(self, hosted: int, header_length: int) -> None:
        """Learn the world; this process brings `hosted` replicas, whose headers all have this length."""

    @abstractmethod
    def talk(self, blobs: Sequence[bytes]) -> list[bytes]:
        """Everybody's blobs of any length, one per replica, in worker order. Waits."""

    @abstractmethod
    def meet(self, key: Key, headers: list[bytes], on_ahead: Callable[[Key], None]) -> list[bytes]:
        """Wait until every worker is at `key`. `on_ahead` is called for each round a peer launched before it."""

    @abstractmethod
    def exchange(self, order: Order) -> Exchange:
        """Start an exchange; never waits for a peer."""

    @abstractmethod
    def broadcast(self, buffers: Sequence[Tensor], source: int) -> Tensor:
        """Worker `source`'s buffer, on every process. `buffers` has one per hosted replica. Waits."""

    @abstractmethod
    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        """The sum of all workers' buffers, which are given up. Waits; all workers must be here (see `meet`)."""

    def share_line(self, processes: int) -> None:
        """So many processes of this worker send at once: a limit on the rate is for all of them together."""
        return None

    def leave(self, why: str) -> None:
        """Tell the others that this worker is done."""
        return None

    def host(self, newcomers: Newcomers) -> None:
        """Learn what to hand to a worker who joins."""
        return None

    def renew(self, step: int, ahead: bool, ends: bool = False) -> bool:
        """Before the rounds of a step: let in who came, give up who left. Whether this worker took another's state.

        `ahead`: nothing due now must land at once, so those who are late may still come until the next time.
        `ends`: this is for the end of training, and no round that a slow worker might skip to.
        """
        return False

    def awaited(self, step: int) -> bool:
        """Whether the others have waited long for this worker at the rounds of that step."""
        return False

    def look_ahead(self) -> None:
        """After the rounds of a step: begin to ask who will take part in the next ones."""
        return None


class Newcomers(ABC):
    """What an elastic transport asks of the engine when the membership changes."""

    @abstractmethod
    def drain(self) -> None:
        """Land all that is in flight: a newcomer cannot take part in it."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """All that a newcomer needs."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Take over another worker's state."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What must be the same on all workers."""


class Local(Transport):
    """All replicas in this process: the exchange is a loop in memory.

    `lose(row, number)` loses the rounds for which it is true, for tests and studies.

    >>> Local(lose=lambda row, number: number % 5 == 0).survives
    True
    """

    survives = True

    def __init__(self, lose: Callable[[int, int], bool] | None = None) -> None:
        if not (lose is None or callable(lose)):
            raise ValueError(f"lose must be a function of row and round number, not {lose!r}")
        self.lose = lose

    def open(self, hosted: int, header_length: int) -> None:
        self.openings += 1
        self.workers = hosted

    def talk(self, blobs: Sequence[bytes]) -> list[bytes]:
        return list(blobs)

    def meet(self, key: Key, headers: list[bytes], on_ahead: Callable[[Key], None]) -> list[bytes]:
        return list(headers)

    def exchange(self, order: Order) -> Exchange:
        lost = self.lose is not None and order.key.kind == "round" and self.lose(order.key.row, order.key.round)
        return _InMemory(order, lost)

    def broadcast(self, buffers: Sequence[Tensor], source: int) -> Tensor:
        return buffers[source].clone()

    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        return add_in_order(buffers)


class _InMemory(Exchange):
    def __init__(self, order: Order, lost: bool) -> None:
        self.order, self.lost = order, lost

    def poll(self) -> bool:
        return True

    def headers(self) -> list[bytes]:
        if self.lost:
            key = self.order.key
            raise PeerLost(f"{key} was lost on purpose", row=key.row, round=key.round, step=self.order.step)
        return self.order.headers

    def result(self) -> Tensor | list[Tensor]:
        given = self.order.contributions
        if self.order.kind == "mean":
            return add_in_order(given)
        if self.order.kind == "gather":
            return given
        assert self.order.reduce is not None
        parts = zip(*given, strict=True)
        return [self.order.reduce(part, payloads, self.order.headers) for part, payloads in enumerate(parts)]


def add_in_order(buffers: Sequence[Tensor]) -> Tensor:
    """The sum, first to last, into the first buffer."""
    total = buffers[0]
    for buffer in buffers[1:]:
        total.add_(buffer)
    return total
