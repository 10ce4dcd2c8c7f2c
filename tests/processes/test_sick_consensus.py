"""A worker that becomes sick after the last round does not spoil the model of all."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster
from tests.toy import parameters, replicas, same_bits, sgd, train

pytestmark = pytest.mark.xdist_group("processes")


def sick_at_the_end(rank: int, method: tw.Method) -> tuple[list, list, dict[str, int]]:
    fleet = tw.Fleet(replicas(1, sgd), method, tw.Group())
    train(fleet, 5, first_worker=rank)
    before = parameters(fleet)
    if rank == 1:
        with torch.no_grad():
            fleet.replicas[0].model[2].bias[0] = torch.inf
    fleet.finish()
    return before, parameters(fleet), fleet.events.counts


@pytest.mark.parametrize("method", [tw.local_sgd(2), tw.diloco(2)], ids=["local_sgd", "diloco"])
def test_finish_takes_the_mean_of_the_healthy(cluster: Cluster, method: tw.Method) -> None:
    results = cluster.run(sick_at_the_end, 3, method)
    expected = [(a + b) / 2 for a, b in zip(results[0][0][0], results[2][0][0], strict=True)]
    for _, after, _ in results:
        assert same_bits(after, results[0][1])
        torch.testing.assert_close(after[0], expected)
    assert [counts.get("sick", 0) for _, _, counts in results] == [0, 1, 0]
