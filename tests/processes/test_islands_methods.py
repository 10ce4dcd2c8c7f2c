"""Every method of the common table on a 2 x 2 mesh: FSDP2 inside a worker, thinwire across."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.cluster import Cluster
from tests.laws.entries import ENTRIES, backward, fleet_of, train, weights_of

pytestmark = pytest.mark.xdist_group("processes")
STEPS = 7


class Shardable(nn.Module):
    """The common suite's odd model, as FSDP2 takes it: without a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 19)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.empty = nn.Parameter(torch.zeros(1, 4))  # one shard of it has no value
        self.unused = nn.Parameter(torch.linspace(-1, 1, 3))
        self.head = nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)) * self.gain) + self.empty.sum()


def shardable() -> nn.Module:
    torch.manual_seed(3)
    return Shardable()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def on_mesh(rank: int, names: list[str]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    return {name: run(mesh, rank // 2, name) for name in names}


def run(mesh: Any, worker: int, name: str) -> dict[str, Any]:
    entry = ENTRIES[name]
    model = shardable()
    for part in (model.inner, model.head, model):
        fully_shard(part, mesh=mesh["shards"])
    optimizer = entry.optimizer(model.parameters())
    fleet = tw.attach(model, optimizer, entry.method, tw.Group(mesh["workers"]))
    for step in range(STEPS):
        backward(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()
    values = [whole(parameter) for parameter in model.parameters()]
    agreed = {key: whole(value) for key, value in fleet.consensus().items()}
    fleet.finish()
    return {
        "values": values, "agreed": agreed, "finished": [whole(parameter) for parameter in model.parameters()],
        "sent": fleet.bytes_sent, "priced": tw.cost(entry.method, model, 2, optimizer).bytes(STEPS),
        "events": fleet.events.counts,
    }  # fmt: skip


@pytest.mark.parametrize("first", range(0, len(ENTRIES), 6))
def test_every_method_equals_the_unsharded_run(cluster: Cluster, first: int) -> None:
    names = list(ENTRIES)[first : first + 6]
    answers = cluster.run(on_mesh, 4, names, timeout=60)
    for name in names:
        plain = train(fleet_of(ENTRIES[name].method, 2, ENTRIES[name].optimizer, shardable()), STEPS)
        values, agreed, sent = weights_of(plain), plain.consensus(), plain.bytes_sent
        plain.finish()
        for rank, seen in enumerate(answer[name] for answer in answers):
            torch.testing.assert_close(seen["values"], values[rank // 2], rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(seen["agreed"], agreed, rtol=1e-4, atol=1e-5, msg=name)
            torch.testing.assert_close(seen["finished"], weights_of(plain)[rank // 2], rtol=1e-4, atol=1e-5, msg=name)
            assert (seen["sent"], seen["priced"], seen["events"]) == (sent, sent, {}), name
