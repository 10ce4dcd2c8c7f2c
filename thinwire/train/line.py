"""Two processes that talk over one connection, for `thinwire check`: questions, answers, and blocks of bytes."""

from __future__ import annotations

import fcntl
import json
import platform
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PATIENCE = 5.0  # seconds for a connection
BLOCK = 1 << 16
SECONDS = 1.0  # of sending, each way


class Broken(Exception):
    """What is wrong with the line, and the cure, in one line."""


class Line:
    """Questions and answers, one JSON object a line."""

    def __init__(self, link: socket.socket, peer: str) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(PATIENCE * 4)  # longer than the other side's own patience, so that its answer is heard
        self.link, self.peer, self.file = link, peer, link.makefile("rb")

    def ask(self, do: str, **facts: Any) -> dict[str, Any]:
        self.say(do=do, **facts)
        return self.hear()

    def say(self, **facts: Any) -> None:
        with self.explained():
            self.link.sendall(json.dumps(facts).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        with self.explained():
            text = self.file.readline()
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise Broken(f"{self.peer} is not `thinwire check`, or it ended: start it anew on both sides") from error

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Broken(f"the line to {self.peer} broke ({error}): run the check again") from error


def pump(line: Line) -> int:
    """Send for a while; each block says whether another follows."""
    deadline, sent, block = time.perf_counter() + SECONDS, 0, bytes(BLOCK - 1)
    with line.explained():
        while time.perf_counter() < deadline:
            line.link.sendall(b"\x01" + block)
            sent += BLOCK
        line.link.sendall(b"\x00" + block)
    return sent + BLOCK


def drain(line: Line) -> tuple[int, float]:
    began, size = time.perf_counter(), 0
    while True:
        with line.explained():
            block = line.file.read(BLOCK)
        if len(block) < BLOCK:
            raise Broken(f"{line.peer} hung up in the middle of a measurement: run the check again")
        size += BLOCK
        if block[0] == 0:
            return size, time.perf_counter() - began


def versions() -> dict[str, str]:
    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    return {"thinwire": of("thinwire"), "torch": of("torch"), "python": platform.python_version()}


def interface_of(address: str) -> str:
    """The name of the network interface that has this address."""
    if ":" in address:
        return "IPv6"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe_, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "unknown interface"
