"""A worker's line to the coordinator: what it reports, who has fallen silent, and whether all have the same settings.

It has a connection of its own, so a saturated data path does not hold it up, and a thread of its own, so it never
holds up training.
"""

from __future__ import annotations

import http.client
import json
import logging
import secrets as random_words
import socket
import threading
import time
from typing import Any

from . import address as addresses
from . import secret as secrets
from .roster import checked, settings_hash
from .web import answer_code, request_code

log = logging.getLogger("thinwire")

EVERY = 1.0  # seconds between reports
PATIENCE = 5.0  # seconds for an answer, and for how long the newest one is good
LIMIT = 1 << 20  # bytes of an answer
AGREEING = 10.0  # seconds for a restarted coordinator to hear the fleet's settings


class Refusal(ValueError):
    """The coordinator is there, and will not have us. One line."""


class Line:
    """One connection to the coordinator's own server; opens again by itself after a failure."""

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        self._where, self._secret = (host, port), secret
        self._session, self._count, self._epoch = random_words.token_hex(16), 0, ""
        self._http = http.client.HTTPConnection(host, port, timeout=PATIENCE)

    def post(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer; a coordinator that has started anew is greeted anew."""
        try:
            answer = self._post(path, message) or self._post(path, message)
            if answer is None:
                raise Refusal("the coordinator starts anew again and again")
            return answer
        except BaseException:
            self.close()  # half an exchange may be left on it
            raise

    def close(self) -> None:
        self._http.close()
        self._epoch = ""  # asked again on the next connection, which may lead to a coordinator that has started anew

    def _post(self, path: str, message: dict[str, Any]) -> dict[str, Any] | None:
        self._epoch = self._epoch or self._hello()
        body, self._count = json.dumps(message).encode(), self._count + 1
        code = request_code(self._secret, path, self._epoch, self._session, self._count, body)
        facts = {"epoch": self._epoch, "session": self._session, "count": str(self._count), "code": code}
        headers = {f"X-Thinwire-{name}": value for name, value in facts.items()}
        self._http.request("POST", path, body, headers | {"Content-Type": "application/json"})
        status, text, proof = self._read()
        if status == 409:
            self._epoch = ""
            return None
        if status != 200:
            raise Refusal(f"the coordinator refused: {str(_load(text).get('error', status))[:300]}")
        if not secrets.same(proof.encode("latin-1", "replace"), answer_code(self._secret, code, text).encode()):
            raise Refusal("the coordinator does not know the secret: copy its secret file to this machine")
        return _load(text)

    def _hello(self) -> str:
        self._http.request("GET", "/hello")
        status, text, _ = self._read()
        epoch = _load(text).get("epoch")
        if status != 200 or not isinstance(epoch, str):
            raise Refusal("what answers there is not a thinwire coordinator")
        return epoch

    def _read(self) -> tuple[int, bytes, str]:
        answer = self._http.getresponse()
        text = answer.read(LIMIT)
        if not answer.isclosed():
            raise Refusal(f"the answer is longer than {LIMIT} bytes")
        return answer.status, text, answer.headers.get("X-Thinwire-Code", "")


def _load(text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise Refusal("what answers there is not a thinwire coordinator") from error


class Reporter:
    """`say` what is to be reported; a thread posts it every second. See tests/elastic for a run.

    `coordinator` is the HOST:PORT that `thinwire coordinator` printed.
    """

    def __init__(self, coordinator: str, worker: str, secret: bytes | None) -> None:
        host, port = addresses.split(coordinator)
        self._facts: dict[str, Any] = checked({"worker": worker})
        self._settings: dict[str, Any] | None = None
        self._host, self._port, self._secret = host, port, secret
        self._lock, self._end = threading.Lock(), threading.Event()
        self._ages: dict[str, float] = {}
        self._peers: dict[str, dict[str, Any]] = {}
        self.known_word = ""  # of the coordinator that answered last
        self._answered, self._lost = -PATIENCE, False
        self.disagreement: str | None = None
        self._line = self._first_contact(coordinator)
        self._thread = threading.Thread(target=self._run, name="thinwire reporter", daemon=True)
        self._thread.start()

    def say(self, **facts: Any) -> None:
        """Change what is reported from now on. Never waits."""
        new = checked(facts)
        with self._lock:
            self._facts = self._facts | new

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

    def said(self, worker: str, fact: str) -> Any:
        """What another worker has said of itself last ("step", "quorum" or "waiting"), as far as is known."""
        with self._lock:
            return self._peers.get(worker, {}).get(fact)

    def word(self) -> str:
        """The word that the coordinator chose when it started: after a restart it is another. Asked for when stale."""
        if time.monotonic() - self._answered < 1.5 * EVERY:
            return self.known_word
        line = Line(self._host, self._port + 1, self._secret)
        try:
            self.known_word = line._hello()
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
            except (OSError, http.client.HTTPException, ValueError) as error:
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
                held = line.post("/settings", {"worker": self._facts["worker"], "settings": own})["settings"]
                if held is not None:
                    return dict(held)
                time.sleep(EVERY / 4)
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(_why(self._host, self._port, self._port + 1, error)) from error
        finally:
            line.close()
        raise ValueError("the coordinator does not know the fleet's settings yet: start this worker again")

    def _first_contact(self, coordinator: str) -> Line:
        line, port = Line(self._host, self._port + 1, self._secret), self._port + 1
        try:
            if self._secret is None and not addresses.is_loopback(self._host):
                raise Refusal("without a secret only a coordinator on this machine is asked: give --secret-file FILE")
            self._report(line)
            port = self._port
            socket.create_connection((self._host, port), timeout=PATIENCE).close()  # the lighthouse
        except (OSError, http.client.HTTPException, ValueError) as error:
            line.close()
            raise ValueError(_why(self._host, self._port, port, error)) from error
        return line


def _difference(own: dict[str, Any], held: dict[str, Any]) -> str:
    differing = sorted(name for name in own.keys() | held.keys() if own.get(name, _NONE) != held.get(name, _NONE))
    said = (f"{name} is {_show(own, name)} here, {_show(held, name)} there" for name in differing)
    return f"settings differ from the fleet's: {'; '.join(said)}: use the fleet's"


_NONE = object()


def _show(settings: dict[str, Any], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "not set"


def _why(host: str, port: int, reached: int, error: Exception) -> str:
    """What is wrong with the way to the coordinator, and what to do, in one line."""
    where, start = addresses.join(host, reached), f"thinwire coordinator --port {port}"
    if isinstance(error, socket.gaierror):
        return f"{host} has no address here ({error.strerror}): use an IP address, or add the name to /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {where}: on that machine run `{start} --bind ADDRESS`"
    if isinstance(error, TimeoutError):
        return f"no answer from {where} in {PATIENCE:.0f} s: open TCP {port} and {port + 1} in its firewall"
    if isinstance(error, Refusal):
        return f"coordinator {where}: {error}"
    if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
        return f"no way to {where} ({error.strerror or error}): check the address, the VPN and the routes"
    return f"what answers at {where} is not a thinwire coordinator: use the HOST:PORT that `{start}` printed"
