"""A connection whose two ends have proved that they know the secret, and every frame of which carries a code.

    server -> client   its challenge
    client -> server   greeting, its challenge, its proof
    server -> client   its proof
    then frames        length (4 bytes), code (32 bytes), payload; the code covers the frame's number and its length

Nothing is allocated for a peer that has not proved itself, and never more than one frame before its code is checked.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from . import secret as secrets
from .door import Refused

GREETING = b"thinwire-1\n\0\0\0\0\0"
FRAME = 1 << 18  # bytes of a payload at most
WRONG = "it does not know the secret: use the same --secret-file on every machine"


class Channel:
    """`Channel.serve` and `Channel.join` are the two ends. `patience` is the time that one frame may take."""

    def __init__(self, link: socket.socket, ours: bytes, theirs: bytes, patience: float) -> None:
        self.patience, self._link = patience, link
        self._ours, self._theirs = ours, theirs
        self._sent = self._received = 0

    @classmethod
    def serve(cls, link: socket.socket, secret: bytes | None, patience: float) -> Channel:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + patience
        own = secrets.challenge()
        _send(link, own, deadline)
        if _read(link, len(GREETING), deadline) != GREETING:
            raise Refused("it does not speak this protocol")
        hands = secrets.Handshake(secret, _read(link, secrets.SIZE, deadline), own)
        if not secrets.same(_read(link, secrets.SIZE, deadline), hands.proof("client")):
            raise Refused(WRONG)
        _send(link, hands.proof("server"), deadline)
        return cls(link, hands.key("server"), hands.key("client"), patience)

    @classmethod
    def join(cls, link: socket.socket, secret: bytes | None, patience: float) -> Channel:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + patience
        own = secrets.challenge()
        hands = secrets.Handshake(secret, own, _read(link, secrets.SIZE, deadline))
        _send(link, GREETING + own + hands.proof("client"), deadline)
        try:
            proof = _read(link, secrets.SIZE, deadline)
        except (Refused, ConnectionError) as error:  # it hangs up on a proof that is wrong
            raise Refused(f"it took no notice of our proof ({error}): use the same --secret-file everywhere") from error
        if not secrets.same(proof, hands.proof("server")):
            raise Refused(WRONG)
        return cls(link, hands.key("client"), hands.key("server"), patience)

    def send(self, payload: bytes | memoryview) -> None:
        """A payload of any length, in as many frames as it takes."""
        for start in range(0, len(payload), FRAME):
            self._send_frame(payload[start : start + FRAME])

    def send_json(self, message: Any) -> None:
        """A short message: one frame."""
        payload = json.dumps(message).encode()
        assert 0 < len(payload) <= FRAME
        self._send_frame(payload)

    def receive_json(self, patience: float | None = None) -> dict[str, Any]:
        """A short message, an object; `patience` is for a first byte that takes its time."""
        deadline = time.monotonic() + (patience or self.patience)
        length, code = self._head(deadline)
        payload = bytearray(length)
        self._fill(memoryview(payload), code, deadline)
        message = load_json(payload)
        if not isinstance(message, dict):
            raise Refused("it sent a message that is not a JSON object")
        return message

    def receive_into(self, target: memoryview) -> None:
        """Fill the target with what one `send` of the other side sent, which must be exactly as long."""
        for start in range(0, len(target), FRAME):
            part = target[start : start + FRAME]
            deadline = time.monotonic() + self.patience
            length, code = self._head(deadline)
            if length != len(part):
                raise Refused(f"it sent a frame of {length} bytes where {len(part)} were announced")
            self._fill(part, code, deadline)

    def _send_frame(self, payload: bytes | memoryview) -> None:
        number, length = self._sent.to_bytes(8, "big"), len(payload).to_bytes(4, "big")
        self._sent += 1
        deadline = time.monotonic() + self.patience
        _send(self._link, length + secrets.code(self._ours, number, payload), deadline)
        _send(self._link, payload, deadline)

    def _head(self, deadline: float) -> tuple[int, bytes]:
        head = _read(self._link, 4 + secrets.SIZE, deadline)
        length = int.from_bytes(head[:4], "big")
        if not 0 < length <= FRAME:
            raise Refused(f"it announced a frame of {length} bytes, at most {FRAME} are allowed")
        return length, head[4:]

    def _fill(self, target: memoryview, code: bytes, deadline: float) -> None:
        _read_into(self._link, target, deadline)
        if not secrets.same(secrets.code(self._theirs, self._received.to_bytes(8, "big"), target), code):
            raise Refused(f"the code of frame {self._received} is wrong: the data were changed on the way")
        self._received += 1


def load_json(text: bytes | bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused("it sent something that is not JSON") from error


def _send(link: socket.socket, payload: bytes | memoryview, deadline: float) -> None:
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    link.sendall(payload)


def _read(link: socket.socket, length: int, deadline: float) -> bytes:
    buffer = bytearray(length)
    _read_into(link, memoryview(buffer), deadline)
    return bytes(buffer)


def _read_into(link: socket.socket, target: memoryview, deadline: float) -> None:
    done = 0
    while done < len(target):
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        got = link.recv_into(target[done:])
        if got == 0:
            raise Refused("it hung up" + (" in the middle of a message" if done else ""))
        done += got
