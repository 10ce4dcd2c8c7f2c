"""Workers made of several processes: FSDP2 shards on a 2 x 2 mesh, and separate runs joined over one line."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.toy import adamw, backward, fleet_of, parameters, small_model, train

pytestmark = pytest.mark.xdist_group("processes")
STEPS = 6


def method_of(name: str) -> tw.Method:
    return {
        "desloc": lambda: tw.desloc(2, delay=1),
        "diloco": lambda: tw.diloco(3),
        "ddp": tw.ddp,
        "eager": lambda: tw.eager_diloco(2, codec=tw.BFloat16()),
    }[name]()


def sharded(mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small_model()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh)
    return model, adamw(model.parameters())


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def on_mesh(rank: int, name: str) -> tuple[list, int, dict[str, int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model, optimizer = sharded(mesh["shards"])
    fleet = tw.attach(model, optimizer, method_of(name), tw.Group(mesh["workers"]))
    for step in range(STEPS):
        backward(model, step, rank // 2)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), fleet.bytes_sent, fleet.events.counts


@pytest.mark.parametrize("name", ["desloc", "diloco", "ddp", "eager"])
def test_a_mesh_of_shards_equals_the_unsharded_run(cluster: Cluster, name: str) -> None:
    plain = fleet_of(method_of(name), 2)
    train(plain, STEPS)
    for rank, (values, sent, counts) in enumerate(cluster.run(on_mesh, 4, name)):
        torch.testing.assert_close(values, parameters(plain)[rank // 2], rtol=1e-4, atol=1e-5)
        assert sent == plain.bytes_sent and counts == {}


def sick_shard(rank: int) -> tuple[list, list]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model, optimizer = sharded(mesh["shards"])
    fleet = tw.attach(model, optimizer, tw.diloco(2), tw.Group(mesh["workers"]))
    for step in range(4):
        backward(model, step, rank // 2)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and rank == 3:  # one shard of worker 1
            model[0].weight._local_tensor[0, 0] = float("nan")
    return whole(model), [event.workers for event in fleet.events if event.kind == "sick"]


def test_a_nan_in_one_shard_leaves_the_whole_worker_out(cluster: Cluster) -> None:
    answers = cluster.run(sick_shard, 4)
    assert [sick for _, sick in answers] == [[], [], [(1,)], [(1,)]]
    for values, _ in answers:
        torch.testing.assert_close(values, answers[0][0])
        assert all(bool(value.isfinite().all()) for value in values)


def at_site(rank: int, port: int, name: str) -> list:
    """Processes 0 and 1 are one site, 2 and 3 another: each has a default group of its own, as under its torchrun."""
    site, inner = divmod(rank, 2)
    store = dist.TCPStore("127.0.0.1", port + site, 2, inner == 0)
    dist.init_process_group("gloo", store=store, rank=inner, world_size=2)
    transport = tw.Group.connect(f"127.0.0.1:{port + 2}", worker=site, workers=2, timeout=30)
    model, optimizer = sharded(init_device_mesh("cpu", (2,)))
    fleet = tw.attach(model, optimizer, method_of(name), transport)
    for step in range(STEPS):
        backward(model, step, site)
        optimizer.step()
        optimizer.zero_grad()
    assert (fleet.worker, fleet.workers) == (site, 2)
    return whole(model)


@pytest.mark.parametrize("name", ["desloc", "diloco"])
def test_two_separate_runs_equal_one_world(cluster: Cluster, name: str) -> None:
    together = [values for values, _, _ in cluster.run(on_mesh, 4, name)]
    apart = cluster.run(at_site, 4, free_port(), name, join=False)
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def checkpointed(rank: int, folder: str) -> tuple[list, list]:
    import torch.distributed.checkpoint as dcp

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, tw.Fleet]:
        model = small_model()
        optimizer = adamw(model.parameters())
        return model, optimizer, tw.attach(model, optimizer, tw.eager_diloco(3, codec=tw.E3M0()), tw.Group())

    def go_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, fleet = build()
    go_on(model, optimizer, 0, 7)
    local = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(local, os.path.join(folder, f"local{rank}.pt"))
    dcp.save({"fleet": fleet.state_dict()}, checkpoint_id=os.path.join(folder, "fleet"))
    go_on(model, optimizer, 7, 12)
    again, other, restored = build()
    loaded = torch.load(os.path.join(folder, f"local{rank}.pt"), weights_only=True)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    template = {"fleet": restored.state_dict()}
    dcp.load(template, checkpoint_id=os.path.join(folder, "fleet"))
    restored.load_state_dict(template["fleet"])
    assert restored.steps == 7
    go_on(again, other, 7, 12)
    return parameters(fleet), parameters(restored)


def test_distributed_checkpoints_keep_each_workers_state(cluster: Cluster, tmp_path: Any) -> None:
    for straight, resumed in cluster.run(checkpointed, 2, str(tmp_path)):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
