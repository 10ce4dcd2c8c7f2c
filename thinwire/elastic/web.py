"""As much HTTP as the coordinator needs: small requests, read whole within limits, and codes that cannot be replayed.

A request that changes something carries the coordinator's epoch (a random word, new at each start), the sender's
session (a random word) and a count that goes up, and a code over all of them and the body. A recorded request is
refused because its count has been seen; one from before a restart because its epoch is over. No clocks are compared.
"""

from __future__ import annotations

import json
import math
import secrets as random_words
import socket
import threading
from dataclasses import dataclass
from typing import Any

from . import secret as secrets
from .door import Refused

HEAD = 16 << 10  # bytes of request line and headers
BODY = 64 << 10
SESSIONS = 1 << 16
REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 409: "Conflict", 503: "Unavailable"}


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answered(Refused):
    """A request that is refused with a status of its own."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def read_request(link: socket.socket, rest: bytes = b"") -> tuple[Request, bytes] | None:
    """The next request and what followed it; None when the other side is done."""
    head, end, rest = _until_blank_line(link, rest)
    if not end:
        return None
    request = _parse(head)
    length = _length(request.headers)
    while len(rest) < length:
        rest += _more(link)
    request.body = rest[:length]
    return request, rest[length:]


def _until_blank_line(link: socket.socket, text: bytes) -> tuple[bytes, bytes, bytes]:
    while b"\r\n\r\n" not in text[:HEAD]:
        if len(text) >= HEAD:
            raise Answered(400, f"the headers are longer than {HEAD} bytes")
        got = link.recv(HEAD)
        if not got and not text:
            return b"", b"", b""
        if not got:
            raise Refused("it hung up in the middle of a request")
        text += got
    return text.partition(b"\r\n\r\n")


def _more(link: socket.socket) -> bytes:
    got = link.recv(BODY)
    if not got:
        raise Refused("it hung up in the middle of a request")
    return got


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Answered(400, "it does not speak HTTP")
    pairs = (line.partition(":") for line in lines)
    return Request(words[0], words[1], {name.strip().lower(): value.strip() for name, _, value in pairs}, b"")


def _length(headers: dict[str, str]) -> int:
    text = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not text.isascii() or not text.isdigit() or len(text) > 12:
        raise Answered(400, "the length of the body is not given as a number")
    if int(text) > BODY:
        raise Answered(400, f"a body of {int(text)} bytes, at most {BODY} are allowed")
    return int(text)


def send_answer(link: socket.socket, status: int, body: bytes, kind: str, **headers: str) -> None:
    lines = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
    lines |= {"X-Content-Type-Options": "nosniff"} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = [f"HTTP/1.1 {status} {REASONS[status]}", *(f"{name}: {value}" for name, value in lines.items()), "", ""]
    link.sendall("\r\n".join(head).encode("latin-1") + body)


def dump(message: Any) -> bytes:
    """JSON that browsers read too: a number that is not finite goes as a word."""
    return json.dumps(_finite(message), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    return [_finite(inside) for inside in value] if isinstance(value, list) else value


# -- codes -------------------------------------------------------------------------------------------------------------


def request_code(secret: bytes | None, path: str, epoch: str, session: str, count: int, body: bytes) -> str:
    words = (part.encode() for part in (path, epoch, session, str(count)))
    return secrets.code(secret or b"", b"thinwire request", *words, body).hex()


def answer_code(secret: bytes | None, request: str, body: bytes) -> str:
    """The answer to this request and no other, by one who knows the secret."""
    return secrets.code(secret or b"", b"thinwire answer", request.encode(), body).hex()


class Guard:
    """Lets each authentic request in once."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._renew()

    def _renew(self) -> None:
        self.epoch = random_words.token_hex(16)
        self._counts: dict[str, int] = {}

    def check(self, request: Request) -> str:
        """The request's code, which its answer is to cover; a request that is not authentic or not new is refused."""
        epoch, session, count, code = (request.headers.get(f"x-thinwire-{k}", "") for k in KEYS)
        if not count.isascii() or not count.isdigit() or len(count) > 15 or len(session) != 32:
            raise Answered(403, "it carries no code: thinwire's own workers do")
        with self._lock:
            expected = request_code(self._secret, request.path, epoch, session, int(count), request.body)
            if not secrets.same(code.encode("latin-1", "replace"), expected.encode()):
                raise Answered(403, "the code is wrong: use the same --secret-file on every machine")
            self._take(epoch, session, int(count))
        return code

    def _take(self, epoch: str, session: str, count: int) -> None:
        if epoch != self.epoch:
            raise Answered(409, "it was made for an earlier start of this coordinator")
        if count <= self._counts.get(session, -1):
            raise Answered(403, "it was sent before: a replay")
        self._counts[session] = count
        if len(self._counts) > SESSIONS:  # forgetting who has spoken is safe only together with the epoch
            self._renew()


KEYS = ("epoch", "session", "count", "code")
