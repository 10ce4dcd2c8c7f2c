"""Headers between processes: each says where it is, and hears where the others are, whatever order they come in.

Every process posts a stream of small headers, one per meeting, and all streams advance together: post number n of
every process is gathered in one collective. Processes need not be at the same meeting at the same post: what is
heard early is kept, and who needs to hear more while it has nothing to say posts a blank. The rounds of all
processes come in the same order; only calls such as `consensus()` may fall between other rounds on another process.
"""

from __future__ import annotations

import datetime
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .transport import Key, PeerLost
from .waiting import in_time

SLOW = 10.0  # seconds of waiting after which somebody should know
_TICK = datetime.timedelta(seconds=1)
_ANSWER = 5.0  # seconds in which the host of the store answers, if it lives
_KINDS = ("blank", "round", "consensus", "finish", "vote")
_PREFIX = 16  # bytes before the headers: kind, row, round, step


class Conversation:
    """One process's side of the streams. `gather(tensor) -> (work, outputs)` posts to all processes."""

    def __init__(
        self,
        gather: Callable[[Tensor], tuple[Any, list[Tensor]]],
        board: Board,
        size: int,
        notify: Callable[[str, Sequence[int], str], None],
    ) -> None:
        self.gather, self.board, self.size, self.notify = gather, board, size, notify
        self.inbox: list[dict[Key, bytes]] = [{} for _ in range(board.processes)]
        self.outstanding: deque[tuple[Any, list[Tensor]]] = deque()
        self.posts = self.heard = 0
        self.said: set[Key] = set()
        self.gone: Callable[[], list[int]] | None = None  # who is known to be lost, where somebody else keeps watch

    def say(self, key: Key, headers: bytes, step: int) -> None:
        """Post without waiting."""
        self.said.add(key)
        self._post(key, headers, step)

    def hear(self, key: Key, on_ahead: Callable[[Key], None] | None = None) -> list[bytes]:
        """Every process's headers for `key`, waited for, in process order."""
        while True:
            while on_ahead and (unsaid := self._unsaid()):
                on_ahead(unsaid[0])  # one by one: what comes in meanwhile is to be looked at again
            missing = [process for process, box in enumerate(self.inbox) if key not in box]
            if not missing:
                break
            if not self.outstanding:
                self._post(Key("blank"), b"", 0)
            self._collect(key)
        self.said.discard(key)
        return [box.pop(key) for box in self.inbox]

    def arrived(self, key: Key) -> bool:
        """Whether all headers for `key` are here; takes what has come in, without waiting."""
        while self.outstanding and self.outstanding[0][0].is_completed():
            self._collect(key)
        return all(key in box for box in self.inbox)

    def _unsaid(self) -> list[Key]:
        """Rounds that some peer has launched and this process has not, first to last."""
        keys = {key: None for box in self.inbox for key in box if key.kind == "round" and key not in self.said}
        return list(keys)

    def _refuse_the_done(self, key: Key) -> None:
        """A peer that left without making this post will never make it."""
        for process, (posts, why) in self.board.departed().items():
            if posts <= self.heard:
                workers = self.board.workers_of(process)
                raise PeerLost(f"{key}: {_names(workers)} {why}", workers, *_place(key))

    def leave(self, why: str) -> None:
        """Tell the others that nothing more will come from here."""
        self.board.depart(self.posts, why)

    def _post(self, key: Key, headers: bytes, step: int) -> None:
        blob = pack(key, step) + headers
        tensor = torch.zeros(_PREFIX + self.size, dtype=torch.uint8, device="cpu")
        tensor[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        self.posts += 1
        self.board.mark(self.posts)
        try:
            self.outstanding.append(self.gather(tensor))
        except RuntimeError as error:
            raise self.lost(key, error) from error

    def _collect(self, key: Key) -> None:
        work, outputs = self.outstanding[0]  # an interrupted wait leaves it there, to be heard later
        try:
            self.wait(work, key, header=True)
        except RuntimeError:
            self.outstanding.popleft()
            raise
        self.outstanding.popleft()
        self.heard += 1
        blobs = [bytes(output.numpy()) for output in outputs]
        for box, blob in zip(self.inbox, blobs, strict=True):
            met = unpack(blob)
            if met.kind != "blank":
                box[met] = blob[_PREFIX:]
        if all(unpack(blob).kind == "blank" for blob in blobs):
            raise self._deadlock(key)

    def _deadlock(self, key: Key) -> PeerLost:
        """All processes wait, and none has anything to say: it would stay so for ever."""
        missing = [process for process, box in enumerate(self.inbox) if key not in box]
        workers = [worker for process in missing for worker in self.board.workers_of(process)]
        there = [str(other) for process in missing for other in self.inbox[process]]
        where = f"waits at {', '.join(there)}" if there else "waits elsewhere"
        return PeerLost(
            f"{key}: {_names(workers)} {where}: give every worker the same number of steps and the same checkpoint",
            workers, *_place(key),
        )  # fmt: skip

    def wait(self, work: Any, key: Key, header: bool = False) -> None:
        """Wait for a collective; say so when it is slow, give up when a peer is lost."""
        started, reported = time.monotonic(), False
        while True:
            ended = work.is_completed()  # asked first: what ends between a vain wait and the question has not failed
            try:
                work.wait(_TICK)
                return
            except RuntimeError as error:
                waited = time.monotonic() - started
                if ended or self._failed() or waited > self.board.timeout:
                    raise self.lost(key, error) from error
            if header:
                self._refuse_the_done(key)
                if not reported and waited > SLOW:
                    self._report_missing(key)
                    reported = True

    def _failed(self) -> bool:
        return bool(self.gone()) if self.gone else self.board.somebody_failed()

    def _report_missing(self, key: Key) -> None:
        late = [w for process in self.board.behind(self.heard + 1) for w in self.board.workers_of(process)]
        self.notify("slow", late, f"{key}: waiting over {SLOW:.0f} s for {_names(late)}")

    def lost(self, key: Key, error: Exception) -> PeerLost:
        """Hold a roll call among those still alive, and name the others."""
        self._refuse_the_done(key)
        gone = self.gone() if self.gone else self._silent()
        who = f"{_names(gone)} not heard from" if gone else "the connection broke"
        reason = str(error).strip().split(". This is typically", 1)[0].splitlines()[0:1] or [type(error).__name__]
        return PeerLost(f"{key}: {who} ({reason[0]})", gone, *_place(key))

    def _silent(self) -> list[int]:
        return [w for process in self.board.roll_call() for w in self.board.workers_of(process)]


def pack(key: Key, step: int) -> bytes:
    numbers = ((_KINDS.index(key.kind), 1), (key.row, 3), (key.round, 6), (step, 6))
    return b"".join(number.to_bytes(width, "little") for number, width in numbers)


def unpack(blob: bytes) -> Key:
    return Key(_KINDS[blob[0]], int.from_bytes(blob[1:4], "little"), int.from_bytes(blob[4:10], "little"))


def _place(key: Key) -> tuple[int | None, int | None]:
    """Row and round, which a call such as `consensus` has none of."""
    return (key.row, key.round) if key.kind == "round" else (None, None)


def _names(workers: Sequence[int]) -> str:
    listed = ", ".join(str(worker) for worker in workers)
    return f"worker {listed}" if len(workers) == 1 else f"workers {listed}" if workers else "nobody in particular"


class Board:
    """The store seen as a notice board: how far each process is, and who is alive after a failure."""

    def __init__(self, store: Any, process: int, first_workers: Sequence[int], workers: int, timeout: float) -> None:
        self.store, self.process, self.timeout = store, process, timeout
        self.edges = [*first_workers, workers]
        self.processes = len(first_workers)
        self.gone = False  # its host is the one that died or froze: there is nothing to read any more

    def workers_of(self, process: int) -> list[int]:
        return list(range(self.edges[process], self.edges[process + 1]))

    def mark(self, posts: int) -> None:
        self._write(f"posts/{self.process}", str(posts))

    def behind(self, posts: int) -> list[int]:
        """Processes that have not made post number `posts` yet."""
        late = [process for process in range(self.processes) if self._posts(process) < posts]
        return self._suspects() if self.gone else late

    def _posts(self, process: int) -> int:
        key = f"posts/{process}"
        return self._read(lambda: int(self.store.get(key)) if self.store.check([key]) else 0, default=0)

    def depart(self, posts: int, why: str) -> None:
        self._write(f"done/{self.process}", json.dumps([posts, why]))

    def departed(self) -> dict[int, tuple[int, str]]:
        """The processes that have left: after how many posts, and why."""
        keys = {process: f"done/{process}" for process in self._others()}
        texts = self._read(
            lambda: {p: self.store.get(key) for p, key in keys.items() if self.store.check([key])}, default={}
        )
        return {p: tuple(json.loads(text)) for p, text in texts.items()}

    def somebody_failed(self) -> bool:
        return self._read(lambda: self.store.check(["roll"]), default=False)

    def roll_call(self, patience: float = 3.0) -> list[int]:
        """The processes that do not answer within `patience` seconds. Waiting peers look at the board every second."""
        self._write("roll", "1")
        self._write(f"alive/{self.process}", "1")
        deadline = time.monotonic() + patience
        while True:
            silent = [process for process in self._others() if not self._alive(process)]
            if self.gone:
                return self._suspects()
            if not silent or time.monotonic() > deadline:
                return silent
            time.sleep(0.05)

    def _alive(self, process: int) -> bool:
        return self._read(lambda: self.store.check([f"alive/{process}"]), default=False)

    def _others(self) -> list[int]:
        return [process for process in range(self.processes) if process != self.process]

    def _suspects(self) -> list[int]:
        """Who is taken for lost with the store: the only other process, or the first, where the store is as a rule."""
        others = self._others()
        return others if len(others) == 1 else [0] if self.process else []

    def _write(self, key: str, text: str) -> None:
        """Does not wait for an answer."""
        try:
            if not self.gone:
                self.store.set(key, text)
        except RuntimeError:
            self.gone = True

    def _read(self, call: Callable[[], Any], default: Any) -> Any:
        """The store's client waits without end for a host that is stopped or cut off."""
        if self.gone:
            return default
        try:
            return in_time(call, _ANSWER)
        except (RuntimeError, TimeoutError):
            self.gone = True
            return default
