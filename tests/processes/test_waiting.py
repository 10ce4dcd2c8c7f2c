"""Waits that could have no end: a store whose host is stopped, workers that wait at different rounds."""

from __future__ import annotations

import datetime
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import thinwire as tw
from tests.cluster import FORKS, Cluster, free_port
from tests.toy import FRAGMENTS, backward, replicas, sgd, train
from thinwire import conversation, group
from thinwire.transport import Key

pytestmark = pytest.mark.xdist_group("processes")


def host_a_store(port: int, pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    pipe.send("listening")
    pipe.recv()
    del store


@pytest.mark.parametrize(("process", "processes", "blamed"), [(1, 2, [0]), (2, 3, [0]), (0, 2, [1]), (0, 3, [])])
def test_a_store_whose_host_is_stopped_holds_nobody_up(
    process: int, processes: int, blamed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_ANSWER", 0.2)
    port, (here, there) = free_port(), FORKS.Pipe()
    host = FORKS.Process(target=host_a_store, args=(port, there), daemon=True)
    host.start()
    here.recv()
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    board = conversation.Board(store, process, range(processes), processes, timeout=5)
    assert board.departed() == {} and not board.somebody_failed()
    assert host.pid is not None
    os.kill(host.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as aside:
            answer = aside.submit(lambda: [board.somebody_failed(), board.departed(), board.roll_call()])
            try:
                assert answer.result(timeout=20) == [False, {}, blamed]
            finally:
                host.kill()
    finally:
        host.join()


def waiting_elsewhere(rank: int) -> tuple[Any, ...]:
    fleet = tw.Fleet(replicas(1, sgd), tw.local_sgd(2), tw.Group())
    train(fleet, 2)
    fleet.rows[0].launched += rank  # as if it had loaded another checkpoint
    try:
        train(fleet, 4)
    except tw.PeerLost as error:
        return str(error), error.row, error.round, error.step, error.workers
    return ("no error",)


def test_workers_that_wait_at_different_rounds_hear_of_it(cluster: Cluster) -> None:
    (first, *facts), (second, *others) = cluster.run(waiting_elsewhere, 2)
    assert "row 0, round 2: worker 1 waits at row 0, round 3" in first and facts == [0, 2, 4, (1,)]
    assert "row 0, round 3: worker 0 waits at row 0, round 2" in second and others == [0, 3, 6, (0,)]


def asking_alone(rank: int) -> tuple[Any, ...]:
    fleet = tw.Fleet(replicas(1, sgd), tw.local_sgd(2), tw.Group())
    train(fleet, 2)
    try:
        if rank == 0:
            fleet.consensus()
        else:
            fleet.finish()
    except tw.PeerLost as error:
        return str(error), error.row, error.round, error.workers
    return ("no error",)


def test_a_call_that_the_others_do_not_make_is_named_and_is_no_round(cluster: Cluster) -> None:
    first, second = cluster.run(asking_alone, 2)
    assert first[0].startswith("consensus(): worker 1 waits at finish()") and first[1:] == (None, None, (1,))
    assert second[0].startswith("finish(): worker 0 waits at consensus()") and second[1:] == (None, None, (0,))


def closed_at_exit(rank: int) -> bool:
    transport = tw.Group()
    fleet = tw.Fleet(replicas(1, sgd), tw.local_sgd(2), transport)
    train(fleet, 3)
    fleet.finish()
    group._close()
    return transport._control is None and transport._data is None


def test_connections_are_closed_before_python_ends(cluster: Cluster) -> None:
    """A gloo thread that lets go of a tensor when Python has ended aborts the process."""
    assert cluster.run(closed_at_exit, 2) == [True, True]


class SlowWork:
    """As a collective of NCCL: a wait with a limit that runs out breaks it; `is_completed` says when it has ended."""

    def __init__(self, seconds: float) -> None:
        self.end, self.broken = time.monotonic() + seconds, False

    def is_completed(self) -> bool:
        return self.broken or time.monotonic() > self.end

    def wait(self, limit: datetime.timedelta | None = None) -> None:
        if limit is not None and time.monotonic() + limit.total_seconds() < self.end:
            self.broken = True
            raise RuntimeError("Watchdog caught collective operation timeout")
        time.sleep(max(0.0, self.end - time.monotonic()))


def test_a_collective_that_must_not_be_waited_for_with_a_limit_is_looked_at() -> None:
    work = SlowWork(0.2)
    watched = group._Watched(work)
    with pytest.raises(RuntimeError, match="under way"):
        watched.wait(datetime.timedelta(seconds=0.01))
    assert not watched.is_completed() and not work.broken
    watched.wait(datetime.timedelta(seconds=20))
    assert watched.is_completed() and not work.broken


class LateWork:
    """It ends well, between a wait that was too short and the question whether it has ended."""

    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, limit: datetime.timedelta) -> None:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")


def a_late_end(rank: int) -> bool:
    transport = tw.Group()
    transport.open(1, 64)
    transport._wait(LateWork(), Key("consensus"))
    return True


def test_what_ends_just_after_a_wait_has_not_failed(cluster: Cluster) -> None:
    assert cluster.run(a_late_end, 2) == [True, True]


def interrupted(rank: int) -> tuple[int, list[Any]]:
    """Ctrl-C on worker 0 while it waits for worker 1, which is late; the loop catches it, and goes on."""
    (replica,) = replicas(1, sgd)
    fleet = tw.Fleet([replica], tw.diloco(2), tw.Group())
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    caught = 0
    for step in range(8):
        if step == 3 and rank == 1:
            time.sleep(2.5)
        if step == 3 and rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            train(fleet, 1)
        except KeyboardInterrupt:
            caught += 1
            fleet.zero_grad()
    fleet.finish()
    return caught, [parameter.tolist() for parameter in replica.trainable.values()]


def test_who_was_interrupted_while_waiting_may_go_on(cluster: Cluster) -> None:
    (caught, mine), (_, theirs) = cluster.run(interrupted, 2)
    assert caught == 1 and mine == theirs


def a_step_apart(rank: int, method: str, rate: str | None, ending: str) -> tuple[int, list[Any]]:
    """The last worker skips a step, as under a GradScaler: it comes to the meeting a round behind the others."""
    (replica,) = replicas(1, sgd)
    fleet = tw.attach(replica.model, replica.optimizers, METHODS_APART[method](), tw.Group(max_rate=rate))
    for step in range(7):
        backward(replica.model, step, rank)
        if step != 1 or rank < dist.get_world_size() - 1:
            replica.optimizers[0].step()
        replica.optimizers[0].zero_grad()
    if ending == "consensus":
        return fleet.steps, [tensor.tolist() for tensor in fleet.consensus().values()]
    fleet.finish()
    return fleet.steps, [parameter.tolist() for parameter in replica.trainable.values()]


METHODS_APART = {
    "two-shot": lambda: tw.streaming_diloco(3, [["*"]], delay=1),
    "in fragments": lambda: tw.streaming_diloco(4, FRAGMENTS, delay=2),
    "paced": lambda: tw.local_sgd(3, delay=1),
}


@pytest.mark.parametrize("ending", ["consensus", "finish"])
@pytest.mark.parametrize(
    ("method", "workers", "rate"), [("two-shot", 3, None), ("in fragments", 3, None), ("paced", 2, "2kB/s")]
)
def test_who_waits_at_a_meeting_sends_what_others_wait_for(
    cluster: Cluster, method: str, workers: int, rate: str | None, ending: str
) -> None:
    answers = cluster.run(a_step_apart, workers, method, rate, ending)
    assert [steps for steps, _ in answers] == [7] * (workers - 1) + [6]
    assert all(agreed == answers[0][1] for _, agreed in answers)
