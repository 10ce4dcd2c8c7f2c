"""A transport serves one fleet after another, on connections of its own each time, and never two at once."""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.toy import parameters, replicas, same_bits, sgd, train

pytestmark = pytest.mark.xdist_group("processes")


def one_after_another(rank: int, workers: int, port: int | None) -> tuple[list, str]:
    transport = tw.Group() if port is None else tw.Group.connect(f"127.0.0.1:{port}", rank, workers, timeout=60)
    fleets = []
    for method in (tw.local_sgd(2), tw.diloco(2, codec=tw.Int8()), tw.sparseloco(2)):
        fleets.append(tw.Fleet(replicas(1, sgd), method, transport))
        train(fleets[-1], 5, first_worker=rank)
        fleets[-1].finish()
    try:
        fleets[0].consensus()
    except ValueError as error:
        return [parameters(fleet) for fleet in fleets], str(error)
    return [], ""


@pytest.mark.parametrize(("workers", "connected"), [(2, True), (3, True), (3, False)])
def test_fleets_one_after_another(cluster: Cluster, workers: int, connected: bool) -> None:
    port = free_port() if connected else None
    results = cluster.run(one_after_another, workers, workers, port, join=not connected)
    for found, refused in results:
        assert len(found) == 3 and "serves another fleet by now" in refused
        for mine, first in zip(found, results[0][0], strict=True):
            assert all(same_bits(one, other) for one, other in zip(mine, first, strict=True))
