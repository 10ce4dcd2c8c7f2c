"""Any thinwire method on the timeline: its rows as the engine executes them, its bytes from `tw.cost`.

There is no second description of the methods here. A row launches after step t when t > offset and
(t - offset) % period == 0, and the worker waits for it after step t + delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from thinwire.cost import Cost, RowCost
from thinwire.plan.timeline import Array, Compute, Event, Link, Message, Timeline, seconds_on_line

ROUNDS = 40  # rounds of the rarest row that a prediction plays: the first ones then no longer matter
_WIDTH = 1024  # columns of the matrices in a sketched block, a multiple of every codec's block

# Latencies of one exchange, one after another: a ring passes 2(M-1) times, a ring gather M-1 times; a two-shot
# exchange sends all its first parts at once and gathers the second ones.
LEGS: dict[str, Callable[[int], int]] = {
    "mean": lambda workers: 2 * (workers - 1),
    "gather": lambda workers: workers - 1,
    "two_shot": lambda workers: workers,
}


class Sketch(nn.Module):
    """A model without weights: `layers` equal blocks, one matrix each, and what is left of `parameters` as a vector."""

    def __init__(self, parameters: int, layers: int) -> None:
        super().__init__()
        width = min(_WIDTH, parameters // layers)
        shape = (parameters // layers // width, width)
        self.layers = nn.ModuleList(nn.ParameterList([_weights(*shape)]) for _ in range(layers))
        if rest := parameters - layers * shape[0] * width:
            self.rest = _weights(rest)


def _weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device="meta"))


@dataclass(frozen=True)
class Overhead:
    """What the bare link model leaves out; `bench/plan_vs_real.py` holds the numbers against real runs.

    `framing`   bytes on the wire per byte of the message: headers of the protocols and acknowledgements of the peer's
    `pair`      the same for a gather between two workers, on top: gloo often lets one way wait for the other there
    `handling`  seconds of the worker's own time per byte of the buffers that a round passes through, at both ends
    """

    framing: float = 1.0
    pair: float = 1.0
    handling: float = 0.0


NONE = Overhead()
MEASURED = Overhead(framing=1.07, pair=1.4)


def events(price: Cost, workers: int, steps: int, overhead: Overhead = MEASURED) -> Iterator[Event]:
    """The messages of `steps` optimizer steps; step t of the engine, counted from 1, is step t - 1 here."""
    for number, row in enumerate(price.rows):
        if not row.bytes:
            continue
        message = _message(row, workers, overhead)
        for step in range(row.when.offset + row.when.period, steps + 1, row.when.period):
            yield Event(step - 1, message, row.when.delay, row=number)


def _message(row: RowCost, workers: int, overhead: Overhead) -> Message:
    first = row.bytes * (workers - 1) / workers
    framing = overhead.framing * (overhead.pair if row.kind == "gather" and workers == 2 else 1.0)
    return Message(
        sent=row.sent * framing,
        received=row.received * framing,
        legs=LEGS[row.kind](workers),
        handling=overhead.handling * row.in_passing,
        second=1 - first / row.sent if row.kind == "two_shot" else 0.0,
    )


def utilization(price: Cost, compute: Compute, links: Sequence[Link], overhead: Overhead = MEASURED) -> Array:
    """Compute time over wall time in the long run, for each bandwidth of the links."""
    workers = len(compute.step_times)
    steps = ROUNDS * max(row.when.period for row in price.rows)
    return Timeline(compute, links).utilization(events(price, workers, steps, overhead), steps)


def round_seconds(price: Cost, links: Sequence[Link], workers: int, every: int) -> float:
    """Seconds of exchange per `every` steps, were nothing hidden: rows that meet less often count in part."""
    seconds = 0.0
    for row in (row for row in price.rows if row.bytes):
        message = _message(row, workers, MEASURED)
        once = float(np.min(seconds_on_line(links, message))) + message.legs * max(link.latency for link in links)
        seconds += once * every / row.when.period
    return seconds
