"""Islands with a lead: FSDP2 workers of any size, with every codec, equal the unsharded run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.toy import FRAGMENTS, adamw, backward, fleet_of, parameters, sgd, small_model, train

pytestmark = pytest.mark.xdist_group("processes")
STEPS = 7
SIZES = (1, 2, 3)  # processes of each island

METHODS: dict[str, tuple[Callable[[], tw.Method], Callable]] = {
    "ddp": (tw.ddp, adamw),
    "desloc delayed": (lambda: tw.desloc(2, delay=1), adamw),
    "diloco": (lambda: tw.diloco(3), adamw),
    "diloco int8": (lambda: tw.diloco(3, codec=tw.Int8()), adamw),
    "eager e3m0": (lambda: tw.eager_diloco(2, FRAGMENTS, codec=tw.E3M0()), adamw),
    "decoupled": (lambda: tw.decoupled_momentum(3, 4, 4, variant="mean"), adamw),
    "demo": (lambda: tw.demo(4, 4), sgd),
    "sparseloco": (lambda: tw.sparseloco(3, 16, 4), adamw),
    "reset": (lambda: tw.reset_states(3), adamw),
}
SUMMED = {"ddp", "desloc delayed", "diloco", "reset"}  # an all-reduce adds in an order of its own


def island_of(rank: int) -> tuple[int, list[int]]:
    """Of six processes: the number of this one's island, and its ranks."""
    firsts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    island = max(i for i, first in enumerate(firsts) if first <= rank)
    return island, list(range(firsts[island], firsts[island] + SIZES[island]))


def sharded(model: torch.nn.Module, mesh: DeviceMesh | None) -> torch.nn.Module:
    if mesh is not None:
        for part in (model[0], model[2], model[4], model):
            fully_shard(part, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def exact_backward(model: torch.nn.Module, step: int, worker: int) -> None:
    """Gradients of the unsharded model, then cut: adding up those of three ranks would round."""
    twin = small_model()
    for parameter, value in zip(twin.parameters(), values_of(model), strict=True):
        parameter.data = value
    backward(twin, step, worker)
    for parameter, source in zip(model.parameters(), twin.parameters(), strict=True):
        gradient = source.grad
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(source.grad, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def trained(model: torch.nn.Module, transport: tw.Transport, name: str, worker: int) -> tuple[tw.Fleet, dict[str, Any]]:
    make, optimizer_of = METHODS[name]
    optimizer = optimizer_of(model.parameters())
    fleet = tw.attach(model, optimizer, make(), transport)
    for step in range(STEPS):
        exact_backward(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()
    return fleet, {
        "values": values_of(model),
        "agreed": {key: whole(value) for key, value in fleet.consensus().items()},
        "counted": (fleet.bytes_sent, fleet.wire_sent, fleet.wire_received, fleet.steps, fleet.worker, fleet.workers),
        "events": fleet.events.counts,
    }


def in_one_world(rank: int, name: str) -> dict[str, Any]:
    """Six processes of one torchrun: the leads' group is the line."""
    worker, _ = island_of(rank)
    leads = dist.new_group([0, 1, 3])
    groups = [dist.new_group(each) for each in ([0], [1, 2], [3, 4, 5])]
    mesh = DeviceMesh.from_group(groups[worker], "cpu") if worker else None
    fleet, seen = trained(sharded(small_model(), mesh), tw.Group(leads), name, worker)
    fleet.finish()
    return seen | {"finished": values_of(fleet.replicas[0].module)}


def at_sites(rank: int, port: int, name: str) -> dict[str, Any]:
    """Three runs of their own, of one, two and three processes; every process calls the same line."""
    worker, ranks = island_of(rank)
    inner, size = rank - ranks[0], len(ranks)
    store = dist.TCPStore("127.0.0.1", port + worker, size, inner == 0)
    dist.init_process_group("gloo", store=store, rank=inner, world_size=size)
    transport = tw.Group.connect(f"127.0.0.1:{port + 3}", worker=worker, workers=3, timeout=30)
    fleet, seen = trained(sharded(small_model(), init_device_mesh("cpu", (size,))), transport, name, worker)
    fleet.finish()
    return seen | {"finished": values_of(fleet.replicas[0].module)}


def simulated(name: str, workers: int) -> dict[str, Any]:
    make, optimizer = METHODS[name]
    fleet = fleet_of(make(), workers, optimizer)
    train(fleet, STEPS)
    values, agreed, sent = parameters(fleet), fleet.consensus(), fleet.bytes_sent
    wire = fleet.wire_sent, fleet.wire_received
    fleet.finish()
    return {"values": values, "agreed": agreed, "counted": (sent, *wire), "finished": parameters(fleet)}


def check_equal(answers: list[dict[str, Any]], name: str, exact: bool) -> None:
    plain = simulated(name, len(SIZES))
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for rank, seen in enumerate(answers):
        worker = island_of(rank)[0]
        torch.testing.assert_close(seen["values"], plain["values"][worker], **tolerance)
        torch.testing.assert_close(seen["agreed"], plain["agreed"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen["finished"], plain["finished"][worker], rtol=1e-4, atol=1e-5)
        assert seen["counted"] == (*plain["counted"], STEPS, worker, len(SIZES)) and seen["events"] == {}


@pytest.mark.parametrize("name", METHODS)
def test_islands_of_one_two_and_three_equal_the_unsharded_run(six: Cluster, name: str) -> None:
    check_equal(six.run(in_one_world, 6, name), name, exact=name not in SUMMED)


@pytest.mark.parametrize("name", ["diloco", "sparseloco"])
def test_sites_of_one_two_and_three_equal_the_unsharded_run(six: Cluster, name: str) -> None:
    check_equal(six.run(at_sites, 6, free_port(), name, join=False), name, exact=name not in SUMMED)


# -- equal islands, 2 x 2 ----------------------------------------------------------------------------------------------


def recorded(transport: tw.Transport) -> list[str]:
    """A hash of every message that goes out by this transport from now on."""
    seen: list[str] = []
    exchange = transport.exchange

    def recording(order: Any) -> Any:
        assert order.kind == "gather"
        seen.append(hashlib.sha256(b"".join(bytes(p.numpy()) for p in order.contributions)).hexdigest())
        return exchange(order)

    transport.exchange = recording  # type: ignore[method-assign]
    return seen


def messages(rank: int, shards: int, name: str) -> tuple[list[str], int]:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("workers", "shards"))
    transport = tw.Group(mesh["workers"])
    seen = recorded(transport)
    fleet, _ = trained(sharded(small_model(), mesh["shards"]), transport, name, rank // shards)
    return seen, fleet.bytes_sent


@pytest.mark.parametrize("name", ["sparseloco", "decoupled", "demo"])
def test_top_k_and_dct_messages_are_the_same_bytes_at_any_shard_count(six: Cluster, name: str) -> None:
    plain = six.run(messages, 2, 1, name)
    assert len(plain[0][0]) >= 2 and plain[0][0] != plain[1][0]
    for shards in (2, 3):
        answers = six.run(messages, 2 * shards, shards, name)
        for rank, (seen, sent) in enumerate(answers):
            leads = rank % shards == 0
            assert seen == (plain[rank // shards][0] if leads else []) and sent == plain[0][1]
