"""A listening port that strangers cannot fill: a thread for each guest, few guests, little patience.

A guest is a stranger until it has proved the secret. Strangers have some seconds in all; when there are too many, the
oldest of the address that sent most of them leaves. Friends are bounded too. Each refusal is one line in the log.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from . import address

log = logging.getLogger("thinwire")

STRANGERS = 16
FRIENDS = 64  # unless a door is made for more
PATIENCE = 10.0  # seconds that a stranger has to prove itself
TICK = 0.25


class Refused(RuntimeError):
    """Why a guest, or a server, is not talked to any further. One line."""


class Guest:
    """One connection that came in."""

    def __init__(self, link: socket.socket, host: str, door: Door) -> None:
        self.link, self.host, self._door = link, host, door
        self.came, self.friend = time.monotonic(), False
        self._gone = threading.Lock()  # taken once, by whoever ends the visit

    def befriend(self) -> None:
        """It has proved the secret: from here on only its own time-outs end the visit."""
        if not self._door._promote(self):
            raise Refused(f"{self._door.friends} connections are open already")

    def refuse(self, why: str) -> None:
        """End the visit, with one line in the log; later reasons are consequences, and are not logged."""
        if self._gone.acquire(blocking=False):
            log.warning("%s: %s %s: %s", self._door.name, "hung up on" if self.friend else "refused", self.host, why)
            self.hang_up()

    def leave(self) -> None:
        """End the visit without a word."""
        self._gone.acquire(blocking=False)
        self.hang_up()

    def has_gone(self) -> bool:
        """Whether the other side has closed the connection; for those who wait without reading."""
        waiting = select.poll()
        waiting.register(self.link, select.POLLIN)
        return bool(waiting.poll(0)) and not self.link.recv(1, socket.MSG_PEEK)

    def hang_up(self) -> None:
        with suppress(OSError):  # the other side may have gone first
            self.link.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or writes


class Door:
    """Listens at `host`; `welcome(guest)` runs in a thread of its own for each guest, and may raise to refuse it."""

    def __init__(
        self, name: str, host: str, port: int, welcome: Callable[[Guest], None], friends: int = FRIENDS
    ) -> None:
        self.name, self._welcome, self.friends = name, welcome, friends
        self._guests: list[Guest] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._socket = _listen(name, host, port)
        self._socket.settimeout(TICK)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name=f"thinwire {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every visit."""
        self._closed.set()
        with suppress(OSError):  # Linux wakes whoever waits in accept; elsewhere it takes a tick
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for guest in self._present():
            guest.leave()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._hurry()
            try:
                link, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no more file handles, or a peer that went at once
                if self._closed.is_set():
                    return
                log.warning("%s: could not accept a connection (%s)", self.name, error)
                time.sleep(TICK)
                continue
            self._admit(link, str(peer[0]))

    def _hurry(self) -> None:
        late = time.monotonic() - PATIENCE
        for guest in self._present():
            if not guest.friend and guest.came < late:
                guest.refuse(f"nothing valid within {PATIENCE:.0f} s")

    def _admit(self, link: socket.socket, host: str) -> None:
        guest = Guest(link, host, self)
        link.settimeout(PATIENCE)
        strangers = [other for other in self._present() if not other.friend]
        if len(strangers) >= STRANGERS:
            crowd = Counter(other.host for other in strangers)
            crowded_out = max(strangers, key=lambda other: (crowd[other.host], -other.came))
            crowded_out.refuse(f"{STRANGERS} connections wait to prove themselves, the oldest goes")
            self._remove(crowded_out)
        with self._lock:
            self._guests.append(guest)
        threading.Thread(target=self._visit, args=(guest,), name=f"thinwire {self.name} guest", daemon=True).start()

    def _visit(self, guest: Guest) -> None:
        try:
            self._welcome(guest)
        except (Refused, OSError, ValueError) as error:  # what a guest can cause; anything else is our own mistake
            guest.refuse(" ".join(str(error).split()) or type(error).__name__)
        finally:
            guest.leave()
            self._remove(guest)
            guest.link.close()

    def _promote(self, guest: Guest) -> bool:
        with self._lock:
            guest.friend = sum(other.friend for other in self._guests) < self.friends
            return guest.friend

    def _remove(self, guest: Guest) -> None:
        with self._lock:
            if guest in self._guests:
                self._guests.remove(guest)

    def _present(self) -> list[Guest]:
        with self._lock:
            return list(self._guests)


def _listen(name: str, host: str, port: int) -> socket.socket:
    try:
        found = address.resolve(host)[0]
        family = socket.AF_INET6 if ":" in found else socket.AF_INET
        return socket.create_server((found, port), family=family, dualstack_ipv6=found == "::")
    except OSError as error:
        cure = "choose another, or end what uses it"
        raise ValueError(f"{name}: cannot listen at {address.join(host, port)} ({_short(error)}): {cure}") from error


def _short(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
