"""Where the workers of `Group.connect` find each other, before they connect: gloo would not say who is missing."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

from .transport import PeerLost
from .waiting import Found, in_time

_LOOK = 0.1  # seconds between two looks at the store
_ANSWER = 5.0  # seconds in which it answers, if its host lives


class Meeting:
    """One worker at the store: who is there, with which number, and of how many. `gather` waits for all."""

    def __init__(self, store: Any, address: str, worker: int, workers: int, timeout: float) -> None:
        self.store, self.address, self.worker, self.workers = store, address, worker, workers
        self.timeout, self.mark, self.gathered = timeout, uuid.uuid4().hex, False
        if self._asked(lambda: store.check([f"joined/{worker}"]), timeout):
            raise ValueError(f"worker {worker} has joined at {address} already: give each worker a number of its own")
        store.set(f"here/{worker}", json.dumps([workers, self.mark]))

    def gather(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.gathered:
            missing = self._asked(self._missing, max(_ANSWER, deadline - time.monotonic()))
            if missing and time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise RuntimeError(f"worker {names} has not come to {self.address} in {self.timeout:.0f} s")
            self.gathered = not missing
            if missing:
                time.sleep(_LOOK)
        self.store.set(f"joined/{self.worker}", "1")

    def _asked(self, question: Callable[[], Found], seconds: float) -> Found:
        try:
            return in_time(question, seconds)
        except TimeoutError as error:
            raise PeerLost(f"worker 0 does not answer at {self.address} ({error})", [0]) from error

    def _missing(self) -> list[int]:
        there = [other for other in range(self.workers) if self.store.check([f"here/{other}"])]
        for other in there:
            count, mark = json.loads(self.store.get(f"here/{other}"))
            if count != self.workers:
                self._refuse(f"worker {self.worker} has workers={self.workers}, worker {other} has workers={count}")
            if other == self.worker and mark != self.mark:
                self._refuse(f"two workers have come to {self.address} as number {other}")
        return [other for other in range(self.workers) if other not in there]

    def _refuse(self, why: str) -> None:
        if self.worker == 0:
            time.sleep(10 * _LOOK)  # the store ends with this process, and the others are to read the same
        raise ValueError(f"{why}: give all the same workers=, and each its own worker= from 0")
