"""Goodput when workers die, restart and straggle: synchronous, quorum and eager rounds, simulated worker by worker.

Goodput is the share of the worker-steps that a fleet of healthy, equally fast workers would take, of which the
fleet really commits. A dead worker loses what it did since its last committed round, is back after `recovery`
seconds and is healed by the others, so it starts at their point.

- synchronous: a round waits for everyone, the replacement of a dead worker and its repeated phase included
- quorum: a round closes soon after nine in ten have arrived or are known to be dead; who is late goes into the next
- eager: nobody waits for a round until one phase later; a dead worker is left out once its heartbeat is missed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.plan.timeline import Array

Mask = NDArray[np.bool_]
ROUNDS = 200
QUORUM = 0.9
GRACE = 0.1  # how long a round stays open after its quorum, as a share of a phase
LIVES = 500  # of a worker in one phase: if it dies more often than that, it never finishes the phase
STEP_SPREAD = 0.05  # standard deviation of one step's time, as a share of it


@dataclass(frozen=True)
class Fleet:
    """Workers that each take `phase` seconds of compute between two rounds, and `exchange` seconds for a round."""

    workers: int
    phase: float
    exchange: float
    every: int = 1
    slow: float = 0.0  # share of the workers that are slow, over many rounds
    slowdown: float = 2.0  # how many times longer their steps take

    def speeds(self, luck: float) -> Array:
        """Seconds of a phase on each worker in one round, relative to a healthy one, [W].

        Where the share is no whole number of workers, `luck`, from 0 to 1, rounds it up or down: 5% of 8 workers is
        one worker that is slow in 40% of the rounds.
        """
        speeds = np.ones(self.workers)
        speeds[: int(self.slow * self.workers + luck)] = self.slowdown
        return speeds


@dataclass(frozen=True)
class Faults:
    """Each worker dies once in `mtbf` seconds on average; a death is noticed after `heartbeat` seconds.

    So does the coordinator that decides who takes part; `absence` is how long it stays away.
    """

    mtbf: float = np.inf
    recovery: float = 60.0
    heartbeat: float = 5.0
    coordinator_mtbf: float = np.inf
    absence: float = 15.0


class _Course:
    """The random part of a simulation: how long phases take and when workers die."""

    def __init__(self, fleet: Fleet, faults: Faults, seed: int) -> None:
        self.fleet, self.faults = fleet, faults
        self.random = np.random.default_rng(seed)
        self.dies = self._lifetimes(fleet.workers)  # [W], when each dies next
        self._leaves = self._stay()  # when the coordinator dies next

    def phases(self) -> Array:
        """Seconds each worker needs for its next phase, [W]."""
        spread = STEP_SPREAD / np.sqrt(self.fleet.every)
        noise = self.random.normal(1.0, spread, self.fleet.workers)
        speeds = self.fleet.speeds(luck=self.random.random())
        return self.fleet.phase * speeds * np.maximum(noise, 0.1)

    def run(self, begin: float, who: Mask, finish: Array, noticed: Array) -> None:
        """`who` begin a phase: writes when each is done, repeated after a death, and when that death is noticed."""
        phases = self.phases()
        finish[who], noticed[who] = begin + phases[who], np.inf
        if np.isinf(begin):
            return
        for _ in range(LIVES):
            if not (dead := who & (self.dies < finish)).any():
                return
            noticed[dead] = np.minimum(noticed[dead], self.dies[dead] + self.faults.heartbeat)
            finish[dead] = self.restart(dead) + phases[dead]
        finish[dead] = np.inf

    def restart(self, dead: Mask) -> Array:
        """When the dead are back; each is given a new life from then on."""
        back: Array = self.dies[dead] + self.faults.recovery
        self.dies[dead] = back + self._lifetimes(int(dead.sum()))
        return back

    def agreed(self, time: float) -> float:
        """When a round for which all is ready at `time` can count: not while the coordinator is away."""
        while self._leaves <= time < np.inf:
            back = self._leaves + self.faults.absence
            time, self._leaves = max(time, back), back + self._stay()
        return time

    def _stay(self) -> float:
        mtbf = self.faults.coordinator_mtbf
        return np.inf if np.isinf(mtbf) else float(self.random.exponential(mtbf))

    def _lifetimes(self, count: int) -> Array:
        if np.isinf(self.faults.mtbf):
            return np.full(count, np.inf)
        return self.random.exponential(self.faults.mtbf, count)


def goodput(kind: str, fleet: Fleet, faults: Faults, rounds: int = ROUNDS, seed: int = 0) -> float:
    """`kind` is a key of `KINDS`."""
    phases, wall = KINDS[kind](_Course(fleet, faults, seed), rounds)
    return phases * fleet.phase / (fleet.workers * wall)


def _synchronous(course: _Course, rounds: int) -> tuple[int, float]:
    now, workers = 0.0, course.fleet.workers
    finish = np.zeros(workers)
    for _ in range(rounds):
        course.run(now, np.ones(workers, dtype=bool), finish, np.zeros(workers))
        now = float(finish.max()) + course.fleet.exchange
    return rounds * workers, now


def _quorum(course: _Course, rounds: int) -> tuple[int, float]:
    now, committed, workers = 0.0, 0, course.fleet.workers
    finish, noticed = np.zeros(workers), np.zeros(workers)
    early = np.ones(workers, dtype=bool)
    for _ in range(rounds):
        course.run(now, early, finish, noticed)
        ready = max(now, _closing(np.minimum(finish, noticed), course.fleet.phase), float(finish.min()))
        close = course.agreed(ready)
        early = finish <= close
        now, committed = close + course.fleet.exchange, committed + int(early.sum())
    return committed, now


def _closing(settled: Array, phase: float) -> float:
    """When a round closes: everyone has arrived or is known to be dead, or the grace after a quorum is over."""
    enough = int(np.ceil(QUORUM * len(settled))) - 1
    return min(float(settled.max()), float(np.partition(settled, enough)[enough]) + GRACE * phase)


def _eager(course: _Course, rounds: int) -> tuple[int, float]:
    begins = np.zeros(course.fleet.workers)
    back = np.zeros(course.fleet.workers)  # when a worker that died can take part again
    landed, committed = 0.0, 0
    for _ in range(rounds):
        here = back <= np.median(begins)  # who is not back yet sits this phase out
        finish = begins + course.phases()
        dead = here & (course.dies < finish)
        arrives = np.where(dead, course.dies + course.faults.heartbeat, finish)[here]
        back[dead] = course.restart(dead)
        committed += int((here & ~dead).sum())
        # The next phase begins with the mean of the phase before this one in hand.
        begins = np.maximum(np.where(here & ~dead, finish, np.median(finish)), landed)
        landed = course.agreed(max(landed, float(arrives.max(initial=landed)))) + course.fleet.exchange
    return committed, float(begins.max())


KINDS: dict[str, Callable[[_Course, int], tuple[int, float]]] = {
    "synchronous": _synchronous,
    "quorum": _quorum,
    "eager": _eager,
}
