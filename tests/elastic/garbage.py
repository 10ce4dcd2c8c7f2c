"""What strangers send to a port, and what is looked at afterwards."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

POST = b"POST /report HTTP/1.1\r\nHost: 127.0.0.1\r\n"
PICKLE = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def kinds() -> dict[str, list[bytes]]:
    """By name, the pieces in which each kind of garbage is sent. The same at every run."""
    noise = random.Random(7)
    frames = [noise.randbytes(9) + noise.randbytes(200) for _ in range(20)]
    return {
        "nothing": [],
        "one byte": [b"\0"],
        "noise": [noise.randbytes(1 << 16)],
        "zeros": [bytes(1 << 16)] * 16,
        "ones": [b"\xff" * (1 << 16)] * 16,
        "pickle": [PICKLE],
        "tls": [b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + noise.randbytes(508)],
        "half a request": [b"GET / HTTP/1.1\r\nHost: 127.0.0.1"],
        "endless header": [b"GET / HTTP/1.1\r\nX-Long: "] + [b"a" * (1 << 16)] * 64,
        "endless headers": [b"GET / HTTP/1.1\r\n"] + [b"X-More: a\r\n" * 4000] * 40,
        "endless body": [POST + b"Content-Length: 999999999999\r\n\r\n"] + [bytes(1 << 16)] * 64,
        "negative body": [POST + b"Content-Length: -1\r\n\r\n"],
        "chunks": [POST + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"] + [bytes(1 << 16)] * 8,
        "http/2 preface": [HTTP2],
        "http/2 noise": [HTTP2, *frames],
        "http/2 huge frame": [HTTP2 + b"\xff\xff\xff\0\0" + b"\0\0\0\1"] + [bytes(1 << 16)] * 64,
        "store": [struct.pack("<Bi", 9, 0x3C85F7CE), struct.pack("<BQ", 0, 1 << 60), bytes(1 << 16)],
        "lengths": [struct.pack(">Q", 1 << 62), struct.pack("<Q", 1 << 62), bytes(4096)],
    }


def throw(host: str, port: int, pieces: Iterable[bytes], listen: float = 0.2) -> bytes:
    """Send it, as far as the other side takes it, and hear a little of what it says."""
    with socket.create_connection((host, port), timeout=0.5) as link:
        with suppress(OSError):
            for piece in pieces:
                link.sendall(piece)
        link.settimeout(listen)
        heard = b""
        with suppress(OSError):
            while len(heard) < 1 << 20 and (part := link.recv(1 << 16)):
                heard += part
        return heard


def half_open(host: str, port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing, or half of something, and stay."""
    links = [socket.create_connection((host, port), timeout=2) for _ in range(count)]
    for number, link in enumerate(links):
        with suppress(OSError):
            link.sendall(b"GET / HT"[: number % 9])
    return links


def memory(process: int | str = "self") -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def listening(process: int) -> Iterator[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens, from the kernel's own tables."""
    own = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(handle))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                yield _address(family, words[1])


def _address(family: socket.AddressFamily, text: str) -> tuple[str, int]:
    """The kernel writes an address as words of four bytes in the machine's order."""
    host, port = text.split(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def until(true: Callable[[], Any], seconds: float = 20, what: str = "it never came true") -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found
