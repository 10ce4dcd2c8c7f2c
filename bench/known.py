"""The results by the names of their runs, and what is computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

AGAIN = ", seed 1"  # how the name of a run with the second seed ends
ON_CPU = "0.2M"  # the preset of most runs on a CPU
CPU_PRESETS = (ON_CPU, "1M")
LARGE = "12M"  # the preset of most runs on a GPU; the others compare among themselves only


class NotRun(Exception):
    """A result that a claim needs is missing."""


@dataclass(frozen=True)
class Known:
    results: dict[str, dict[str, Any]]

    def loss(self, name: str) -> float:
        return float(self.get(name)["finished"])

    def lowest(self, name: str) -> float:
        """The least held-out loss that the run ever had."""
        return min(float(point["held"]) for point in self.get(name)["curve"])

    def bytes(self, name: str) -> int:
        return int(self.get(name)["bytes_sent"])

    def gap(self, name: str, to: str, lowest: bool = False) -> float:
        """In percent of the loss; of the lowest that the other ever had, if so."""
        return percent(self.loss(name), self.lowest(to) if lowest else self.loss(to))

    def gaps(self, name: str, to: str, lowest: bool = False) -> list[float]:
        """The same for each seed that both were run with, the first in any case."""
        both_again = {name + AGAIN, to + AGAIN} <= set(self.results)
        return [self.gap(name + end, to + end, lowest) for end in ("", *[AGAIN] * both_again)]

    def changes(self, preset: str | None = LARGE) -> dict[str, float]:
        """What the second seed changed, in percent of the loss, of every run of this size that has one."""
        again = [name for name in self.results if name + AGAIN in self.results and self.preset(name) == preset]
        return {name: abs(self.gap(name + AGAIN, name)) for name in again}

    def noise(self, *names: str) -> float:
        """The most that another seed changed among `names` if all have one, else the median of all of their size."""
        changes = self.changes(self.preset(names[0]))
        chosen = [changes[name] for name in names if name in changes]
        if not changes:
            raise NotRun(f"a second seed of {names[0]}'s size")
        return max(chosen) if len(chosen) == len(names) else median(changes.values())

    def preset(self, name: str) -> str | None:
        return self.get(name).get("preset")

    def fewer(self, name: str) -> float:
        result = self.get(name)
        return float(4 * result["parameters"] * result["steps"] / result["bytes_sent"])

    def fewer_received(self, name: str) -> float:
        """What reaches a worker, against DDP's ring of as many workers."""
        result = self.get(name)
        ring = 2 * (result["workers"] - 1) / result["workers"] * 4 * result["parameters"]
        return float(ring * result["steps"] / result["wire_received"])

    def best(self, prefix: str) -> str:
        """The run of least loss among those of the first seed whose names begin so."""
        names = [name for name in self.results if name.startswith(prefix) and not name.endswith(AGAIN)]
        if not names:
            raise NotRun(f"{prefix} ..")
        return min(names, key=self.loss)

    def get(self, name: str) -> dict[str, Any]:
        if name not in self.results:
            raise NotRun(name)
        return self.results[name]


def percent(one: float, other: float) -> float:
    return 100 * (one / other - 1)
