"""One record a step, gathered from all processes; and the word that stops them all after the same step.

Processes exchange their records every few steps, and read an exchange only when the next is posted: nobody waits for a
slow line unless it is later than that. So a stop is acted on one exchange after it was asked for, by all alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from thinwire.report.metrics import Record, Sink
from thinwire.train.notes import Notes

Pace = list[dict[str, float]]  # of each process: seconds of a step, and of waiting


class Ledger:
    def __init__(self, notes: Notes, every: int, sinks: Sequence[Sink], show: Callable[[Record, Pace], None]) -> None:
        self.notes, self.every, self.sinks, self.show = notes, every, sinks, show
        self.stop_asked = ""
        self.records: list[tuple[Record, Tensor]] = []
        self.posted: deque[tuple[int, list[Record]]] = deque()

    def add(self, record: Record, losses: Tensor) -> str:
        """Take a step's record and hosted losses. Returns why to stop after this step, if somebody asked to."""
        self.records.append((record, losses))
        if record["step"] % self.every:
            return ""
        self.posted.append(self._post())
        return self._read_all_but(0 if self.notes.processes == 1 else 1)

    def flush(self) -> str:
        """Exchange and write all that is left. All processes call it after the same step."""
        if self.records:
            self.posted.append(self._post())
        return self._read_all_but(0)

    def write_own(self) -> None:
        """Write what is left with this process's losses alone: the others are gone."""
        own = [record | {"loss": _mean(losses.tolist())} for record, losses in self.records]
        for record in [record for _, records in self.posted for record in records] + own:
            self._write(record, [])
        self.posted.clear()
        self.records = []

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def _post(self) -> tuple[int, list[Record]]:
        losses = [losses.tolist() for _, losses in self.records]
        records = [record for record, _ in self.records]
        for record, own in zip(records, losses, strict=True):
            record["loss"] = _mean(own)
        pace = {key: _mean([record[key] for record in records]) for key in ("step_seconds", "compute_seconds")}
        self.records = []
        return self.notes.post({"losses": losses, "pace": pace, "stop": self.stop_asked}), records

    def _read_all_but(self, left: int) -> str:
        reasons = []
        while len(self.posted) > left:
            notes = self.notes.read(self.posted[0][0])
            self._merge(self.posted.popleft()[1], notes)
            reasons += [note["stop"] for note in notes if note["stop"]]
        return reasons[0] if reasons else ""

    def _merge(self, records: list[Record], notes: list[Any]) -> None:
        for index, record in enumerate(records):
            record["loss"] = _mean([loss for note in notes for loss in note["losses"][index]])
            self._write(record, [note["pace"] for note in notes])

    def _write(self, record: Record, pace: Pace) -> None:
        for sink in self.sinks:
            sink.write(finite(record))
        self.show(record, pace)


def finite(record: Record) -> Record:
    """With None, which JSON knows as null, for NaN and infinity, which strict readers of JSON refuse."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)
