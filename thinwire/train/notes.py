"""Small notes among the processes of a run: losses, timings, stops, lists of checkpoints.

They travel over the store that the processes met at, beside the exchanges and never in their way: a post never waits.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import thinwire as tw


class Notes:
    """`post` a note, later `read` everybody's of that number. Every process posts the same number of notes."""

    def __init__(self, process: int = 0, processes: int = 1, store: Any = None, wait: int = 600) -> None:
        self.process, self.processes, self.store, self.wait = process, processes, store, wait
        self.number = 0
        self.own: dict[int, str] = {}
        self.seen: list[int] = []  # notes read since the last post
        self.behind: dict[int, list[int]] = {}  # of each posted note: what everybody had read before posting it

    def post(self, note: Any) -> int:
        self.number += 1
        self.own[self.number] = json.dumps(note)
        self.behind[self.number], self.seen = self.seen, []
        if self.store is not None:
            with self._naming_the_lost(self.number):
                self.store.set(self._key(self.number, self.process), self.own[self.number])
        return self.number

    def read(self, number: int) -> list[Any]:
        """All notes of this number, in process order. Waits for those that are not there yet."""
        texts = {self.process: self.own.pop(number)}
        for process in range(self.processes):
            if process != self.process:
                texts[process] = self._get(number, process)
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

    def _get(self, number: int, process: int) -> str:
        assert self.store is not None
        with self._naming_the_lost(number):
            key = self._key(number, process)
            self.store.wait([key], timedelta(seconds=self.wait))
            return self.store.get(key).decode()

    def _forget(self, number: int) -> None:
        # everybody has posted a note since they read this one, so nobody asks for it again
        if self.store is not None:
            with self._naming_the_lost(number):
                self.store.delete_key(self._key(number, self.process))

    def _naming_the_lost(self, number: int) -> _Lost:
        return _Lost(self, number)

    @staticmethod
    def _key(number: int, process: int) -> str:
        return f"thinwire/notes/{number}/{process}"


class _Lost:
    """Turns a failing store into PeerLost, with the names of those who have not written."""

    def __init__(self, notes: Notes, number: int) -> None:
        self.notes, self.number = notes, number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, tw.PeerLost):
            silent = self._silent()
            names = " and ".join(f"process {process}" for process in silent)
            raise tw.PeerLost(f"{names} not heard from for {self.notes.wait} s or gone", silent) from error

    def _silent(self) -> list[int]:
        notes = self.notes
        others = [process for process in range(notes.processes) if process != notes.process]
        try:
            assert notes.store is not None
            return [p for p in others if not notes.store.check([notes._key(self.number, p)])]
        except RuntimeError:  # the store itself is gone, and process 0 hosts it
            return [0]
