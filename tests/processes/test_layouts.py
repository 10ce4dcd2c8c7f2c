"""The same run in one process, in two and four processes, and in two processes that host two replicas each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster
from tests.toy import FRAGMENTS, adamw, fleet_of, momentum, parameters, replicas, same_bits, sgd, train

pytestmark = pytest.mark.xdist_group("processes")
STEPS = 13

METHODS: dict[str, tuple[Callable[[], tw.Method], Callable]] = {
    "ddp": (tw.ddp, adamw),
    "local_sgd": (lambda: tw.local_sgd(4), momentum),
    "local_sgd delayed": (lambda: tw.local_sgd(4, delay=2), sgd),
    "local_adam": (lambda: tw.local_adam(4, delay=1), adamw),
    "desloc": (lambda: tw.desloc(2), adamw),
    "desloc overlapped": (lambda: tw.desloc(3, outer=tw.Nesterov(1.0, 0.9), delay=2), adamw),
    "diloco": (lambda: tw.diloco(4), adamw),
    "diloco bf16": (lambda: tw.diloco(4, codec=tw.BFloat16()), adamw),
    "diloco int8": (lambda: tw.diloco(4, codec=tw.Int8()), adamw),
    "streaming": (lambda: tw.streaming_diloco(6, FRAGMENTS), adamw),
    "delayed": (lambda: tw.delayed_diloco(3), adamw),
    "eager": (lambda: tw.eager_diloco(3), adamw),
    "eager e3m0": (lambda: tw.eager_diloco(3, FRAGMENTS, codec=tw.E3M0(), phases=2), adamw),
    "carry": (lambda: tw.carry_diloco(4), adamw),
    "decoupled paper": (lambda: tw.decoupled_momentum(4, variant="paper", decay=0.5), adamw),
    "decoupled consensus": (lambda: tw.decoupled_momentum(4), adamw),
    "demo": (lambda: tw.demo(), sgd),
    "sparseloco": (lambda: tw.sparseloco(4), adamw),
}
GATHERED = {"diloco bf16", "diloco int8", "streaming", "eager e3m0", "demo", "sparseloco"}
GATHERED |= {"decoupled paper", "decoupled consensus"}


def in_processes(rank: int, name: str, hosted: int) -> tuple[list, dict, tuple]:
    make, optimizer = METHODS[name]
    fleet = tw.Fleet(replicas(hosted, optimizer), make(), tw.Group())
    train(fleet, STEPS, first_worker=rank * hosted)
    values, agreed = parameters(fleet), fleet.consensus()
    counters = fleet.bytes_sent, fleet.wire_sent, fleet.wire_received
    fleet.finish()
    return [values, parameters(fleet)], agreed, counters


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)], ids=["2x1", "4x1", "2x2"])
def test_layouts_agree(cluster: Cluster, name: str, layout: tuple[int, int]) -> None:
    processes, hosted = layout
    make, optimizer = METHODS[name]
    simulated = fleet_of(make(), processes * hosted, optimizer)
    train(simulated, STEPS)
    expected = parameters(simulated)
    agreed = simulated.consensus()
    counters = simulated.bytes_sent, simulated.wire_sent, simulated.wire_received
    simulated.finish()
    final = parameters(simulated)
    answers = cluster.run(in_processes, processes, name, hosted)
    real = [values for answer in answers for values in answer[0][0]]
    ended = [values for answer in answers for values in answer[0][1]]
    if name in GATHERED:  # summed in worker order everywhere; an all-reduce has an order of its own
        assert same_bits(expected, real)
    for ours, theirs in zip(expected + final, real + ended, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert all(same_bits([ended[0]], [other]) for other in ended[1:])
    for _, theirs, counted in answers:
        assert counted == counters
        for key, value in agreed.items():
            torch.testing.assert_close(theirs[key], value, rtol=1e-4, atol=1e-5)
