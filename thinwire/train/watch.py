"""Which processes of a run are gone: each holds a connection to process 0, and it closes when a process ends.

However it ends: the system closes it after kill -9 too. Nothing else is taken for a sign, so a process that is busy, or
stopped for a while, is not gone. Process 0 passes on who is.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PATIENCE = 5.0  # seconds in which process 0 accepts a connection, if nothing is between that drops it


class Watch:
    """`gone` holds the numbers of those that have ended, well or badly."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.links: list[socket.socket] = []  # to all others at process 0, to process 0 elsewhere

    # -- process 0 -------------------------------------------------------------------------------------------------

    def open(self, host: str) -> int:
        """Let the others come to this host. Returns the port to come to."""
        door = _door(host)
        _in_background(self._let_in, door)
        return int(door.getsockname()[1])

    def _let_in(self, door: socket.socket) -> None:
        while True:
            link, _ = door.accept()
            _in_background(self._attend, link)

    def _attend(self, link: socket.socket) -> None:
        """One of the others: it says its number, and nothing more until it ends."""
        with suppress(ValueError, OSError), link, link.makefile() as lines:
            process = int(lines.readline())
            self.links.append(link)  # before it is told who is gone: whoever goes meanwhile is told by `_tell_all`
            _tell(link, set(self.gone))
            with suppress(OSError):
                lines.read()
            self.links.remove(link)
            self.gone.add(process)
            for other in list(self.links):
                _tell(other, {process})

    # -- the others ------------------------------------------------------------------------------------------------

    def join(self, host: str, port: int, process: int) -> None:
        """Come to process 0. Where that cannot be, a silent process is waited for as long as any."""
        with suppress(OSError):
            link = socket.create_connection((host, port), timeout=_PATIENCE)
            link.settimeout(None)
            link.sendall(f"{process}\n".encode())
            self.links.append(link)
            _in_background(self._listen, link)

    def _listen(self, link: socket.socket) -> None:
        with suppress(OSError), link, link.makefile() as lines:
            for line in lines:
                self.gone.add(int(line))
        self.gone.add(0)


def _door(host: str) -> socket.socket:
    if host in ("127.0.0.1", "localhost"):  # nobody else need reach it
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _tell(link: socket.socket, gone: set[int]) -> None:
    with suppress(OSError):
        link.sendall("".join(f"{process}\n" for process in sorted(gone)).encode())


def _in_background(task: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=task, args=arguments, daemon=True).start()
