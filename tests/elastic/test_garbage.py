"""Garbage on every port: nothing crashes, nothing is loaded, memory stays bounded, each refusal is one line."""

from __future__ import annotations

import http.client
import json
import logging
import os
import pickle
import pickletools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")

from torchft.coordination import LighthouseClient  # noqa: E402

from tests.cluster import free_port  # noqa: E402
from tests.elastic import garbage  # noqa: E402
from tests.elastic.garbage import half_open, memory, throw, until  # noqa: E402
from thinwire.elastic import door as doors  # noqa: E402
from thinwire.elastic import secret as secrets  # noqa: E402
from thinwire.elastic.channel import FRAME, GREETING, Channel  # noqa: E402
from thinwire.elastic.coordinator import Coordinator  # noqa: E402
from thinwire.elastic.door import Refused  # noqa: E402
from thinwire.elastic.healing import Healing  # noqa: E402
from thinwire.elastic.parcel import pack, raw  # noqa: E402
from thinwire.elastic.reporter import Reporter  # noqa: E402
from thinwire.elastic.web import answer_code, request_code  # noqa: E402

pytestmark = pytest.mark.xdist_group("chaos")

SECRET = b"s" * 32
PATIENT = timedelta(seconds=10)
BOUND = 48 << 20  # bytes that garbage may cost at most


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        taken, self.lines = self.lines, []
        assert all("\n" not in line for line in taken)
        return taken


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logging.getLogger("thinwire").addHandler(handler)
    yield handler
    logging.getLogger("thinwire").removeHandler(handler)


class Server:
    """One of our ports, with a way to see that a healthy client is still served."""

    def __init__(self, door: doors.Door, serves: Callable[[], bool], close: Callable[[], None]) -> None:
        self.door, self.serves, self.close = door, serves, close
        self.port = door.port

    def settle(self) -> None:
        until(lambda: not self.door._present(), what="a guest stayed")


def healing_server() -> Server:
    donor, joiner = Healing(SECRET), Healing(SECRET)
    donor.send_checkpoint([1], 5, {"weights": torch.arange(5)}, PATIENT)

    def serves() -> bool:
        got = joiner.recv_checkpoint(0, donor.metadata(), 5, PATIENT)
        return bool((got["weights"] == torch.arange(5)).all())

    def close() -> None:
        donor.shutdown()
        joiner.shutdown()

    return Server(donor._door, serves, close)


def coordinator_server() -> Server:
    coordinator = Coordinator(port=free_port(), secret=SECRET)

    def serves() -> bool:
        reporter = Reporter(coordinator.address, "healthy", SECRET)
        reporter.close()
        return coordinator._roster.ages().keys() == {"healthy"}

    return Server(coordinator._door, serves, coordinator.close)


@pytest.fixture(scope="module", params=[healing_server, coordinator_server], ids=["healing", "coordinator"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = request.param()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "PATIENCE", 0.5)


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", garbage.kinds())
def test_garbage_is_refused_with_one_line(server: Server, kind: str, log: Log, impatient: None) -> None:
    throw("127.0.0.1", server.port, garbage.kinds()[kind])
    server.settle()
    refusals = log.take()
    # whoever opens and closes a connection has asked for nothing; healing speaks first, so there it has hung up
    expected = 0 if kind == "nothing" and server.door.name == "coordinator" else 1
    assert len(refusals) == expected and all("refused 127.0.0.1: " in line for line in refusals), refusals
    assert server.serves()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("endless header", "headers are longer than 16384"),
        ("endless headers", "headers are longer than 16384"),
        ("endless body", "a body of 999999999999 bytes, at most 65536"),
        ("negative body", "not given as a number"),
        ("chunks", "not given as a number"),
        ("noise", "headers are longer"),
        ("half a request", "in the middle"),
    ],
)
def test_a_request_over_a_limit_is_refused_at_once(requests, log: Log, kind: str, why: str) -> None:
    line, coordinator = requests
    throw("127.0.0.1", line.port, garbage.kinds()[kind])
    until(lambda: not coordinator._door._present(), doors.PATIENCE / 2)
    (said,) = log.take()
    assert why in said


def test_memory_stays_bounded_under_much_of_it(server: Server, impatient: None) -> None:
    assert server.serves()
    before = memory()
    kinds = list(garbage.kinds().values())
    for _ in range(3):
        threads = [threading.Thread(target=throw, args=("127.0.0.1", server.port, kind, 0.05)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    server.settle()
    assert server.serves() and memory() - before < BOUND


def test_half_open_connections_keep_nobody_out(server: Server, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    links = half_open("127.0.0.1", server.port, 40)
    try:
        until(lambda: len(log.lines) >= 40 - doors.STRANGERS, doors.PATIENCE / 2, "no room was made")
        assert server.serves(), "while they are all there"
        assert threading.active_count() <= before + doors.STRANGERS + 4
        monkeypatch.setattr(doors, "PATIENCE", 0.5)
        server.settle()
        time.sleep(0.1)
        refusals = log.take()
        assert len(refusals) == 40 and {line.split(":")[1][:8] for line in refusals} == {" refused"}
    finally:
        for link in links:
            link.close()


def test_one_who_sends_a_byte_now_and_then_is_sent_away(server: Server, log: Log, impatient: None) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        with pytest.raises(OSError):
            for _ in range(200):
                link.sendall(b"G")
                time.sleep(0.05)
        server.settle()
    assert len(log.take()) == 1 and server.serves()


# -- those who know how to speak, but not the secret, or who say the same twice ----------------------------------------


class Tap:
    """Listens in on one connection to a port, and keeps what the client said."""

    def __init__(self, port: int) -> None:
        self.door, self.target, self.said = socket.create_server(("127.0.0.1", 0)), port, b""
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        here, _ = self.door.accept()
        there = socket.create_connection(("127.0.0.1", self.target))
        back = threading.Thread(target=self._copy, args=(there, here, False), daemon=True)
        back.start()
        self._copy(here, there, True)
        back.join()
        self.door.close()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        while data := source.recv(1 << 16):
            self.said += data if keep else b""
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_recorded_joiner_gets_nothing(log: Log) -> None:
    server = healing_server()
    try:
        tap = Tap(server.port)
        joiner = Healing(SECRET)
        joiner.recv_checkpoint(0, f"127.0.0.1:{tap.port}", 5, PATIENT)
        joiner.shutdown()
        assert tap.said.startswith(GREETING) and len(tap.said) > 100 and not log.take()
        heard = throw("127.0.0.1", server.port, [tap.said])
        server.settle()
        assert len(heard) == secrets.SIZE, "a fresh challenge and nothing more"
        (line,) = log.take()
        assert "does not know the secret" in line and server.serves()
    finally:
        server.close()


MESSAGES = {
    "not JSON": garbage.PICKLE,
    "no object": b"[1, 2]",
    "deep": b"[" * 100_000,
    "nothing asked": b"{}",
    "no number": b'{"step": "5", "timeout": 1}',
    "nan": b'{"step": NaN, "timeout": 1}',
    "huge number": b'{"step": 1' + b"0" * 3000 + b', "timeout": 1}',
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_joiner_that_asks_nonsense_is_refused(kind: str, log: Log) -> None:
    server = healing_server()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as link:
            channel = Channel.join(link, SECRET, 5)
            channel.send(MESSAGES[kind])
            assert link.recv(1) == b""
        server.settle()
        assert len(log.take()) == 1 and server.serves()
    finally:
        server.close()


class Requests:
    """Requests to a coordinator, made by hand."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.epoch = json.loads(self.send("GET", "/hello", b"", {})[1])["epoch"]

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, Any]:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        line.request(method, path, body, headers)
        answer = line.getresponse()
        text = answer.read()
        line.close()
        return answer.status, text, answer.headers

    def headers(self, body: bytes, count: int, path: str = "/report", **changed: str) -> dict[str, str]:
        facts = {"epoch": self.epoch, "session": "a" * 32, "count": str(count)} | changed
        secret = SECRET if "secret" not in changed else changed.pop("secret").encode()
        code = request_code(secret, path, facts["epoch"], facts["session"], int(facts["count"]), body)
        return {f"X-Thinwire-{name}": value for name, value in ({"code": code} | facts).items() if name != "secret"}


@pytest.fixture
def requests() -> Iterator[tuple[Requests, Coordinator]]:
    coordinator = Coordinator(port=free_port(), secret=SECRET)
    yield Requests(coordinator._door.port), coordinator
    coordinator.close()


def test_a_request_counts_once(requests, log: Log) -> None:
    line, coordinator = requests
    body = b'{"worker": "a", "step": 1}'
    headers = line.headers(body, 1)
    code, text, said = line.send("POST", "/report", body, headers)
    assert code == 200 and said["X-Thinwire-Code"] == answer_code(SECRET, headers["X-Thinwire-code"], text)
    later = b'{"worker": "a", "step": 2}'
    assert line.send("POST", "/report", later, line.headers(later, 2))[0] == 200
    assert not log.take()
    for _ in range(3):
        code, text, _ = line.send("POST", "/report", body, headers)
        assert code == 403 and b"replay" in text
    until(lambda: not coordinator._door._present())
    assert len(log.take()) == 3 and coordinator._roster.ages()["a"]["step"] == 2


def test_a_request_that_was_changed_or_made_without_the_secret_is_refused(requests, log: Log) -> None:
    line, coordinator = requests
    body = b'{"worker": "a"}'
    wrong = [
        ("/report", b'{"worker": "b"}', line.headers(body, 1)),
        ("/settings", body, line.headers(body, 2)),
        ("/report", body, line.headers(body, 3) | {"X-Thinwire-session": "b" * 32}),
        ("/report", body, line.headers(body, 4) | {"X-Thinwire-count": "5"}),
        ("/report", body, line.headers(body, 6) | {"X-Thinwire-code": "é" * 64}),
        ("/report", body, line.headers(body, 7, secret="t" * 32)),
        ("/report", body, line.headers(body, 8) | {"X-Thinwire-count": "9" * 400}),
        ("/report", body, {}),
    ]
    for number, (path, text, headers) in enumerate(wrong):
        encoded = {name: value.encode("latin-1").decode("latin-1") for name, value in headers.items()}
        assert line.send("POST", path, text, encoded)[0] == 403, number
    code, text, _ = line.send("POST", "/report", body, line.headers(body, 10, epoch="0" * 32))
    assert code == 409 and json.loads(text)["epoch"] == line.epoch
    until(lambda: not coordinator._door._present())
    assert len(log.take()) == len(wrong) + 1 and not coordinator._roster.ages()
    assert line.send("POST", "/report", body, line.headers(body, 11))[0] == 200


BODIES = {
    "pickle": garbage.PICKLE,
    "a list": b"[]",
    "deep": b"[" * 60_000,
    "no worker": b"{}",
    "a number": b'{"worker": 5}',
    "long name": json.dumps({"worker": "a" * 1000}).encode(),
    "unknown fact": b'{"worker": "a", "admin": true}',
    "wrong kind": b'{"worker": "a", "step": [1]}',
    "too many": json.dumps({"worker": "a", "taking_part": ["w"] * 5000}).encode(),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_report_that_makes_no_sense_is_refused(requests, log: Log, kind: str) -> None:
    line, coordinator = requests
    assert line.send("POST", "/report", BODIES[kind], line.headers(BODIES[kind], 1))[0] == 400
    until(lambda: not coordinator._door._present())
    assert len(log.take()) == 1 and not coordinator._roster.ages()


@pytest.mark.parametrize("settings", [b'"all"', b"[1]", b"7", b'{"a": ' + b"[" * 20 + b"]" * 20 + b"}"])
def test_settings_that_make_no_sense_are_refused(requests, log: Log, settings: bytes) -> None:
    line, coordinator = requests
    body = b'{"worker": "a", "settings": ' + settings + b"}"
    assert line.send("POST", "/settings", body, line.headers(body, 1, path="/settings"))[0] == 400
    until(lambda: not coordinator._door._present())
    assert len(log.take()) == 1 and coordinator.status()["settings"] is None


def test_sessions_beyond_number_end_the_epoch(requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of them is bounded, and yet no request counts twice."""
    from thinwire.elastic import web

    monkeypatch.setattr(web, "SESSIONS", 5)
    line, coordinator = requests
    body = b'{"worker": "a"}'
    sent = [line.headers(body, 1, session=f"{number:032d}") for number in range(6)]
    assert [line.send("POST", "/report", body, headers)[0] for headers in sent] == [200] * 6
    assert coordinator._guard.epoch != line.epoch and len(coordinator._guard._counts) == 0
    assert {line.send("POST", "/report", body, headers)[0] for headers in sent} == {409}


# -- donors that cannot be trusted -------------------------------------------------------------------------------------


class Donor:
    """Does `act(link)` with whoever comes first."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.metadata = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.act = act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        link, _ = self.door.accept()
        with link, self.door, suppress(OSError, Refused):  # the joiner goes away, as it should
            self.act(link)


def answering(*, manifest: Any = None, text: bytes | None = None, tensors: Any = None, **more: Any) -> Callable:
    """A donor that knows the secret and follows the protocol, but for what is given here."""

    def act(link: socket.socket) -> None:
        channel = Channel.serve(link, SECRET, 5)
        channel.receive_json()
        good = pack({"weights": torch.arange(10)})
        told = text if text is not None else good.manifest
        sizes = {"manifest": len(told), "tensors": good.size}
        channel.send_json(
            sizes | {k: v for k, v in {"manifest": manifest, "tensors": tensors}.items() if v is not None}
        )
        channel.send(told)
        more.get("then", lambda channel, link: channel.send(raw(good.tensors[0])))(channel, link)
        link.recv(1)

    return act


def entries(*kinds: Any, structure: Any = None) -> bytes:
    return json.dumps({"structure": structure or {"tensor": 0}, "tensors": list(kinds)}).encode()


def reflect(link: socket.socket) -> None:
    """Knows nothing, and sends a joiner's own proof back to it."""
    link.sendall(secrets.challenge())
    link.sendall(link.recv(len(GREETING) + 2 * secrets.SIZE)[-secrets.SIZE :])
    link.recv(1)


def wrong_code(channel: Channel, link: socket.socket) -> None:
    channel._ours = bytes(32)
    channel.send(bytes(80))


def flipped(channel: Channel, link: socket.socket) -> None:
    """One bit of a tensor changed on the way."""
    send, sent = link.sendall, []
    good = bytes(raw(torch.arange(10)))
    code = secrets.code(channel._ours, channel._sent.to_bytes(8, "big"), good)
    sent.append(len(good).to_bytes(4, "big") + code + bytes([good[0] ^ 1]) + good[1:])
    send(sent[0])


DONORS: dict[str, tuple[Callable, str]] = {
    "noise": (lambda link: link.sendall(os.urandom(4096)), "secret"),
    "silence": (lambda link: time.sleep(3), "timed out"),
    "hangs up": (lambda link: None, "hung up|reset"),
    "reflects": (reflect, "does not know the secret"),
    "absurd size": (answering(tensors=1 << 60), "limit"),
    "negative size": (answering(tensors=-1), "limit"),
    "size of no number": (answering(tensors="many"), "no number"),
    "absurd manifest": (answering(manifest=1 << 40), "limit"),
    "short manifest": (answering(manifest=5), "announced"),
    "long manifest": (answering(manifest=5000), "announced"),
    "pickle": (answering(text=garbage.PICKLE), "manifest is not valid"),
    "real pickle": (answering(text=pickle.dumps({"weights": torch.ones(3)})), "manifest is not valid"),
    "absurd shape": (answering(text=entries(["int64", [1 << 61]])), "over the limit"),
    "absurd empty shape": (answering(text=entries(["int64", [1 << 61, 1 << 61, 0]]), tensors=0), "over the limit"),
    "negative shape": (answering(text=entries(["int64", [-5, -2]])), "shape"),
    "shape of no numbers": (answering(text=entries(["int64", ["10"]])), "shape"),
    "endless dimensions": (answering(text=entries(["int64", [1] * 500])), "shape"),
    "unknown dtype": (answering(text=entries(["object", [10]])), "manifest is not valid"),
    "sizes that do not add up": (answering(text=entries(["int64", [9]])), "72 bytes, 80 were announced"),
    "no such tensor": (answering(text=entries(["int64", [10]], structure={"tensor": 7})), "structure is not valid"),
    "negative tensor": (answering(text=entries(["int64", [10]], structure={"tensor": -1})), "no such tensor"),
    "code": (answering(text=entries(["int64", [10]], structure={"call": "os.system"})), "structure is not valid"),
    "odd keys": (answering(text=entries(["int64", [10]], structure={"dict": [[[1], 2]]})), "keys"),
    "deep": (answering(text=b'{"structure":' + b"[" * 90_000), "manifest is not valid"),
    "wrong code": (answering(then=wrong_code), "the code of frame 2 is wrong"),
    "a flipped bit": (answering(then=flipped), "the code of frame 2 is wrong"),
    "short frame": (answering(then=lambda channel, link: channel.send(bytes(79))), "79 bytes where 80"),
    "huge frame": (answering(then=lambda _, link: link.sendall(b"\xff" * 100)), "at most"),
    "empty frame": (answering(then=lambda _, link: link.sendall(bytes(100))), "at most"),
    "stops half-way": (answering(then=lambda channel, link: link.close()), "hung up|reset|Bad file"),
}


@pytest.mark.parametrize("kind", DONORS)
def test_a_malicious_donor_gets_nothing_loaded(kind: str, log: Log) -> None:
    act, why = DONORS[kind]
    joiner, donor = Healing(SECRET, limit=1 << 30), Donor(act)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()
    try:
        with pytest.raises(Refused, match=why):
            joiner.recv_checkpoint(0, donor.metadata, 5, timedelta(seconds=1))
    finally:
        joiner.shutdown()
    (line,) = log.take()
    assert line.startswith(f"healing from {donor.metadata}: ")
    assert peak() - before < BOUND


def peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_donor_that_is_honest_is_believed() -> None:
    """The same donor with nothing wrong: else the tests above would show nothing."""
    joiner, donor = Healing(SECRET, limit=1 << 30), Donor(answering())
    assert (joiner.recv_checkpoint(0, donor.metadata, 5, PATIENT)["weights"] == torch.arange(10)).all()
    joiner.shutdown()


def test_the_pickle_would_have_run_a_command() -> None:
    names = {argument for _, argument, _ in pickletools.genops(garbage.PICKLE) if isinstance(argument, str)}
    assert {"posix", "system"} <= names and len(garbage.PICKLE) < FRAME


# -- the ports of torchft, torch and gloo ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lighthouse", "manager", "store", "gloo", "healing"])
def test_rounds_go_on_under_garbage_on_every_port_of_a_worker(workers, name: str) -> None:
    workers.go_on()
    before = [memory(process.pid) for process in workers.processes]
    port = workers.port_of(name)
    for pieces in garbage.kinds().values():
        throw("127.0.0.1", port, pieces, listen=0.05)
    links = half_open("127.0.0.1", port, 40)
    workers.go_on()
    for link in links:
        link.close()
    workers.go_on()
    LighthouseClient(f"http://{workers.lighthouse}", connect_timeout=PATIENT).heartbeat("healthy")
    assert [process.poll() for process in workers.processes] == [None] * 3
    assert all(memory(p.pid) - size < BOUND for p, size in zip(workers.processes, before, strict=True))
