"""An optimizer's state in a checkpoint: shards go back to where they were, also where they come out uneven."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cluster import Cluster
from thinwire.replica import local
from thinwire.train import weights


def trained_on(resumed: bool) -> list[list[float]]:
    """Two steps of a model whose five rows lie on two ranks; the optimizer's state may be stored in between."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        if step and resumed:
            state = weights.optimizer_state(optimizer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            weights.load_optimizers([optimizer], [state])
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [local(parameter.detach()).flatten().tolist() for parameter in model.parameters()]


def both(rank: int) -> tuple[list[list[float]], list[list[float]]]:
    return trained_on(resumed=False), trained_on(resumed=True)


@pytest.mark.xdist_group("processes")
def test_uneven_shards_of_moments_come_back(cluster: Cluster) -> None:
    for whole, resumed in cluster.run(both, 2):
        assert whole == resumed
