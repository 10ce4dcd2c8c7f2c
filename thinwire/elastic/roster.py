"""What the coordinator knows: the workers' last reports and the settings they share. A restart rebuilds all of it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WORKERS = 1024
FORGET = 3600.0  # seconds after which a silent worker leaves the list
TEXT = 200  # characters
DEPTH = 8  # of settings

NUMBER = (int, float)
FACTS: dict[str, tuple[type, ...]] = {
    "worker": (str,),
    "name": (str,),
    "step": (int,),
    "committed": (int,),
    "lost": (int,),
    "taking_part": (list,),
    "alone": (bool,),
    "alone_rounds": (int,),
    "bytes_sent": (int,),
    "loss": (*NUMBER, str, type(None)),
    "settings_hash": (str, type(None)),
    "quorum": (int,),  # the number of the quorum it works in; negative once that is broken
    "waiting": (int,),  # the step at whose rounds it waits for the others; -1 while it trains
    "finished": (bool,),  # it has taken the run's last step, and left
}


def checked(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a report, if each is known and of its kind.

    >>> checked({"worker": "a", "step": "three"})
    Traceback (most recent call last):
    ValueError: the fact step is 'three': it must be int
    """
    for name, value in facts.items():
        if name not in FACTS:
            raise ValueError(f"{name[:TEXT]!r} is no fact of a report; known: {', '.join(FACTS)}")
        if not isinstance(value, FACTS[name]) or not _short(value):
            kinds = " or ".join(kind.__name__ for kind in FACTS[name])
            raise ValueError(f"the fact {name} is {str(value)[:TEXT]!r}: it must be {kinds}")
    return facts


def _short(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= WORKERS and all(isinstance(item, str) and len(item) <= TEXT for item in value)
    return not isinstance(value, str) or len(value) <= TEXT


def _is_shallow(value: Any, depth: int = DEPTH) -> bool:
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return depth > 0 and all(_is_shallow(item, depth - 1) for item in inside)


def settings_hash(settings: dict[str, Any]) -> str:
    """
    >>> settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@dataclass
class Report:
    facts: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0

    @property
    def step(self) -> int:
        return int(self.facts.get("step", 0))

    @property
    def place(self) -> dict[str, int]:
        return {name: int(self.facts[name]) for name in ("quorum", "waiting") if name in self.facts}


class Roster:
    """Thread-safe. A worker is live while it has reported within `patience` seconds.

    >>> roster = Roster(patience=5.0)
    >>> roster.hear({"worker": "a", "step": 3})
    >>> roster.agree("a", {"every": 64}), roster.agree("b", {"every": 32})
    ({'every': 64}, {'every': 64})
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.settings: dict[str, Any] | None = None
        self.finished = False  # somebody took the last step of the run with these settings
        self._stored = 0.0
        self._reports: dict[str, Report] = {}
        self._lock = threading.Lock()

    def hear(self, facts: dict[str, Any]) -> None:
        worker = str(checked(facts)["worker"])
        with self._lock:
            self._reports.pop(worker, None)  # to the end: they are kept in the order of their last reports
            self._reports[worker] = Report(facts, time.monotonic())
            self.finished |= bool(facts.get("finished")) and facts.get("settings_hash") == self._hash()
            self._forget()

    def _forget(self) -> None:
        """Drop those unheard for long; among too many, the longest unheard."""
        now = time.monotonic()
        while True:
            oldest = next(iter(self._reports))
            if len(self._reports) <= WORKERS and now - self._reports[oldest].heard < FORGET:
                return
            del self._reports[oldest]

    def agree(self, worker: str, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The settings that hold: those of whoever came first, or after a restart of whoever has trained longest.

        None while a live worker is known to hold others than these, which it has yet to tell.
        """
        if not _is_shallow(settings):
            raise ValueError(f"settings are nested more than {DEPTH} deep")
        with self._lock:
            asked, step = settings_hash(settings), self._reports.get(worker, Report()).step
            if self.settings is None:
                if self._trained(lambda held: held != asked) >= step:
                    return None
                self._store(settings)
            elif self._hash() == asked or self._holders() < step:
                self._store(settings)
            return self.settings

    def _hash(self) -> str:
        return settings_hash(self.settings or {})

    def _store(self, settings: dict[str, Any]) -> None:
        self.finished &= settings == self.settings  # others are another run
        self.settings, self._stored = settings, time.monotonic()

    def _holders(self) -> int:
        """How far those with the settings that hold have come; who has just told them counts before its next report."""
        own = self._hash()
        fresh = not self.finished and time.monotonic() - self._stored < self.patience
        return max(self._trained(lambda held: held == own), 0 if fresh else -1)

    def _trained(self, wanted: Callable[[str], bool]) -> int:
        """The highest step among live workers with such settings who still train; -1 when there is none."""
        live = (r for r in self._reports.values() if self._live(r) and not r.facts.get("finished"))
        held = ((report.facts.get("settings_hash"), report.step) for report in live)
        return max((step for hash_, step in held if hash_ and wanted(hash_)), default=-1)

    def _live(self, report: Report) -> bool:
        return time.monotonic() - report.heard < self.patience

    def ages(self) -> dict[str, Any]:
        """What a worker needs to know of the others."""
        now = time.monotonic()
        with self._lock:
            return {w: {"age": round(now - r.heard, 3), "step": r.step, **r.place} for w, r in self._reports.items()}

    def status(self) -> list[dict[str, Any]]:
        """Every known worker with all that it said; the live ones first."""
        now = time.monotonic()
        with self._lock:
            reports = [self._reports[worker] for worker in sorted(self._reports)]
            said = [{**r.facts, "age": round(now - r.heard, 1), "live": self._live(r)} for r in reports]
        return sorted(said, key=lambda facts: not facts["live"])
