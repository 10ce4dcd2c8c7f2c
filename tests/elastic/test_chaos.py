"""Workers come, go, stall and die; nothing that was committed is lost. The long runs are in bench/chaos.py."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from bench.netns import Network
from tests.elastic.pack import ROOT, Line, Member
from thinwire.elastic.coordinator import Coordinator

pytestmark = pytest.mark.xdist_group("chaos")
STEPS = 4000  # more than any test takes: the fleet is ended, not awaited
Start = Callable[..., Member]


def free_port() -> int:
    """A port whose next one is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator(port=free_port(), heartbeat_timeout=3.0)
    yield made
    made.close()


@pytest.fixture
def start(coordinator: Coordinator) -> Iterator[Start]:
    members: list[Member] = []

    def begin(method: str, name: str, *more: str, steps: int = STEPS) -> Member:
        members.append(Member(coordinator.address, method, steps, name, "--seed", str(len(members)), *more))
        return members[-1]

    yield begin
    for member in members:
        member.end()


def pair(start: Start, method: str, *more: str) -> list[Member]:
    members = [start(method, name, "--together", "2", *more) for name in "ab"]
    for member in members:
        member.step(8)
    return members


def joined(members: list[Member], newcomer: Member) -> int:
    """The step at which it joined; everybody is two periods on."""
    step = newcomer.wait_for(lambda line: line["kind"] == "begun")["step"]
    for member in [*members, newcomer]:
        member.step(step + 8)
    return step


def each(members: list[Member], step: int, what: str) -> set[str]:
    return {member.at(step)[what] for member in members}


@pytest.mark.parametrize("method", ["diloco", "consensus", "desloc"])
def test_a_newcomer_takes_over_the_state_and_is_equal_after_the_first_round(start: Start, method: str) -> None:
    members = pair(start, method)
    step = joined(members, newcomer := start(method, "y"))
    assert step >= 8, "a worker at step 0 must not be the donor"
    everybody = [*members, newcomer]
    assert len(each(everybody, step + 4, "params")) == 1
    assert len(each(everybody, step + 3, "params")) == 3, "between rounds each trains on its own data"
    if method == "diloco":
        assert len(each(everybody, step + 4, "outer")) == 1
    assert newcomer.at(step + 1)["step"] == step + 1  # the fleet's steps, not its own
    assert not any(member.events("lost") for member in everybody)


def test_each_moment_of_a_newcomer_is_equal_after_its_own_round(start: Start) -> None:
    members = pair(start, "desloc")
    everybody = [*members, newcomer := start("desloc", "y")]
    step = joined(members, newcomer)
    for name, period in (("exp_avg", 12), ("exp_avg_sq", 24)):
        first = -(-(step + 1) // period) * period
        for member in everybody:
            member.step(first + 1)
        assert len(each(everybody, first, name)) == 1
        assert len(each(everybody, first - 1, name)) == 3


@pytest.mark.parametrize("method", ["eager", "mean", "streaming", "sparseloco"])
def test_newcomers_of_methods_that_keep_workers_apart_stay_near(start: Start, method: str) -> None:
    members = pair(start, method)
    before = max(distance(members[0].at(step), members[1].at(step)) for step in (4, 8))
    step = joined(members, newcomer := start(method, "y"))
    for member in [*members, newcomer]:
        member.step(step + 24)
    for later in range(step + 4, step + 25, 4):
        apart = distance(newcomer.at(later), members[0].at(later))
        assert apart < 5 * max(before, distance(members[0].at(later), members[1].at(later)), 1e-3)


def distance(one: Line, other: Line) -> float:
    return sum((a - b) ** 2 for a, b in zip(one["some"], other["some"], strict=True)) ** 0.5


def test_ddp_lets_a_newcomer_in(start: Start) -> None:
    members = pair(start, "ddp")
    step = joined(members, newcomer := start("ddp", "y"))
    assert len(each([*members, newcomer], step + 2, "params")) == 1


@pytest.mark.parametrize("place", ["inner", "exchange", "vote", "commit"])
def test_kill_9_costs_at_most_that_round(start: Start, place: str) -> None:
    stop = () if place == "inner" else ("--stop-at", f"{place}:5")
    members = [start("diloco", name, "--together", "3") for name in "ab"]
    victim = start("diloco", "x", "--together", "3", *stop)
    if place == "inner":
        victim.step(17)
        victim.signal(signal.SIGKILL)
    victim.died()
    for member in members:
        after = member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 2)
        assert after["lost"] <= 1
    last = after["step"] // 4 * 4 + 8
    for member in members:
        member.step(last + 1)
    assert len(each(members, last, "params")) == 1 and len(each(members, last, "outer")) == 1
    step = joined(members, replacement := start("diloco", "y"))
    everybody = [*members, replacement]
    assert len(each(everybody, step + 4, "params")) == 1 and len(each(everybody, step + 4, "outer")) == 1


def test_kill_9_under_an_eager_round(start: Start) -> None:
    members = [start("eager", name, "--together", "3") for name in "ab"]
    start("eager", "x", "--together", "3", "--stop-at", "exchange:5").died()
    for member in members:
        line = member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 2)
        assert line["lost"] == 1
        assert member.step(line["step"] + 12)["lost"] == 1


def test_two_deaths_at_once_leave_one_who_says_that_it_is_alone(start: Start) -> None:
    names = ["a", "x", "z"]
    a, x, z = (start("diloco", name, "--together", "3") for name in names)
    a.step(9)
    x.signal(signal.SIGKILL)
    z.signal(signal.SIGKILL)
    line = a.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 1)
    assert line["lost"] <= 1
    a.step(line["step"] + 5)
    assert a.events("alone"), "a round made alone must be marked"


def test_a_stopped_worker_is_left_behind_and_healed(start: Start) -> None:
    members = [start("diloco", name, "--together", "3") for name in "ab"]
    sleeper = start("diloco", "s", "--together", "3")
    sleeper.step(9)
    sleeper.signal(signal.SIGSTOP)
    for member in members:
        member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 2)
    sleeper.signal(signal.SIGCONT)
    back = sleeper.wait_for(lambda line: any("healed" in text for text in line.get("events", ())))
    everybody, step = [*members, sleeper], back["step"] // 4 * 4 + 4
    for member in everybody:
        member.step(step + 1)
    assert len(each(everybody, step, "params")) == 1


def test_a_slow_joiner_does_not_hold_up_the_others_for_long(start: Start) -> None:
    members = pair(start, "diloco")
    newcomer = start("diloco", "y", "--stop-at", "healing")
    newcomer.wait_for(lambda line: line["kind"] == "stopping")
    for member in members:
        gone = member.wait_for(
            lambda line: line["kind"] == "step" and any("y-" in t and "left" in t for t in line["events"])
        )
        assert gone["lost"] <= 1 and gone["workers"] == 2
    newcomer.signal(signal.SIGCONT)
    step = joined(members, newcomer)
    assert len(each([*members, newcomer], step + 4, "params")) == 1


def test_the_coordinator_may_die_and_return() -> None:
    port = free_port()
    first = second = coordinator_process(port)
    members: list[Member] = []
    try:
        members += [Member(f"127.0.0.1:{port}", "diloco", STEPS, name, "--together", "2") for name in "ab"]
        for member in members:
            member.step(8)
        first.kill()
        first.wait()
        second = coordinator_process(port)
        step = max(member.lines[-1]["step"] for member in members) // 4 * 4 + 12
        for member in members:
            assert member.step(step + 1)["workers"] == 2 and not member.events("healed")
        assert len(each(members, step, "params")) == 1
        members.append(Member(f"127.0.0.1:{port}", "diloco", STEPS, "y", "--seed", "3"))
        step = joined(members[:2], members[2])
        assert step > 8 and len(each(members, step + 4, "params")) == 1
    finally:
        for member in members:
            member.end()
        for process in (first, second):
            process.kill()
            process.wait()


def coordinator_process(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "thinwire.cli", "coordinator", "--port", str(port)], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)) == 0:
                return process
        time.sleep(0.1)
    raise AssertionError("the coordinator did not start")


def test_a_newcomer_with_other_settings_is_refused_and_nobody_else_minds(start: Start) -> None:
    members = pair(start, "diloco")
    wrong = start("consensus", "y")
    assert wrong.died() != 0 and "method is" in wrong.errors
    wider = start("diloco", "z", "--width", "17")
    assert wider.died() != 0 and "tensors is" in wider.errors
    step = max(member.lines[-1]["step"] for member in members)
    for member in members:
        member.step(step + 12)
    assert len(each(members, (step + 8) // 4 * 4, "params")) == 1


def test_with_a_deadline_a_slow_worker_gives_what_it_has() -> None:
    made = Coordinator(port=free_port(), heartbeat_timeout=3.0, round_deadline=6.0)
    paces = {"a": "0.05", "b": "0.05", "s": "1.5"}
    members = [Member(made.address, "diloco", STEPS, n, "--together", "3", "--seconds", p) for n, p in paces.items()]
    try:
        slow = members[2]
        first = slow.wait_for(lambda line: any("late" in text for text in line.get("events", ())))
        assert first["step"] % 4 == 0 and first["workers"] == 3 and first["committed"] >= 1
        for member in members:
            member.step(first["step"])
        assert len(each(members, first["step"], "params")) == 1
    finally:
        for member in members:
            member.end()
        made.close()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root")
def test_heartbeats_survive_a_line_that_a_round_fills_for_longer(tmp_path: Path) -> None:
    with Network(3, up=1.25e6, name="beats") as network:  # 10 Mbit/s
        secret, where = tmp_path / "secret", f"{network.address(2)}:29510"
        words = [sys.executable, "-m", "thinwire.cli", "coordinator", "--bind", network.address(2)]
        coordinator = network.start(2, [*words, "--secret-file", str(secret)], cwd=ROOT, stdout=subprocess.PIPE)
        try:
            assert coordinator.stdout is not None and coordinator.stdout.readline()
            more = ["--together", "2", "--secret", str(secret), "--width", "300000"]  # 12 MB: ten seconds a round
            members = [
                Member(where, "diloco", STEPS, n, *more, namespace=network.namespace(i)) for i, n in enumerate("ab")
            ]
            for member in members:
                line = member.wait_for(lambda line: line["kind"] == "step" and line["committed"] == 1, seconds=150)
                assert line["lost"] == 0 and line["workers"] == 2
        finally:
            for member in members:
                member.end()
            coordinator.kill()
            coordinator.wait()


def test_all_finish_with_the_same_model(start: Start) -> None:
    members = [start("desloc", name, "--together", "2", steps=18) for name in "ab"]
    ends = [member.finished() for member in members]
    assert len({end["params"] for end in ends}) == 1 and all(end["step"] == 18 for end in ends)
