"""A worker's line to the coordinator: what it reports, who has fallen silent, and whether all have the same settings.

It has a connection of its own, so a saturated data path does not hold it up, and a thread of its own, so it never
holds up training.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from typing import Any

from . import address as addresses
from .line import FAILURES, PATIENCE, Line, Refusal, why
from .roster import checked, settings_hash

log = logging.getLogger("thinwire")

EVERY = 1.0  # seconds between reports
AGREEING = 10.0  # seconds for a restarted coordinator to hear the fleet's settings


class Reporter:
    """`say` what is to be reported; a thread posts it every second.

    `coordinator` is the HOST:PORT that `thinwire coordinator` printed.

    >>> from thinwire.elastic.coordinator import Coordinator
    >>> coordinator = Coordinator(port=29712)
    >>> reporter = Reporter(coordinator.address, worker="a", secret=None)
    >>> reporter.agree({"method.every": 64})
    >>> reporter.say(step=64, committed=1)
    >>> reporter.reachable, reporter.silent()
    (True, set())
    >>> reporter.close(), coordinator.close()
    (None, None)
    """

    def __init__(self, coordinator: str, worker: str, secret: bytes | None) -> None:
        host, port = addresses.split(coordinator)
        self._facts: dict[str, Any] = checked({"worker": worker})
        self._settings: dict[str, Any] | None = None
        self._host, self._port, self._secret = host, port, secret
        self._lock, self._end = threading.Lock(), threading.Event()
        self._ages: dict[str, float] = {}
        self._peers: dict[str, dict[str, Any]] = {}
        self._waits: dict[str, tuple[int, float]] = {}  # at which step each waits, and since when
        self.known_word = ""  # of the coordinator that answered last
        self.round_deadline: float | None = None  # seconds, if the coordinator has set one
        self.finished = False  # somebody has taken the last step of this run
        self._answered, self._lost = float("-inf"), False
        self.disagreement: str | None = None
        self._line = self._first_contact()
        self._thread = threading.Thread(target=self._run, name="thinwire reporter", daemon=True)
        self._thread.start()

    def say(self, **facts: Any) -> None:
        """Change what is reported from now on. Never waits."""
        new = checked(facts)
        with self._lock:
            self._facts = self._facts | new

    def tell(self, **facts: Any) -> None:
        """Report this at once; a coordinator that is away does not hear it."""
        self.say(**facts)
        line = Line(self._host, self._port + 1, self._secret)
        try:
            self._report(line)
        except FAILURES as error:
            self._note(error)
        finally:
            line.close()

    def agree(self, settings: dict[str, Any]) -> None:
        """Have the same settings as the fleet, or set them as its first worker; else `ValueError` with what differs."""
        own = json.loads(json.dumps(settings))  # as they arrive: a tuple becomes a list
        held = self._ask(own)
        if held != own:
            raise ValueError(_difference(own, held))
        self._settings = own
        self.say(settings_hash=settings_hash(own))

    def silent(self, seconds: float = 5.0) -> set[str]:
        """Workers that the coordinator has not heard for that long; nobody while it cannot be reached itself."""
        with self._lock:
            ages = dict(self._ages) if self.reachable else {}
        return {worker for worker, age in ages.items() if age >= seconds}

    def _wait_of(self, worker: str, step: int) -> tuple[int, float]:
        before = self._waits.get(worker, (-1, 0.0))
        return before if before[0] == step else (step, time.monotonic())

    def has_waited(self, worker: str, step: int) -> float:
        """Seconds for which another worker is known to wait for the rounds of that step."""
        with self._lock:
            at, since = self._waits.get(worker, (-1, 0.0))
        return time.monotonic() - since if at == step else 0.0

    def said(self, worker: str, fact: str) -> Any:
        """What another worker has said of itself last ("step", "quorum" or "waiting"), as far as is known."""
        with self._lock:
            return self._peers.get(worker, {}).get(fact)

    def word(self) -> str:
        """The word that the coordinator chose when it started: after a restart, which may be quick, it is another.

        While it is away, the one that it had a moment ago.
        """
        line = Line(self._host, self._port + 1, self._secret)
        try:
            self.known_word = line._hello()
        except FAILURES:
            if time.monotonic() - self._answered > 1.5 * EVERY:
                raise
        finally:
            line.close()
        return self.known_word

    @property
    def reachable(self) -> bool:
        """Whether the coordinator has answered lately."""
        return time.monotonic() - self._answered < PATIENCE

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=EVERY)
        self._line.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.wait(EVERY):
            try:
                self._report(self._line)
            except (*FAILURES, KeyError, TypeError) as error:  # an answer may be of another version
                self._note(error)

    def _note(self, error: Exception) -> None:
        """One line when it is lost, not one each second."""
        if not self._lost:
            log.warning("coordinator %s:%d: %s", self._host, self._port, " ".join(str(error).split()))
        self._lost = True

    def _report(self, line: Line) -> None:
        with self._lock:
            facts = self._facts
        answer = line.post("/report", facts)
        ages = {str(worker): float(said["age"]) for worker, said in dict(answer["workers"]).items()}
        with self._lock:
            self._ages, self._answered, self._lost = ages, time.monotonic(), False
            self._peers, self.known_word = dict(answer["workers"]), line._epoch
            self.round_deadline, self.finished = answer.get("round_deadline"), bool(answer.get("finished"))
            self._waits = {w: self._wait_of(w, said.get("waiting", -1)) for w, said in self._peers.items()}
        if self._settings is not None and answer["settings"] != self._settings:
            self._tell_again(line)

    def _tell_again(self, line: Line) -> None:
        """A coordinator that has started anew learns the settings from the workers."""
        assert self._settings is not None
        held = line.post("/settings", {"worker": self._facts["worker"], "settings": self._settings})["settings"]
        trouble = None if held is None or held == self._settings else _difference(self._settings, held)
        if trouble is not None and self.disagreement is None:
            log.warning("%s", trouble)
        self.disagreement = trouble

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _ask(self, own: dict[str, Any]) -> dict[str, Any]:
        line = Line(self._host, self._port + 1, self._secret)
        deadline = time.monotonic() + AGREEING
        try:
            while time.monotonic() < deadline:
                answer = line.post("/settings", {"worker": self._facts["worker"], "settings": own})
                if answer["settings"] is not None:
                    self.finished = bool(answer.get("finished"))
                    return dict(answer["settings"])
                time.sleep(EVERY / 4)
        except FAILURES as error:
            raise ValueError(why(self._host, self._port, self._port + 1, error)) from error
        finally:
            line.close()
        raise ValueError("the coordinator does not know the fleet's settings yet: start this worker again")

    def _first_contact(self) -> Line:
        line, port = Line(self._host, self._port + 1, self._secret), self._port + 1
        try:
            if self._secret is None and not addresses.is_loopback(self._host):
                raise Refusal("without a secret only a coordinator on this machine is asked: give --secret-file FILE")
            self._report(line)
            port = self._port
            socket.create_connection((self._host, port), timeout=PATIENCE).close()  # the lighthouse
        except FAILURES as error:
            line.close()
            raise ValueError(why(self._host, self._port, port, error)) from error
        return line


def _difference(own: dict[str, Any], held: dict[str, Any]) -> str:
    differing = sorted(name for name in own.keys() | held.keys() if own.get(name, _NONE) != held.get(name, _NONE))
    said = (f"{name} is {_show(own, name)} here, {_show(held, name)} there" for name in differing)
    return f"settings differ from the fleet's: {'; '.join(said)}: use the fleet's"


_NONE = object()


def _show(settings: dict[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"
