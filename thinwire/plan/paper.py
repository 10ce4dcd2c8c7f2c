"""The papers' utilization tables, and the schedule that reproduces them on our timeline.

Published: Gbit/s between two sites needed for a compute utilization of 50/80/90/95/99% (arXiv 2502.12996, and for
the out-of-sample table 2503.09799). Both searched `logspace(-1, 3, 50)` and print the last grid point BELOW the
target, so the true need is one grid step (x1.207) higher; `steady_state` says what a long run really needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from thinwire.plan.timeline import Array, Compute, Event, Link, Message, Timeline

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID: Array = np.logspace(-1, 3, 50)  # Gbit/s
LONG = 40  # periods after which the first rounds no longer matter


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    layers: int
    step_time: float


@dataclass(frozen=True)
class Schedule:
    """One row of a published table."""

    method: str
    every: int
    bits: int = 16
    streaming: bool = False
    slack: int = 0  # steps a message may take: 0, 1 (1-inner), or every (1-outer)

    def interval(self, fragments: int) -> int:
        """Steps between two messages. The rows with H = 30 fit only one fragment EVERY step."""
        if not self.streaming:
            return self.every
        return 1 if self.every == 30 else round(100 / fragments)


MODELS = (Model("1B", 1e9, 24, 0.1), Model("10B", 1e10, 48, 0.8), Model("100B", 1e11, 108, 4.9))

PUBLISHED: dict[Schedule, tuple[str, str, str]] = {
    Schedule("Data-Parallel", 1): (
        "86.8 152.6 184.2 222.3 569.0",
        "104.8 222.3 222.3 268.3 471.5",
        "184.2 323.8 390.7 390.7 471.5",
    ),
    Schedule("DiLoCo H=100", 100): (
        "1.4 6.2 13.3 23.3 86.8",
        "1.7 7.5 16.0 33.9 104.8",
        "3.0 11.0 23.3 49.4 184.2",
    ),
    Schedule("Streaming H=100", 100, streaming=True): (
        "1.4 5.2 9.1 16.0 28.1",
        "1.7 5.2 9.1 13.3 19.3",
        "2.4 6.2 9.1 11.0 19.3",
    ),
    Schedule("Streaming, 1-inner, bf16, H=100", 100, streaming=True, slack=1): (
        "1.4 4.3 6.2 9.1 11.0",
        "1.7 3.6 5.2 6.2 7.5",
        "1.7 3.6 4.3 5.2 5.2",
    ),
    Schedule("Streaming, 1-inner, FP4, H=100", 100, bits=4, streaming=True, slack=1): (
        ".4 .9 1.7 2.0 3.0",
        ".4 .9 1.4 1.4 1.7",
        ".5 .9 1.1 1.1 1.4",
    ),
    Schedule("Streaming, 1-inner, FP4, H=30", 30, bits=4, streaming=True, slack=1): (
        "2.4 3.6 4.3 4.3 4.3",
        "1.4 2.4 2.4 3.0 3.0",
        ".9 1.7 2.0 2.0 2.0",
    ),
    Schedule("Streaming, 1-outer (eager), FP4, H=30", 30, bits=4, streaming=True, slack=30): (
        "1.1 2.0 2.0 2.0 2.4",
        ".7 1.1 1.4 1.4 1.4",
        ".5 .8 .9 .9 .9",
    ),
    Schedule("Streaming, 1-outer (eager), FP4, H=100", 100, bits=4, streaming=True, slack=100): (
        ".1 .2 .2 .2 .2",
        ".1 .2 .2 .3 .3",
        ".2 .3 .3 .3 .4",
    ),
}

# The scaling-laws paper, DiLoCo without streaming, 10B: nothing here was fitted to it.
OUT_OF_SAMPLE: dict[Schedule, str] = {
    Schedule("DiLoCo H=1", 1): "104.8 184.2 222.3 222.3 390.7",
    Schedule("DiLoCo H=10", 10): "16.0 49.4 86.8 152.6 222.3",
    Schedule("DiLoCo H=50", 50): "3.0 11.0 23.3 41.0 126.5",
    Schedule("DiLoCo H=100", 100): "1.4 6.2 13.3 23.3 86.8",
    Schedule("DiLoCo H=300", 300): ".5 2.0 4.3 9.1 41.0",
}


@dataclass(frozen=True)
class Cell:
    method: str
    size: str
    target: float
    published: float
    ours: float
    steady_state: float | None  # the first grid point that meets the target in a long run; None: none does


def cells() -> list[Cell]:
    """The 120 published cells beside ours, computed now."""
    return [
        cell
        for schedule, rows in PUBLISHED.items()
        for model, row in zip(MODELS, rows, strict=True)
        for cell in _row(schedule, model, row)
    ]


def out_of_sample() -> list[Cell]:
    return [cell for schedule, row in OUT_OF_SAMPLE.items() for cell in _row(schedule, MODELS[1], row)]


def events(schedule: Schedule, model: Model, steps: int) -> Iterator[Event]:
    """Step 0 syncs; fragments of three layers, strided, take turns."""
    fragments = model.layers // 3 if schedule.streaming else 1
    bits = model.parameters / model.layers * schedule.bits
    for turn, step in enumerate(range(0, steps, schedule.interval(fragments))):
        layers = tuple(range(turn % fragments, model.layers, fragments))
        size = bits / 8 * len(layers)
        yield Event(step, Message(size, size), schedule.slack, layers)


def utilization(schedule: Schedule, model: Model, steps: int) -> Array:
    """At each point of the grid."""
    rates = GRID * 1e9 / 8
    # The papers divide their step time by three nodes a layer, though the first layer has only two.
    step_time = model.step_time * (1 - 1 / (3 * model.layers))
    timeline = Timeline(Compute([step_time], model.layers), [Link(rates, rates)])
    return timeline.utilization(events(schedule, model, steps), steps)


def _row(schedule: Schedule, model: Model, published: str) -> list[Cell]:
    short = utilization(schedule, model, 201 if schedule.every == 1 else 2 * schedule.every + 1)
    long = utilization(schedule, model, max(LONG * schedule.every, 201))
    return [
        Cell(schedule.method, model.name, target, float(value), _printed(short, target), _needed(long, target))
        for target, value in zip(TARGETS, published.split(), strict=True)
    ]


def _printed(utilizations: Array, target: float) -> float:
    """As the papers print it: the last grid point below the target."""
    return _rounded(GRID[max(int(np.searchsorted(utilizations, target)) - 1, 0)])


def _needed(utilizations: Array, target: float) -> float | None:
    first = int(np.searchsorted(utilizations, target))
    return _rounded(GRID[first]) if first < len(GRID) else None


def _rounded(point: float) -> float:
    return round(round(float(point), 2), 1)  # twice, as the papers do: 1.151 is printed 1.1
