"""What went wrong or was skipped, kept for whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEPT = 1000  # a fault in every round must not fill the memory


@dataclass(frozen=True)
class Event:
    """One thing that happened; docs/troubleshooting.md has every kind, "lost", "sick" and "slow" among them.

    >>> Event("lost", step=7, text="row 0, round 1", row=0, round=1).kind
    'lost'
    """

    kind: str
    step: int
    text: str
    row: int | None = None
    round: int | None = None
    workers: tuple[int, ...] = ()


class Events(list[Event]):
    """The last events, in order; `counts` has all of them.

    >>> events = Events()
    >>> events.add("lost", 7, "row 0, round 1", row=0, round=1)
    >>> events[0].step, events.counts
    (7, {'lost': 1})
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def add(
        self,
        kind: str,
        step: int,
        text: str,
        row: int | None = None,
        round: int | None = None,
        workers: Sequence[int] = (),
    ) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.append(Event(kind, step, text, row, round, tuple(workers)))
        del self[:-KEPT]
