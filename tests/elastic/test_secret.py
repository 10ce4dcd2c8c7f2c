"""The secret's file and the codes made with it."""

from __future__ import annotations

import ast
import hashlib
import os
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from thinwire.elastic import secret as secrets  # noqa: E402


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """RFC 2104, from the equation."""
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()


def test_a_new_secret_is_the_owners_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    before = os.umask(0)
    try:
        secret = secrets.make(path)
    finally:
        os.umask(before)
    assert len(secret) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == secret.hex() + "\n" and secrets.read(path) == secret
    assert secrets.make(tmp_path / "other") != secret


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = secrets.make(path)
    with pytest.raises(ValueError, match="exists"):
        secrets.make(path)
    assert secrets.read(path) == secret


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    secrets.make(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match="chmod 600"):
        secrets.read(path)


@pytest.mark.parametrize("text", ["", "ab" * 31, "not hex " * 8, "é" * 64, "\0" * 64])
def test_what_is_not_a_secret_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        secrets.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="copy the coordinator's here"):
        secrets.read(tmp_path / "none")


def test_a_code_is_hmac_sha256_of_the_parts_with_their_lengths() -> None:
    parts = (b"one", b"", b"three" * 100)
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    assert secrets.code(b"k" * 32, *parts) == hmac_sha256(b"k" * 32, message)


def test_a_proof_serves_one_side_of_one_connection() -> None:
    a, b = secrets.challenge(), secrets.challenge()
    hands = secrets.Handshake(b"s" * 32, a, b)
    others = [
        hands.proof("server"),
        hands.key("client"),
        secrets.Handshake(b"s" * 32, b, a).proof("client"),
        secrets.Handshake(b"s" * 32, a, secrets.challenge()).proof("client"),
        secrets.Handshake(b"t" * 32, a, b).proof("client"),
        secrets.Handshake(None, a, b).proof("client"),
    ]
    assert a != b and hands.proof("client") not in others
    assert secrets.Handshake(b"s" * 32, a, b).proof("client") == hands.proof("client")


def test_nothing_in_elastic_can_unpickle_or_evaluate() -> None:
    """By its imports and calls: no module here can turn bytes from the network into code."""
    import thinwire.elastic

    modules = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    calls = {("", "eval"), ("", "exec"), ("torch", "load"), ("", "_streaming_load")}
    for source in Path(thinwire.elastic.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names} | {getattr(node, "module", None)}
                assert not names & modules, source.name
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                owner = getattr(getattr(function, "value", None), "id", "")
                assert (owner, name) not in calls, f"{source.name}: {owner}.{name}"
