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
from tests.cluster import free_port
from tests.elastic.garbage import until
from tests.elastic.pack import ROOT, Line, Member
from thinwire.elastic.coordinator import Coordinator

pytestmark = pytest.mark.xdist_group("chaos")
STEPS = 4000  # more than any test takes: the fleet is ended, not awaited
Start = Callable[..., Member]


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


def test_a_newcomer_takes_over_the_state_and_is_equal_after_the_first_round(start: Start) -> None:
    members = pair(start, "diloco")
    step = joined(members, newcomer := start("diloco", "y"))
    assert step >= 8, "a worker at step 0 must not be the donor"
    everybody = [*members, newcomer]
    assert len(each(everybody, step + 4, "params")) == 1 and len(each(everybody, step + 4, "outer")) == 1
    assert len(each(everybody, step + 3, "params")) == 3, "between rounds each trains on its own data"
    assert newcomer.at(step + 1)["step"] == step + 1  # the fleet's steps, not its own
    assert not any(member.events("lost") for member in everybody)


def distance(one: Line, other: Line) -> float:
    return sum((a - b) ** 2 for a, b in zip(one["some"], other["some"], strict=True)) ** 0.5


def test_ddp_lets_a_newcomer_in(start: Start) -> None:
    members = pair(start, "ddp")
    step = joined(members, newcomer := start("ddp", "y"))
    assert len(each([*members, newcomer], step + 2, "params")) == 1


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


def test_while_one_waits_for_more_workers_all_do(start: Start, coordinator: Coordinator) -> None:
    """Those who asked for fewer would train, and wait in their round for the one who does not."""
    a = start("diloco", "a")
    a.step(9)
    b = start("diloco", "b", "--together", "3")
    until(lambda: any(len(worker.get("taking_part", ())) == 2 for worker in coordinator.status()["workers"]), 60)
    c = start("diloco", "c")
    assert all(member.wait_for(lambda line: line["kind"] == "begun")["workers"] == 3 for member in (b, c))
    line = a.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 3)
    assert line["lost"] == 0 and any("2 of 3 workers are here" in text for text in a.events("waiting"))


@pytest.mark.parametrize("method", ["diloco", "eager"])
def test_a_stopped_worker_is_left_behind_and_healed(start: Start, method: str) -> None:
    """With overlap its quorum is asked for in advance: the state it is handed must wait for the end of its step."""
    members = [start(method, name, "--together", "3") for name in "ab"]
    sleeper = start(method, "s", "--together", "3")
    sleeper.step(9)
    sleeper.signal(signal.SIGSTOP)
    for member in members:
        member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 2)
    sleeper.signal(signal.SIGCONT)
    back = sleeper.wait_for(lambda line: any("healed" in text for text in line.get("events", ())))
    everybody, step = [*members, sleeper], back["step"] // 4 * 4 + 4
    for member in everybody:
        member.step(step + 9)
    assert method == "eager" or len(each(everybody, step, "params")) == 1


def test_a_worker_that_was_away_while_the_others_finished_is_told(start: Start) -> None:
    """It would train the rest alone, and there would be two models of one run."""
    members = [start("diloco", name, "--together", "3", steps=40) for name in "abs"]
    sleeper = members.pop()
    sleeper.step(9)
    sleeper.signal(signal.SIGSTOP)
    assert len({member.finished()["params"] for member in members}) == 1
    sleeper.signal(signal.SIGCONT)
    assert sleeper.died() != 0 and "RunFinished: the run at" in sleeper.errors
    assert not [line for line in sleeper.lines if line["kind"] == "finished"]


def test_a_worker_that_waits_for_a_quorum_ends_at_ctrl_c(start: Start, coordinator: Coordinator) -> None:
    """Though a thread of torchft's waits for the coordinator, which is away."""
    members = pair(start, "diloco")
    coordinator.close()
    for member in members:
        member.wait_for(lambda line: line["step"] % 4 == 3)
    time.sleep(1)
    for member in members:
        member.signal(signal.SIGINT)
    for member in members:
        assert member.died() != 0 and "KeyboardInterrupt" in member.errors


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


def test_a_joiner_that_takes_its_time_is_waited_for_where_quorums_are_asked_for_in_advance(start: Start) -> None:
    members = pair(start, "eager")
    joined(members, newcomer := start("eager", "y", "--stop-at", "fetching:1"))
    assert [member.lines[-1]["lost"] for member in [*members, newcomer]] == [0, 0, 0]
    assert not any(member.events("healed") for member in members)


def test_a_state_may_take_longer_than_a_round(start: Start) -> None:
    """A large model on a slow line: who is waited for takes over a state, and is not taken for lost."""
    members = pair(start, "diloco", "--transfer", "3")
    joined(members, newcomer := start("diloco", "y", "--stop-at", "fetching:6", "--transfer", "3"))
    assert [member.lines[-1]["lost"] for member in [*members, newcomer]] == [0, 0, 0]


def test_a_start_in_which_a_worker_dies_is_made_again(start: Start) -> None:
    a, dying = start("diloco", "a", "--together", "2"), start("diloco", "d", "--together", "2", "--stop-at", "start")
    assert dying.died() == -signal.SIGKILL
    b = start("diloco", "b", "--together", "2")
    for member in (a, b):
        assert member.wait_for(lambda line: line["kind"] == "begun")["workers"] == 2
        member.step(5)
    assert len(each([a, b], 4, "params")) == 1


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


# -- on lines of their own ---------------------------------------------------------------------------------------------

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root")
LineUp = Callable[..., list[Member]]


@pytest.fixture
def line_up(tmp_path: Path) -> Iterator[LineUp]:
    """Start workers, each in a namespace of the network, and a coordinator in its last one."""
    processes, members = list[subprocess.Popen[bytes]](), list[Member]()

    def begin(network: Network, *more: str) -> list[Member]:
        last, secret = network.workers - 1, str(tmp_path / "secret")
        words = [sys.executable, "-m", "thinwire.cli", "coordinator", "--bind", network.address(last)]
        processes.append(network.start(last, [*words, "--secret-file", secret], cwd=ROOT, stdout=subprocess.PIPE))
        assert processes[0].stdout is not None and processes[0].stdout.readline()
        words = ["--together", str(last), "--secret", secret, *more]
        for number, name in enumerate("abc"[:last]):
            space = network.namespace(number)
            members.append(Member(f"{network.address(last)}:29510", "diloco", STEPS, name, *words, namespace=space))
        return members

    yield begin
    for member in members:
        member.end()
    for process in processes:
        process.kill()
        process.wait()


@NEEDS_ROOT
def test_heartbeats_survive_a_line_that_a_round_fills_for_longer(line_up: LineUp) -> None:
    with Network(3, up=1.25e6, name="beats") as network:  # 10 Mbit/s
        for member in line_up(network, "--width", "300000"):  # 12 MB: ten seconds a round
            line = member.wait_for(lambda line: line["kind"] == "step" and line["committed"] == 1, seconds=150)
            assert line["lost"] == 0 and line["workers"] == 2


@NEEDS_ROOT
def test_a_worker_whose_line_is_cut_is_left_behind_and_healed(line_up: LineUp) -> None:
    with Network(4, name="cut") as network:
        *others, lonely = members = line_up(network)
        lonely.step(9)
        set_line(network, 2, "down")
        for member in others:
            gone_on = member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == 2)
            assert gone_on["lost"] <= 1
        for member in others:
            member.step(gone_on["step"] + 8)
        set_line(network, 2, "up")
        back = lonely.wait_for(lambda line: any("healed" in text for text in line.get("events", ())))
        step = back["step"] // 4 * 4 + 4
        for member in members:
            assert member.step(step + 1)["workers"] == 3
        assert len(each(members, step, "params")) == 1 and not any(member.events("alone") for member in members)


def set_line(network: Network, worker: int, way: str) -> None:
    """Pull the cable of a worker out of the hub, or plug it in."""
    subprocess.run(["ip", "-n", network.namespace("hub"), "link", "set", f"port{worker}", way], check=True)


def test_all_finish_with_the_same_model_and_a_latecomer_is_told(start: Start, coordinator: Coordinator) -> None:
    members = [start("desloc", name, "--together", "2", steps=18) for name in "ab"]
    ends = [member.finished() for member in members]
    assert len({end["params"] for end in ends}) == 1 and all(end["step"] == 18 for end in ends)
    assert [worker["step"] for worker in coordinator.status()["workers"]] == [18, 18], "the page shows the last step"
    latecomer = start("desloc", "y", steps=18)
    assert latecomer.died() != 0 and "RunFinished: the run at" in latecomer.errors and not latecomer.lines
    another = start("desloc", "z", steps=20)
    assert another.finished()["step"] == 20, "with other settings it is another run"
