"""Separate runs that do not fit together: another count, a number taken twice, nobody there."""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.cluster import Cluster, free_port
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


def test_no_first_worker_is_told(cluster: Cluster) -> None:
    (text,) = outcomes(cluster, [1], [2], timeout=2)
    assert "PeerLost: worker 0 did not answer at 127.0.0.1" in text
