"""What a run says while it goes: one live line on stderr, and plain lines around it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Protocol

from thinwire import units
from thinwire.report import words
from thinwire.report.metrics import Record


class Talker(Protocol):
    def show(self, record: Record, pace: list[dict[str, float]]) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class Silent:
    """A process that leaves the talking to another one."""

    def show(self, record: Record, pace: list[dict[str, float]]) -> None:
        return None

    def say(self, line: str) -> None:
        return None

    def close(self) -> None:
        return None


class Plain:
    """For a log file or a machine without rich: a line for each evaluation and each tenth of the run."""

    def __init__(self, steps: int) -> None:
        self.steps, self.held = steps, float("nan")

    def show(self, record: Record, pace: list[dict[str, float]]) -> None:
        for text in record.get("events", []):
            self.say(text)
        self.held = record.get("val_loss", self.held)
        tenth = max(1, self.steps // 10)
        if "val_loss" in record or record["step"] % tenth == 0:
            self.say(f"step {record['step']}/{self.steps} · {describe(record, pace, self.held)}")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        return None


class Bar:
    """Loss, speed, time left, bytes sent, the share of time spent waiting, live workers, and who waits for whom."""

    def __init__(self, steps: int, start: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        columns = (
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("", total=steps, completed=start)
        self.progress.start()
        self.held = float("nan")

    def show(self, record: Record, pace: list[dict[str, float]]) -> None:
        for text in record.get("events", []):
            self.say(text)
        self.held = record.get("val_loss", self.held)
        self.progress.update(self.task, completed=record["step"], description=describe(record, pace, self.held))

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def describe(record: Record, pace: list[dict[str, float]], held: float) -> str:
    """The live line's text."""
    parts = [f"loss {record['loss']:.3f}"]
    if held == held:
        parts.append(f"held-out {held:.3f}")
    parts.append(f"{units.show_count(record['tokens_per_second'])} tokens/s")
    parts.append(f"sent {units.show_size(record['bytes_sent'])}")
    parts.append(f"waiting {record['waited_share']:.0%}")
    parts.append("ALONE" if record.get("alone") and record["workers"] == 1 else words.workers(record["workers"]))
    return " · ".join(parts + _who_waits(pace))


def _who_waits(pace: list[dict[str, float]]) -> list[str]:
    """Each process's step time, and the one that the others wait for, where one is slower by a tenth."""
    if len(pace) < 2:
        return []
    own = [entry["compute_seconds"] for entry in pace]
    times = "/".join(f"{seconds:.2f}" for seconds in own)
    slowest = max(range(len(own)), key=own.__getitem__)
    others = sorted(own)[-2]
    return [f"step {times} s" + (f", all wait for {slowest}" if own[slowest] > 1.1 * others else "")]


def talker(writes: bool, steps: int, start: int) -> Talker:
    if not writes:
        return Silent()
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return Bar(steps, start)
    return Plain(steps)
