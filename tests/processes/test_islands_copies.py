"""DDP inside a worker, thinwire across: each process carries its share, and one copy crosses the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.toy import FRAGMENTS, adamw, backward, fleet_of, parameters, sgd, small_model, train
from thinwire.transport import Exchange, Order

pytestmark = pytest.mark.xdist_group("processes")
STEPS = 7

METHODS: dict[str, tuple[Callable[[], tw.Method], Callable]] = {
    "desloc": (lambda: tw.desloc(2, delay=1), adamw),
    "diloco": (lambda: tw.diloco(3), adamw),
    "diloco int8": (lambda: tw.diloco(3, codec=tw.Int8()), adamw),
    "eager e3m0": (lambda: tw.eager_diloco(2, FRAGMENTS, codec=tw.E3M0()), adamw),
    "demo": (lambda: tw.demo(4, 4), sgd),
    "sparseloco": (lambda: tw.sparseloco(3, 16, 4), adamw),
}
SUMMED = {"desloc", "diloco"}  # an all-reduce adds in an order of its own


class Counting(tw.Transport):
    """A transport that counts what goes into it, and can lose a round."""

    def __init__(self, inner: tw.Transport, lose: Callable[[Order], bool] = lambda order: False) -> None:
        self.inner, self.lose, self.given = inner, lose, 0
        self.survives = True

    def open(self, hosted: int, header_length: int) -> None:
        self.inner.open(hosted, header_length)
        self.worker, self.workers, self.parts = self.inner.worker, self.inner.workers, self.inner.parts

    def exchange(self, order: Order) -> Exchange:
        parts = order.contributions[0]
        self.given += sum(p.nbytes for p in parts) if isinstance(parts, list) else parts.nbytes
        return Losing(self.inner.exchange(order), self.lose(order))

    def talk(self, blobs: Any) -> list[bytes]:
        return self.inner.talk(blobs)

    def meet(self, key: Any, headers: Any, on_ahead: Any) -> list[bytes]:
        return self.inner.meet(key, headers, on_ahead)

    def broadcast(self, buffers: Any, source: int) -> torch.Tensor:
        return self.inner.broadcast(buffers, source)

    def add(self, buffers: Any) -> torch.Tensor:
        return self.inner.add(buffers)


class Losing(Exchange):
    def __init__(self, inner: Exchange, lost: bool) -> None:
        self.inner, self.lost = inner, lost

    def poll(self) -> bool:
        return self.inner.poll()

    def headers(self) -> list[bytes]:
        return self.inner.headers()

    def result(self) -> torch.Tensor | list[torch.Tensor]:
        answer = self.inner.result()
        if self.lost:
            raise tw.PeerLost("lost on purpose")
        return answer


def trained(transport: tw.Transport, inside: Any, name: str, worker: int) -> tuple[tw.Fleet, dict[str, Any]]:
    make, optimizer_of = METHODS[name]
    model = DistributedDataParallel(small_model(), process_group=inside)
    optimizer = optimizer_of(model.parameters())
    fleet = tw.attach(model, optimizer, make(), transport)
    for step in range(STEPS):
        backward(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()
    values, agreed = parameters(fleet)[0], fleet.consensus()
    wire = fleet.wire_sent, fleet.wire_received
    fleet.finish()
    return fleet, {"values": values, "agreed": agreed, "finished": parameters(fleet)[0],
                   "counted": (fleet.bytes_sent, *wire), "given": getattr(transport, "given", None)}  # fmt: skip


def on_mesh(rank: int, workers: int, name: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (workers, 2), mesh_dim_names=("workers", "inside"))
    transport = Counting(tw.Group(mesh["workers"]))
    return trained(transport, mesh["inside"].get_group(), name, rank // 2)[1]


def at_site(rank: int, port: int, sizes: list[int], name: str) -> dict[str, Any]:
    """Sites of their own, with `sizes` processes each; every process calls the same line."""
    worker = next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))
    inner, size = rank - sum(sizes[:worker]), sizes[worker]
    store = dist.TCPStore("127.0.0.1", port + worker, size, inner == 0)
    dist.init_process_group("gloo", store=store, rank=inner, world_size=size)
    transport = tw.Group.connect(f"127.0.0.1:{port + len(sizes)}", worker=worker, workers=len(sizes), timeout=30)
    fleet, seen = trained(transport, None, name, worker)
    return seen | {"worker": worker, "led": fleet.island.led}


def simulated(name: str, workers: int) -> dict[str, Any]:
    make, optimizer = METHODS[name]
    fleet = fleet_of(make(), workers, optimizer)
    train(fleet, STEPS)
    values, agreed = parameters(fleet), fleet.consensus()
    counted = fleet.bytes_sent, fleet.wire_sent, fleet.wire_received
    fleet.finish()
    return {"values": values, "agreed": agreed, "counted": counted, "finished": parameters(fleet)}


def check_equal(seen: dict[str, Any], plain: dict[str, Any], worker: int, exact: bool) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(seen["values"], plain["values"][worker], **tolerance)
    torch.testing.assert_close(seen["agreed"], plain["agreed"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["finished"], plain["finished"][worker], rtol=1e-4, atol=1e-5)
    assert seen["counted"] == plain["counted"]


@pytest.mark.parametrize("workers", [2, 3])  # three go two-shot where the codec is dense
@pytest.mark.parametrize("name", METHODS)
def test_one_copy_crosses_the_line(six: Cluster, name: str, workers: int) -> None:
    plain = simulated(name, workers)
    answers = six.run(on_mesh, 2 * workers, workers, name)
    for rank, seen in enumerate(answers):
        check_equal(seen, plain, rank // 2, exact=name not in SUMMED)
    rounds = 2 * STEPS  # at most, of a row; a share that does not come out even is padded by less than a value
    for worker in range(workers):
        given = sum(answers[2 * worker + inner]["given"] for inner in range(2))
        assert 0 <= given - plain["counted"][0] <= 4 * rounds


@pytest.mark.parametrize("name", ["diloco", "sparseloco"])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 2]], ids=["equal", "unequal"])
def test_separate_runs_with_ddp_inside(six: Cluster, name: str, sizes: list[int]) -> None:
    plain = simulated(name, 2)
    for seen in six.run(at_site, sum(sizes), free_port(), sizes, name, join=False):
        check_equal(seen, plain, seen["worker"], exact=name not in SUMMED)
        assert seen["led"] == (sizes == [1, 2] and seen["worker"] == 1)


def losing_one_share(rank: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
    transport = Counting(tw.Group(mesh["workers"]), lambda order: order.key.round == 2 and rank % 2 == 1)
    fleet, seen = trained(transport, mesh["inside"].get_group(), "sparseloco", rank // 2)
    return seen["values"], fleet.events.counts


def test_a_round_that_one_process_loses_is_lost_for_its_worker(cluster: Cluster) -> None:
    make, optimizer = METHODS["sparseloco"]
    plain = fleet_of(make(), 2, optimizer, lose=lambda row, number: number == 2)
    train(plain, STEPS)
    for rank, (values, counts) in enumerate(cluster.run(losing_one_share, 4)):
        assert counts == plain.events.counts == {"lost": 1}
        torch.testing.assert_close(values, parameters(plain)[rank // 2], rtol=0, atol=0)


def sick_copy(rank: int) -> tuple[Any, ...]:
    """A NaN that only one process of worker 1 has, and weights that differ inside a worker."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
    model = DistributedDataParallel(small_model(), process_group=mesh["inside"].get_group())
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, tw.diloco(2), tw.Group(mesh["workers"]), weight=1 + rank % 2)
    for step in range(6):
        backward(model, step, rank // 2)
        if step == 1 and rank == 3:
            optimizer.state[model.module[0].weight]["exp_avg"].fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
    return parameters(fleet)[0], [event.workers for event in fleet.events if event.kind == "sick"]


def test_health_and_weight_are_decided_once(cluster: Cluster) -> None:
    answers = cluster.run(sick_copy, 4)
    assert [sick for _, sick in answers] == [[], [], [(1,)], [(1,)]]
    for values, _ in answers:
        torch.testing.assert_close(values, answers[0][0], rtol=0, atol=0)
        assert all(bool(value.isfinite().all()) for value in values)


def different_copies(rank: int) -> None:
    """A group given by hand, without DDP to keep the copies equal."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "inside"))
    model = small_model()
    nn.init.constant_(model[0].bias, rank % 2)
    replica = tw.Replica(model, adamw(model.parameters()), inside=mesh["inside"])
    with pytest.raises(ValueError, match="processes of this worker have different"):
        tw.Fleet([replica], tw.diloco(2), tw.Group(mesh["workers"])).begin()


def test_copies_that_differ_are_refused(cluster: Cluster) -> None:
    cluster.run(different_copies, 4)


def ddp_over_all(rank: int) -> None:
    model = DistributedDataParallel(small_model())
    fleet = tw.attach(model, adamw(model.parameters()), tw.diloco(2), tw.Group())
    with pytest.raises(ValueError, match="which are one worker"):
        fleet.begin()


def test_ddp_over_the_workers_is_refused(cluster: Cluster) -> None:
    cluster.run(ddp_over_all, 2)
