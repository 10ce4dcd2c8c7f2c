"""Separate runs that do not fit together: another count, a number taken twice, nobody there."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

import thinwire as tw
from tests.cluster import FORKS, Cluster, free_port
from tests.toy import replicas, sgd

pytestmark = pytest.mark.xdist_group("processes")


def connecting(rank: int, port: int, numbers: list[int], counts: list[int], timeout: float = 10) -> str:
    try:
        transport = tw.Group.connect(f"127.0.0.1:{port}", numbers[rank], counts[rank], timeout=timeout)
        tw.Fleet(replicas(1, sgd), tw.local_sgd(2), transport).open()
    except (ValueError, tw.PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def outcomes(cluster: Cluster, numbers: list[int], counts: list[int], timeout: float = 10) -> list[str]:
    return cluster.run(connecting, len(numbers), free_port(), numbers, counts, timeout, join=False)


@pytest.mark.parametrize("counts", [[2, 3], [3, 2]])
def test_another_count_is_told_to_both(cluster: Cluster, counts: list[int]) -> None:
    for text in outcomes(cluster, [0, 1], counts):
        assert "ValueError" in text and "workers=2" in text and "workers=3" in text


def test_a_number_taken_twice_is_told_and_the_others_train(cluster: Cluster) -> None:
    first, *others = outcomes(cluster, [0, 1, 1], [2, 2, 2])
    assert first == "no error" and sorted(others)[1] == "no error"
    assert "ValueError" in sorted(others)[0] and "own" in sorted(others)[0]


def test_two_first_workers_are_told(cluster: Cluster) -> None:
    texts = sorted(outcomes(cluster, [0, 0], [2, 2], timeout=3))
    assert "worker 1 has not come" in texts[0] and texts[0].startswith("PeerLost: could not connect to all")
    assert texts[1].startswith("ValueError: worker 0 cannot listen at")


def test_a_program_that_says_nothing_is_no_first_worker() -> None:
    with socket.create_server(("127.0.0.1", port := free_port())):
        with pytest.raises(tw.PeerLost, match="something else listens there"):
            tw.Group.connect(f"127.0.0.1:{port}", worker=1, workers=2, timeout=2)


def opening(rank: int, port: int, told: Any) -> None:
    transport = tw.Group.connect(f"127.0.0.1:{port}", rank, 3, timeout=4)
    told.send("here")
    told.recv()  # worker 0 waits here without end: it is stopped
    try:
        tw.Fleet(replicas(1, sgd), tw.local_sgd(2), transport).open()
    except tw.PeerLost as error:
        told.send(str(error))


@pytest.mark.parametrize("there", [2, 3])
def test_a_first_worker_that_is_stopped_is_not_waited_for_without_end(there: int) -> None:
    """The others wait for the last one to come, or for their connections: both in the store of the first one."""
    port, pipes, workers = free_port(), [], []
    try:
        for rank in range(there):
            here, told = FORKS.Pipe()
            pipes.append(here)
            workers.append(FORKS.Process(target=opening, args=(rank, port, told), daemon=True))
            workers[-1].start()
            assert here.poll(60) and here.recv() == "here"
        os.kill(workers[0].pid, signal.SIGSTOP)
        for pipe in pipes[1:]:
            pipe.send("open")
        for pipe in pipes[1:]:
            assert pipe.poll(60)
            text = pipe.recv()
            assert "\n" not in text and "worker 0 does not answer" in text
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def test_no_first_worker_is_told(cluster: Cluster) -> None:
    (text,) = outcomes(cluster, [1], [2], timeout=2)
    assert "PeerLost: worker 0 did not answer at 127.0.0.1" in text
