"""One connection to the coordinator's own server: requests and answers with codes, and what is wrong in one line."""

from __future__ import annotations

import http.client
import json
import secrets as random_words
import socket
from typing import Any

from . import address as addresses
from . import secret as secrets
from .web import answer_code, request_code

PATIENCE = 5.0  # seconds for an answer
LIMIT = 1 << 20  # bytes of an answer
FAILURES = (OSError, http.client.HTTPException, ValueError)


class Refusal(ValueError):
    """The coordinator is there, and will not have us. One line."""


class Line:
    """Opens again by itself after a failure."""

    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        self._secret = secret
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


def why(host: str, port: int, reached: int, error: Exception) -> str:
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
