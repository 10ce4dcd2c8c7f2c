"""The coordinator and its reporters: who is live, what was said, settings that agree, a coordinator that returns."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

from tests.cluster import free_port  # noqa: E402
from tests.elastic.garbage import until  # noqa: E402
from tests.train.conftest import environment  # noqa: E402
from thinwire.elastic import reporter as reporting  # noqa: E402
from thinwire.elastic.command import _secret_file as find_secret  # noqa: E402
from thinwire.elastic.command import coordinator as start_command  # noqa: E402
from thinwire.elastic.coordinator import Coordinator  # noqa: E402
from thinwire.elastic.line import Line, Refusal  # noqa: E402
from thinwire.elastic.reporter import Reporter  # noqa: E402
from thinwire.elastic.roster import Roster, settings_hash  # noqa: E402
from thinwire.elastic.web import dump  # noqa: E402
from thinwire.train.errors import UserError  # noqa: E402

pytestmark = pytest.mark.xdist_group("chaos")

SECRET = b"s" * 32


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Make coordinators and reporters that are closed in the end, the reporters first."""
    made: list[Any] = []

    def make(kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "EVERY", 0.05)


def get(coordinator: Coordinator, path: str, **headers: str) -> tuple[int, Any, bytes]:
    host, port = coordinator.page.removeprefix("http://").strip("/").rsplit(":", 1)
    line = http.client.HTTPConnection(host, int(port), timeout=10)
    line.request("GET", path, headers=headers)
    answer = line.getresponse()
    body = answer.read()
    line.close()
    return answer.status, answer.headers, body


def status(coordinator: Coordinator) -> dict[str, Any]:
    return json.loads(get(coordinator, "/status")[2])


# -- many workers ------------------------------------------------------------------------------------------------------


def test_a_hundred_workers_report_and_one_too_many_is_told_so(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    port = coordinator._door.port
    for number in range(100):
        line = start(Line, "127.0.0.1", port, None)
        line.post("/report", {"worker": f"w{number}", "step": number})
    assert len(status(coordinator)["workers"]) == 100
    coordinator._door.friends = 100
    with pytest.raises(Refusal, match="the coordinator refused: 100 connections are open already"):
        start(Line, "127.0.0.1", port, None).post("/report", {"worker": "one more"})


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_a_worker_says_is_shown(start, secret) -> None:
    coordinator = start(Coordinator, port=free_port(), secret=secret, min_workers=2, round_deadline=30.0)
    reporter = start(Reporter, coordinator.address, "a", secret)
    facts = {
        "name": "lab",
        "step": 64,
        "committed": 4,
        "lost": 1,
        "taking_part": ["a", "b"],
        "alone": False,
        "alone_rounds": 2,
        "bytes_sent": 10**12,
        "loss": 3.25,
    }
    reporter.say(**facts)
    until(lambda: status(coordinator)["workers"][0].get("step") == 64)
    shown = status(coordinator)
    (worker,) = shown["workers"]
    assert worker.pop("age") < 5 and worker.pop("live") and worker == {"worker": "a", **facts}
    assert shown["coordinator"]["min_workers"] == 2 and shown["coordinator"]["round_deadline"] == 30.0


def test_say_never_waits_and_refuses_what_it_does_not_know(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    reporter = start(Reporter, coordinator.address, "a", None)
    for wrong in ({"stepp": 1}, {"step": "1"}, {"name": "x" * 300}, {"taking_part": [1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            reporter.say(**wrong)
    threads = [threading.Thread(target=lambda n=n: [reporter.say(step=n) for _ in range(300)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert until(lambda: "step" in status(coordinator)["workers"][0])


def test_a_loss_that_is_not_finite_is_said_in_json_that_browsers_read(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    start(Reporter, coordinator.address, "a", None).say(loss=float("nan"))
    until(lambda: "loss" in status(coordinator)["workers"][0])
    body = get(coordinator, "/status")[2]
    assert json.loads(body, parse_constant=lambda word: pytest.fail(word))["workers"][0]["loss"] == "nan"
    assert json.loads(dump({"a": [float("inf"), 1.5]})) == {"a": ["inf", 1.5]}


def test_silence_is_told_to_the_others(start) -> None:
    coordinator = start(Coordinator, port=free_port(), heartbeat_timeout=0.5)
    a, b = (start(Reporter, coordinator.address, name, None) for name in "ab")
    until(lambda: len(status(coordinator)["workers"]) == 2)
    b.close()
    assert until(lambda: a.silent(0.5)) == {"b"}
    assert a.silent(60) == set() and a.reachable
    live = {worker["worker"]: worker["live"] for worker in status(coordinator)["workers"]}
    assert live == {"a": True, "b": False}


def test_nobody_is_silent_when_the_coordinator_is(start, monkeypatch, caplog) -> None:
    monkeypatch.setattr(reporting, "PATIENCE", 0.5)
    coordinator = start(Coordinator, port=free_port())
    reporter = start(Reporter, coordinator.address, "a", None)
    gone = start(Reporter, coordinator.address, "b", None)
    gone.close()
    until(lambda: reporter.silent(0.3))
    coordinator.close()
    until(lambda: not reporter.reachable)
    assert reporter.silent(0.0) == set()
    time.sleep(0.3)  # several tries
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("coordinator 127.0.0.1") for line in said) == 1, "one line, not one a try"


# -- settings ----------------------------------------------------------------------------------------------------------

OWN = {"method.name": "desloc", "method.every": 64, "betas": (0.9, 0.95)}


def test_the_first_worker_sets_them_and_others_are_told_each_difference(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    first, second = (start(Reporter, coordinator.address, name, None) for name in "ab")
    first.agree(OWN)
    second.agree(dict(reversed(OWN.items())))
    with pytest.raises(ValueError) as caught:
        second.agree({"method.name": "desloc", "method.every": 32, "model.width": 8})
    for part in ("method.every is 32 here, 64 there", "model.width is 8 here, not set there", "betas is not set here"):
        assert part in str(caught.value)
    assert "method.name" not in str(caught.value) and "\n" not in str(caught.value)


def heard(roster: Roster, worker: str, step: int, settings: dict[str, Any]) -> None:
    roster.hear({"worker": worker, "step": step, "settings_hash": settings_hash(settings)})


def test_who_owns_the_settings() -> None:
    a, b = {"every": 1}, {"every": 2}
    roster = Roster(patience=60)
    assert roster.agree("new", a) == a, "the first"
    assert roster.agree("late", b) == a, "even before the first one's next report"
    heard(roster, "new", 0, a)
    heard(roster, "old", 500, b)
    assert roster.agree("old", b) == b, "after a restart, whoever has trained longer than those who were quicker"
    assert roster.agree("new", a) == b


def test_a_newcomer_waits_while_a_live_worker_has_yet_to_tell() -> None:
    a, b = {"every": 1}, {"every": 2}
    roster = Roster(patience=60)
    heard(roster, "old", 500, b)
    assert roster.agree("new", a) is None
    assert roster.agree("new", b) == b


def test_settings_of_a_fleet_that_is_gone_do_not_bind() -> None:
    roster = Roster(patience=0.01)
    roster.agree("a", {"every": 1})
    heard(roster, "a", 500, {"every": 1})
    time.sleep(0.02)
    assert roster.agree("b", {"every": 2}) == {"every": 2}


def test_a_finished_run_stays_finished_until_another_begins() -> None:
    a, b = {"steps": 10}, {"steps": 20}
    roster = Roster(patience=60)
    roster.agree("a", a)
    heard(roster, "a", 10, a)
    assert not roster.finished, "the last step is not the end: rounds may be under way"
    roster.hear({"worker": "x", "settings_hash": settings_hash(b), "finished": True})
    assert not roster.finished, "that was another run"
    roster.hear({"worker": "a", "step": 10, "settings_hash": settings_hash(a), "finished": True})
    assert roster.agree("late", a) == a and roster.finished
    assert roster.agree("next", b) == b and not roster.finished, "who has finished holds nobody up"


def test_a_worker_learns_that_the_fleet_went_on_with_other_settings(start, caplog) -> None:
    coordinator = start(Coordinator, port=free_port())
    newcomer, veteran = (start(Reporter, coordinator.address, name, None) for name in "nv")
    newcomer.agree({"every": 1})
    coordinator._roster.hear({"worker": "v", "step": 500})
    assert coordinator._roster.agree("v", {"every": 2}) == {"every": 2}
    assert "every is 1 here, 2 there" in until(lambda: newcomer.disagreement)
    veteran.close()
    assert sum("every is 1 here" in record.getMessage() for record in caplog.records) == 1


def test_a_roster_stays_small() -> None:
    roster = Roster(patience=60)
    for number in range(3000):
        roster.hear({"worker": f"w{number}"})
    assert len(roster.ages()) == 1024 and "w2999" in roster.ages() and "w0" not in roster.ages()


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_returns_learns_everything_again(start) -> None:
    port = free_port()
    first = start(Coordinator, port=port, secret=SECRET)
    reporters = [start(Reporter, first.address, name, SECRET) for name in "ab"]
    for reporter in reporters:
        reporter.agree(OWN)
        reporter.say(step=7)
    first.close()
    time.sleep(0.2)  # some reports fail
    second = start(Coordinator, port=port, secret=SECRET)
    until(lambda: len(second._roster.ages()) == 2 and second.status()["settings"])
    assert second.status()["settings"] == json.loads(json.dumps(OWN))
    assert {said["step"] for said in second._roster.ages().values()} == {7}
    assert all(until(lambda r=reporter: r.reachable) for reporter in reporters)
    with pytest.raises(ValueError, match="method.every"):
        start(Reporter, second.address, "c", SECRET).agree({**OWN, "method.every": 1})


# -- what is wrong at the start ----------------------------------------------------------------------------------------


def complaint(*arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Reporter(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_failure_at_the_start_is_one_line_with_its_cure(start) -> None:
    port = free_port()
    where = f"127.0.0.1:{port}"
    assert f"thinwire coordinator --port {port}" in complaint(where, "a", None)
    assert "use an IP address" in complaint(f"no-such-host.invalid:{port}", "a", SECRET)
    assert "--secret-file" in complaint("192.0.2.1:29510", "a", None)
    assert "HOST:PORT" in complaint("127.0.0.1", "a", None)
    start(Coordinator, port=port, secret=SECRET)
    for wrong in (None, b"t" * 32):
        assert "the code is wrong: use the same --secret-file" in complaint(where, "a", wrong)


def test_a_coordinator_that_does_not_know_our_secret_is_not_believed(start) -> None:
    """It accepts anything, as an impostor would."""
    coordinator = start(Coordinator, port=free_port(), secret=b"t" * 32)
    coordinator._guard.check = lambda request: "0" * 64
    assert "does not know the secret" in complaint(coordinator.address, "a", SECRET)


@pytest.mark.parametrize("said", [b"220 mail\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b""])
def test_something_else_that_listens_is_told_apart(said: bytes) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 1)) as door:

        def answer() -> None:
            link, _ = door.accept()
            with link:
                link.recv(4096)
                link.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        line = complaint(f"127.0.0.1:{port}", "a", None)
        thread.join()
    assert "is not a thinwire coordinator" in line


def test_a_lighthouse_that_cannot_be_reached_is_said(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    port = int(coordinator.address.rsplit(":", 1)[1])
    assert not _closed(port)
    time.sleep(0.3)  # shut down before it has begun to serve, torchft's lighthouse keeps its port
    coordinator._lighthouse.shutdown()
    until(lambda: _closed(port))
    assert f"nothing listens at 127.0.0.1:{port}" in complaint(coordinator.address, "a", None)


def _closed(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_beyond_loopback_a_secret_is_needed_and_taken_ports_are_said(start) -> None:
    for bind in ("0.0.0.0", "192.0.2.1"):
        with pytest.raises(ValueError, match="needs a secret"):
            Coordinator(bind=bind)
    port = free_port()
    start(Coordinator, port=port)
    for taken in (port - 1, port, port + 1):
        with pytest.raises(ValueError, match="cannot listen at 127.0.0.1:.*choose another, or end what uses it"):
            Coordinator(port=taken)


def test_a_deadline_that_nobody_can_meet_is_refused() -> None:
    with pytest.raises(ValueError, match="a round deadline of 0 s"):
        Coordinator(port=free_port(), round_deadline=0.0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_interface_means_both_kinds(start) -> None:
    port = free_port()
    start(Coordinator, bind="::", port=port, secret=SECRET)
    for host in ("127.0.0.1", "[::1]"):
        start(Reporter, f"{host}:{port}", host, SECRET)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere_and_runs_only_its_own_script(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    code, headers, body = get(coordinator, "/")
    assert code == 200 and headers["Content-Type"].startswith("text/html")
    text = body.decode()
    assert "http://" not in text and "https://" not in text and "src=" not in text and "innerHTML" not in text
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy


def test_a_name_that_leads_a_browser_here_is_refused_without_a_secret(start) -> None:
    coordinator = start(Coordinator, port=free_port())
    assert get(coordinator, "/status", Host="evil.example:80")[0] == 403
    assert get(coordinator, "/status", Host="localhost:80")[0] == 200
    assert get(coordinator, "/nothing")[0] == 404


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def call(*arguments: Any) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "thinwire.cli", "coordinator", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        env = environment() | {"XDG_CONFIG_HOME": str(tmp_path / "config")}
        started.append(subprocess.Popen(line, text=True, cwd=tmp_path, env=env, **pipes))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], status: int) -> str:
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    return said


def test_the_command_on_this_machine(command) -> None:
    port = free_port()
    process = command("--port", port)
    assert process.stdout is not None
    assert process.stdout.readline() == f"page        http://127.0.0.1:{port + 1}/\n"
    assert process.stdout.readline() == f"join with   thinwire train --join 127.0.0.1:{port}\n"
    Reporter(f"127.0.0.1:{port}", "a", None).close()
    process.send_signal(signal.SIGTERM)
    assert ended(process, 0) == ""


def test_the_command_beyond_this_machine_makes_a_secret_and_says_where(command, tmp_path: Path) -> None:
    port = free_port()
    process = command("--port", port, "--bind", "0.0.0.0", "--round-deadline", "30s", "--min-workers", 2)
    assert process.stdout is not None
    page, secret, join = (process.stdout.readline() for _ in range(3))
    path = tmp_path / "config" / "thinwire" / "secret"
    assert str(path) in secret and "made now" in secret and path.stat().st_mode & 0o777 == 0o600
    assert join.endswith(f":{port} --secret-file {path}\n") and "0.0.0.0" not in page + join
    secret_bytes = bytes.fromhex(path.read_text())
    Reporter(f"127.0.0.1:{port}", "a", secret_bytes).close()
    assert "code is wrong" in complaint(f"127.0.0.1:{port}", "a", b"t" * 32)
    assert process.stderr is not None and process.stderr.readline(), "it says whom it refused, soon after"
    process.send_signal(signal.SIGINT)
    assert ended(process, 0) == "", "one refusal, one line"
    assert find_secret("0.0.0.0", path) == (path, False), "the next time it is there"
    assert bytes.fromhex(path.read_text()) == secret_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bind": "192.0.2.77"}, "cannot listen at 192.0.2.77"),
        ({"bind": "no-such-host.invalid"}, "use one of this machine's"),
        ({"bind": "no-such-host.invalid", "secret_file": "new"}, "--bind no-such-host.invalid: .*this machine's"),
        ({"round_deadline": "soon"}, "'soon' is not a time"),
        ({"secret_file": "open"}, "chmod 600"),
        ({"secret_file": "short"}, "too short"),
        ({"secret_file": "/proc/secret"}, "cannot make a secret file"),
    ],
)
def test_what_the_command_cannot_do_is_one_line(
    tmp_path: Path, monkeypatch, options: dict[str, str], said: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, text, mode in (("open", "ab" * 32, 0o644), ("short", "abcd", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    chosen: dict[str, Any] = {"bind": "127.0.0.1", "min_workers": 1, "round_deadline": None, "secret_file": None}
    chosen |= options
    if chosen["secret_file"]:
        chosen["secret_file"] = tmp_path / chosen["secret_file"]
    with pytest.raises(UserError, match=said) as caught:
        start_command(port=free_port(), **chosen)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists(), "no secret for an address that is none"


def test_without_torchft_it_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import thinwire\n"
        "assert 'torchft' not in sys.modules\n"
        "sys.modules['torchft'] = None\n"  # as if it were not installed
        "from thinwire.cli import main\n"
        "sys.argv = ['thinwire', 'coordinator']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "pip install 'thinwire[elastic]'" in done.stderr
