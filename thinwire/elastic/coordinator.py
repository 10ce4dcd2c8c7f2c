"""The one address that all workers know: torchft's lighthouse, and beside it who is live, who takes part, what counts.

The lighthouse (port P) decides who takes part in a round. Our own server (port P + 1) hears the workers' reports, keeps
the settings that must agree, and shows a page. Nothing here outlives a restart: the next reports bring it back.
"""

from __future__ import annotations

import ipaddress
import json
import time
from typing import Any

from torchft.coordination import LighthouseServer

from . import address as addresses
from . import page
from .door import Door, Guest, Refused
from .roster import TEXT, WORKERS, Roster
from .web import Answered, Guard, Request, answer_code, dump, read_request, send_answer

NO_DEADLINE = 600.0  # seconds that a round waits for a live worker when no deadline is set
TICK = 50  # ms between the lighthouse's looks at who has come
IDLE = 30.0  # seconds between two reports on one connection


class Coordinator:
    """Serves from the moment it is made until `close()`.

    >>> coordinator = Coordinator(port=29710)
    >>> coordinator.address, coordinator.page
    ('127.0.0.1:29710', 'http://127.0.0.1:29711/')
    >>> coordinator.close()
    """

    def __init__(
        self,
        bind: str = "127.0.0.1",
        port: int = 29510,
        min_workers: int = 1,
        secret: bytes | None = None,
        round_deadline: float | None = None,
        heartbeat_timeout: float = 5.0,
    ) -> None:
        if secret is None and not addresses.is_loopback(bind):
            raise ValueError(f"a coordinator at {bind} needs a secret (--secret-file); without one it must be loopback")
        if round_deadline is not None and round_deadline <= 0:
            raise ValueError("a round deadline of 0 s leaves everybody out: give the time that a round may wait")
        host = addresses.advertised(bind)
        self.address, self.page = addresses.join(host, port), f"http://{addresses.join(host, port + 1)}/"
        self._secret, self._guard, self._roster = secret, Guard(secret), Roster(heartbeat_timeout)
        self._facts, self._started = {"min_workers": min_workers, "round_deadline": round_deadline}, time.monotonic()
        self._door = Door("coordinator", bind, port + 1, self._welcome, friends=2 * WORKERS)  # two while one joins
        try:
            self._lighthouse = LighthouseServer(
                bind=addresses.join(addresses.resolve(bind)[0], port),
                min_replicas=min_workers,
                join_timeout_ms=round(1000 * (NO_DEADLINE if round_deadline is None else round_deadline)),
                quorum_tick_ms=TICK,
                heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
            )
        except Exception as error:  # torchft raises several kinds; nothing must stay behind
            self._door.close()
            cure = "choose another, or end what uses it"
            raise ValueError(f"lighthouse: cannot listen at {addresses.join(bind, port)} ({error}): {cure}") from error

    def close(self) -> None:
        self._lighthouse.shutdown()
        self._door.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _welcome(self, guest: Guest) -> None:
        rest = b""
        while True:
            try:
                heard = read_request(guest.link, rest)
                if heard is None:
                    return
                request, rest = heard
                stays = self._answer(guest, request)
            except Answered as error:
                send_answer(guest.link, error.status, dump({"error": str(error), "epoch": self._guard.epoch}), JSON)
                raise
            if not stays:
                return
            guest.link.settimeout(IDLE)

    def _answer(self, guest: Guest, request: Request) -> bool:
        """Answer one request; whether the connection stays open."""
        self._at_home(request)
        if request.method == "POST":
            self._post(guest, request)
            return True
        if request.method != "GET" or request.path not in ("/", "/status", "/hello"):
            raise Answered(404, f"there is no {request.method[:TEXT]} {request.path[:TEXT]} here")
        if request.path == "/hello":
            send_answer(guest.link, 200, dump({"epoch": self._guard.epoch}), JSON)
            return True
        if request.path == "/":
            send_answer(guest.link, 200, page.HTML, "text/html; charset=utf-8", Connection="close", **page.HEADERS)
        else:
            send_answer(guest.link, 200, dump(self.status()), JSON, Connection="close")
        return False

    def _at_home(self, request: Request) -> None:
        """Without a secret a browser must not be led here by a name that somebody else controls."""
        name = request.headers.get("host", "").rpartition(":")[0].strip("[]")
        if self._secret is None and name != "localhost" and not _is_number(name):
            raise Answered(403, f"it asks for {name[:TEXT]!r}: without a secret use the address, {self.page}")

    def _post(self, guest: Guest, request: Request) -> None:
        code = self._guard.check(request)
        try:
            if not guest.friend:
                guest.befriend()
        except Refused as error:
            raise Answered(503, str(error)) from error
        try:
            answer = self._take(request.path, dict(json.loads(request.body)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Answered(400, f"its report is not valid: {' '.join(str(error).split())[:TEXT]}") from error
        body = dump(answer)
        send_answer(guest.link, 200, body, JSON, X_Thinwire_Code=answer_code(self._secret, code, body))

    def _take(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        if path == "/report":
            self._roster.hear(message)
            said = {"workers": self._roster.ages(), "round_deadline": self._facts["round_deadline"]}
            return said | {"settings": self._roster.settings, "finished": self._roster.finished}
        if path == "/settings":
            held = self._roster.agree(str(message["worker"]), dict(message["settings"]))
            return {"settings": held, "finished": self._roster.finished}
        raise Answered(404, f"there is no POST {path[:TEXT]} here")

    def status(self) -> dict[str, Any]:
        """What the page shows."""
        about = self._facts | {"up": round(time.monotonic() - self._started, 1), "finished": self._roster.finished}
        return {"coordinator": about, "workers": self._roster.status(), "settings": self._roster.settings}


JSON = "application/json"


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
