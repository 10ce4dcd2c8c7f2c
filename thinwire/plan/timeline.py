"""One timeline: workers that compute layer by layer, a link that carries one message after another, and waits.

Everything is max and plus, so the time a run takes never falls when a message gets larger or a link slower.
All bandwidths of a sweep are simulated at once: times are arrays over scenarios (the leading axis, S).
A step is the papers': forward first to last, then backward last to first, each layer's activations before its
parameters (the first layer has no backward of activations), equally long each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """A worker's line. Rates are bytes per second, one number or one per scenario; jitter is a standard deviation."""

    up: Array | float
    down: Array | float
    latency: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Message:
    """What one exchange moves per worker, and how.

    `legs`      latencies one after another
    `handling`  seconds of the worker's own time before the message leaves, and again when it has landed
    `second`    the part of the bytes that travels in a second leg, which a worker starts only between two steps
    """

    sent: float
    received: float
    legs: int = 0
    handling: float = 0.0
    second: float = 0.0


def seconds_on_line(links: Sequence[Link], message: Message) -> Array:
    """How long a message fills the links, latency apart, [S]: both ways at once, the slowest worker's line decides."""
    busy = [np.maximum(message.sent / link.up, message.received / link.down) for link in links]
    slowest: Array = np.max(np.broadcast_arrays(*busy), axis=0)
    return slowest


@dataclass(frozen=True)
class Event:
    """A message that leaves at `step` and is waited for `slack` steps later.

    With `layers` it travels in equal pieces, one a layer: a piece leaves when that layer's backward ends, and the
    layer's forward of step + 1 + slack waits for it. Without, it leaves after the step as a whole, and the worker
    waits for it after step + slack: before the next launch of the same `row`, after the launches of rows before it.
    """

    step: int
    message: Message
    slack: int = 0
    layers: tuple[int, ...] = ()
    row: int = 0


@dataclass(frozen=True)
class Compute:
    """What a worker's step is made of: seconds of compute in a step for each worker, and layers."""

    step_times: Sequence[float]
    layers: int = 1

    @property
    def busy(self) -> Array:
        """Seconds of compute in a step, [W]."""
        return np.asarray(self.step_times, dtype=float)

    @property
    def unit(self) -> Array:
        """Seconds of one node (forward, backward of activations, backward of parameters) of one layer, [W]."""
        return self.busy / (3 * self.layers - 1)

    @property
    def backward_ends(self) -> Array:
        """Seconds from the end of the forward pass to the end of each layer's backward, [W, L]."""
        nodes = 2.0 * (self.layers - np.arange(self.layers))
        nodes[0] -= 1  # nothing lies below the first layer
        return self.unit[:, None] * nodes


@dataclass
class Timeline:
    """Plays events on workers and their links; `links` is one line for all workers, or one for each."""

    compute: Compute
    links: Sequence[Link]
    seed: int = 0
    clock: Array = field(init=False)  # [S, W]: when each worker is ready for its next node
    free: Array = field(init=False)  # [S]: when the link is

    def utilization(self, events: Iterable[Event], steps: int) -> Array:
        """Compute time over wall time, the mean over workers, [S]; time stops with the last worker's last step."""
        self._reset(events)
        done = 0
        for step in sorted(s for s in {*self._pieces, *self._waits, *self._ticks} if s < steps):
            self._idle_steps(step - done)
            self._step(step)
            done = step + 1
        self._idle_steps(steps - done)
        wall: Array = self.clock.max(axis=1)
        return float(self.compute.busy.mean()) * steps / wall

    def _reset(self, events: Iterable[Event]) -> None:
        scenarios = np.broadcast_shapes((1,), *(np.shape(rate) for link in self.links for rate in (link.up, link.down)))
        self.clock = np.zeros((scenarios[0], len(self.compute.step_times)))
        self.free = np.zeros(scenarios[0])
        self._random = np.random.default_rng(self.seed)
        self._ends, self._backward = self.compute.backward_ends, self.compute.backward_ends.max(axis=1)
        self._pieces: dict[int, list[Event]] = defaultdict(list)
        self._waits: dict[int, list[Event]] = defaultdict(list)
        self._ticks: dict[int, list[tuple[int, int, Event]]] = defaultdict(list)
        self._ready: dict[int, Array] = {}  # by id of the event: when it has landed, [S] or [S, layers]
        for event in events:
            self._enter(event)

    def _enter(self, event: Event) -> None:
        """File an event under the steps at which it matters."""
        if event.layers:
            self._pieces[event.step].append(event)
            self._waits[event.step + 1 + event.slack].append(event)
        else:  # in one tick a row lands what is due, launches, and lands at once what has no delay
            self._ticks[event.step].append((event.row, 1, event))
            self._ticks[event.step + event.slack].append((event.row, 0 if event.slack else 2, event))

    def _idle_steps(self, count: int) -> None:
        self.clock = self.clock + count * self.compute.busy

    def _step(self, step: int) -> None:
        forward = self._forward(step)
        self._launch_pieces(step, forward)
        self.clock = forward + self._backward
        for _, phase, event in sorted(self._ticks.pop(step, []), key=lambda tick: tick[:2]):
            self._launch(event) if phase == 1 else self._land(event)

    def _forward(self, step: int) -> Array:
        """When each worker's forward pass ends: a layer that waits delays itself and those after it, [S, W]."""
        unit, layers = self.compute.unit, self.compute.layers
        ends = self.clock + layers * unit
        for event in self._waits.pop(step, []):
            below = layers - np.asarray(event.layers)  # layers still to do, this one included
            ready = self._ready.pop(id(event))[:, None, :] + unit[:, None] * below  # [S, W, pieces]
            ends = np.maximum(ends, ready.max(axis=2))
        return ends

    def _launch_pieces(self, step: int, forward: Array) -> None:
        for event in self._pieces.pop(step, []):
            order = np.argsort(event.layers)[::-1]  # as the backward pass reaches them
            enters = (forward[:, :, None] + self._ends[:, np.asarray(event.layers)[order]]).max(axis=1)
            ready = np.empty_like(enters)
            ready[:, order] = self._carry(enters, event.message, len(order))
            self._ready[id(event)] = ready

    def _launch(self, event: Event) -> None:
        self.clock = self.clock + event.message.handling
        enters = self.clock.max(axis=1, keepdims=True)  # an exchange starts when the last worker is there
        self._ready[id(event)] = self._carry(enters, event.message, 1)

    def _land(self, event: Event) -> None:
        """Wait for a message. Its second leg starts at the end of a step: at the last one, or one step late."""
        ready, second = self._ready.pop(id(event)), event.message.second
        if second and event.slack == 1:
            rest = second * seconds_on_line(self.links, event.message)[..., None]
            ready = np.maximum(ready, self.clock + rest)
        elif second and event.slack > 1:
            ready = ready + self.compute.busy.max()
        self.clock = np.maximum(self.clock, ready) + event.message.handling

    def _carry(self, enters: Array, message: Message, pieces: int) -> Array:
        """Serve a message in equal pieces, in order, after all that came before: when each arrives, [S, pieces]."""
        seconds, latency = self._seconds(message)
        served = np.arange(pieces) * (seconds / pieces)[:, None]
        begins = np.maximum.accumulate(np.maximum(enters, self.free[:, None]) - served, axis=1) + served
        finish = begins + (seconds / pieces)[:, None]
        self.free = finish[:, -1]
        return finish + latency

    def _seconds(self, message: Message) -> tuple[Array, float]:
        latency = max(self._latency(link, message.legs) for link in self.links)
        return np.broadcast_to(seconds_on_line(self.links, message), self.free.shape), latency

    def _latency(self, link: Link, legs: int) -> float:
        """Drawn once a message and never by scenario, so that more bandwidth cannot meet worse luck."""
        if not link.jitter:
            return legs * link.latency
        return max(0.0, float(self._random.normal(legs * link.latency, legs**0.5 * link.jitter)))
