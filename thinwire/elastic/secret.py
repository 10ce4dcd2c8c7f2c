"""The secret that the machines of a fleet share: its file, and the codes made with it.

A code is an HMAC-SHA256. Two ends prove that they know the secret by a code over two fresh challenges, one from each
side; the challenges also give a key for each direction, so no message of one connection is valid in another.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

SIZE = 32  # bytes: of a secret, of a challenge and of a code


def make(path: Path) -> bytes:
    """Write a new secret to a file that only its owner can read; an existing file is never overwritten."""
    secret = secrets.token_bytes(SIZE)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ValueError(f"{path}: cannot make a secret file ({error.strerror}): name another") from error
    with os.fdopen(handle, "w") as file:
        file.write(secret.hex() + "\n")
    return secret


def read(path: Path) -> bytes:
    """The secret in a file, which nobody but its owner may read."""
    try:
        with open(path, "rb") as file:
            _private(path, os.fstat(file.fileno()).st_mode)
            text = file.read(4096)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the secret ({error.strerror}): copy the coordinator's here") from error
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError as error:
        raise ValueError(f"{path} is not a secret file (64 hex digits): copy the coordinator's") from error
    if len(secret) < SIZE:
        raise ValueError(f"{path}: a secret of {len(secret)} bytes is too short, {SIZE} are needed: make a new one")
    return secret


def _private(path: Path, mode: int) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path}: other users can read or write the secret: chmod 600 {path}")


def challenge() -> bytes:
    return secrets.token_bytes(SIZE)


def code(key: bytes, *parts: bytes | memoryview) -> bytes:
    """The code of some parts; where one ends and the next begins is part of it.

    >>> code(b"key", b"ab", b"c") == code(b"key", b"a", b"bc")
    False
    """
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


def same(one: bytes, other: bytes) -> bool:
    """Compare two codes in a time that tells nothing about them."""
    return hmac.compare_digest(one, other)


class Handshake:
    """Both ends' challenges, and what follows from them. Without a secret the codes only guard against accidents.

    >>> client, server = Handshake(b"s", b"1" * 32, b"2" * 32), Handshake(b"s", b"1" * 32, b"2" * 32)
    >>> client.proof("server") == server.proof("server"), client.proof("client") == server.proof("server")
    (True, False)
    """

    def __init__(self, secret: bytes | None, client: bytes, server: bytes) -> None:
        self._secret, self._challenges = secret or b"", (client, server)

    def proof(self, side: str) -> bytes:
        """What `side` ("client" or "server") sends to show that it knows the secret."""
        return code(self._secret, b"thinwire proof", side.encode(), *self._challenges)

    def key(self, side: str) -> bytes:
        """The key of the frames that `side` sends."""
        return code(self._secret, b"thinwire key", side.encode(), *self._challenges)
