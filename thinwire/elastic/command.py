"""`thinwire coordinator`: start it, and say what the other machines have to type."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import threading
from pathlib import Path

from thinwire import units
from thinwire.train.errors import as_user_error

from . import address as addresses
from . import secret as secrets
from .coordinator import Coordinator


def coordinator(bind: str, port: int, min_workers: int, round_deadline: str | None, secret_file: Path | None) -> None:
    """The command: serve until interrupted."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with as_user_error():
        deadline = None if round_deadline is None else units.duration(round_deadline)
        secret_file, made = _secret_file(bind, secret_file)
        secret = None if secret_file is None else secrets.read(secret_file)
        server = Coordinator(bind, port, min_workers, secret, deadline)
    done = _interruption()
    print("\n".join(_lines(server, secret_file, made)), flush=True)
    done.wait()
    server.close()


def _secret_file(bind: str, asked: Path | None) -> tuple[Path | None, bool]:
    """The secret's file, made if it is needed and not there, and whether it was made now."""
    try:
        needed = not addresses.is_loopback(bind) or asked is not None  # the name first: no secret for a wrong one
    except socket.gaierror as error:
        raise ValueError(f"--bind {bind}: no such address ({error.strerror}): use one of this machine's") from error
    path = asked or _default()
    if not needed:
        return None, False
    made = not path.exists()
    if made:
        secrets.make(path)
    return path, made


def _default() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "thinwire" / "secret"


def _lines(server: Coordinator, secret_file: Path | None, made: bool) -> list[str]:
    join = f"thinwire train --join {server.address}"
    lines = [f"page        {server.page}"]
    if secret_file is not None:
        note = " (made now: copy it to the other machines, readable by you alone)" if made else ""
        lines.append(f"secret      {secret_file}{note}")
        join += f" --secret-file {shlex.quote(str(secret_file))}"
    lines.append(f"join with   {join}")
    return lines


def _interruption() -> threading.Event:
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    return done
