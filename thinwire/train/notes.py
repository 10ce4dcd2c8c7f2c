"""Small notes among the processes of a run: losses, timings, stops, lists of checkpoints.

They travel over the store that the processes met at, beside the exchanges and never in their way: a post never waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import thinwire as tw
from thinwire.train.watch import Watch

_LOOK = 0.2  # seconds between two looks at the store, at most: signals are heard between them


class Notes:
    """`post` a note, later `read` everybody's of that number. Every process posts the same number of notes."""

    def __init__(
        self, process: int = 0, processes: int = 1, store: Any = None, wait: int = 600, host: str = ""
    ) -> None:
        self.process, self.processes, self.store, self.wait = process, processes, store, wait
        self.host = host  # of process 0
        self.watch = Watch()
        self.number = 0
        self.own: dict[int, str] = {}
        self.seen: list[int] = []  # notes read since the last post
        self.behind: dict[int, list[int]] = {}  # of each posted note: what everybody had read before posting it

    def keep_watch(self) -> None:
        """From here on a process that ends is noticed at once, and not after `wait` seconds. All call it."""
        if self.processes > 1 and self.host:
            port = self.exchange(self.watch.open(self.host) if self.process == 0 else None)[0]
            if self.process:
                self.watch.join(self.host, port, self.process)

    def post(self, note: Any) -> int:
        self.number += 1
        text = self.own[self.number] = json.dumps(note)
        self.behind[self.number], self.seen = self.seen, []
        if self.store is not None:
            self._ask(partial(self.store.set, self._key(self.number, self.process), text))
        return self.number

    def read(self, number: int) -> list[Any]:
        """All notes of this number, in process order. Waits for those that are not there yet."""
        texts = {self.process: self.own.pop(number)}
        self._wait_for_all(number)
        for process in self._others():
            texts[process] = self._ask(partial(self.store.get, self._key(number, process))).decode()
        self.seen.append(number)
        for old in self.behind.pop(number):
            self._forget(old)
        return [json.loads(texts[process]) for process in range(self.processes)]

    def exchange(self, note: Any) -> list[Any]:
        return self.read(self.post(note))

    def leave(self) -> None:
        """All go on from here to their end. Process 0 hosts the store, so it waits until the others have read all."""
        number = self.post("done")
        if self.process == 0:
            self.read(number)

    def _wait_for_all(self, number: int) -> None:
        """Asked again and again: within the store's own waiting neither a signal nor a lost process is noticed."""
        began, pause = time.monotonic(), 0.001
        while True:
            gone = set(self.watch.gone)  # looked at first: who ends after it has posted is not missed
            absent = self._absent(number)
            if not absent:
                return
            if lost := sorted(gone.intersection(absent)):
                raise _gone(lost)
            if time.monotonic() - began > self.wait:
                raise _lost(absent, f"not heard from for {self.wait} s")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)

    def _absent(self, number: int) -> list[int]:
        """The processes that have not posted this note."""
        keys = {process: self._key(number, process) for process in self._others()}
        if not keys:
            return []
        return self._ask(lambda: [process for process, key in keys.items() if not self.store.check([key])])

    def _others(self) -> list[int]:
        return [process for process in range(self.processes) if process != self.process]

    def _forget(self, number: int) -> None:
        # everybody has posted a note since they read this one, so nobody asks for it again
        if self.store is not None:
            self._ask(partial(self.store.delete_key, self._key(number, self.process)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        """In a thread: the store's client waits without end for a host that is stopped, and lets no signal through."""
        answers, errors = list[Any](), list[RuntimeError]()

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                errors.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(self.wait)
        if errors:  # the store is gone with process 0, which may have ended because another one did
            raise _gone(sorted({0, *self.watch.gone})) from errors[0]
        if not answers:
            raise _lost([0], f"not heard from for {self.wait} s")
        return answers[0]

    @staticmethod
    def _key(number: int, process: int) -> str:
        return f"thinwire/notes/{number}/{process}"


def _lost(processes: Sequence[int], how: str) -> tw.PeerLost:
    names = " and ".join(f"process {process}" for process in processes)
    return tw.PeerLost(f"{names} {how}", processes)


def _gone(processes: Sequence[int]) -> tw.PeerLost:
    return _lost(processes, "is gone" if len(processes) == 1 else "are gone")
