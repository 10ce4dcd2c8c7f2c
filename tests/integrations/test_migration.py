"""docs/migration.md: the same training through both libraries gives the same parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cluster import Cluster, free_port
from tests.integrations.environment import environment, forget_accelerate
from tests.integrations.hf_worker import values
from tests.toy import batch, small_model

pytestmark = pytest.mark.xdist_group("integrations")
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
STEPS, PATIENCE = 12, 60


def block(name: str) -> str:
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found, f"{PAGE.name} has no block {name!r}"
    return found.group(1)


def trained(worker: int, code: str, address: str) -> list[Tensor]:
    """Run a block of the page on this worker's batches."""
    torch.manual_seed(0)
    model = small_model()
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "batches": [batch(step, worker) for step in range(STEPS)],
        "loss_of": nn.functional.mse_loss,
        "worker": worker,
        "address": address,
    }
    exec(code, names)
    if "manager" in names:
        names["manager"].shutdown()
    return values(model)


def with_thinwire(worker: int, port: int, name: str) -> list[Tensor]:
    forget_accelerate()
    return trained(worker, block(name), f"127.0.0.1:{port}")


def with_torchft(worker: int, port: int, lighthouse: str) -> list[Tensor]:
    """Each worker is a replica group of one process, with a store of its own."""
    store = dist.TCPStore("127.0.0.1", port + worker, 1, True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + worker), "TORCHFT_LIGHTHOUSE": lighthouse}
    with environment(**place, RANK="0", WORLD_SIZE="1"):
        found = trained(worker, block("torchft"), "")
    del store
    return found


def test_torchft_diloco(cluster: Cluster) -> None:
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    try:
        theirs = cluster.run(with_torchft, 2, free_port(), lighthouse.address(), timeout=PATIENCE, join=False)
    finally:
        lighthouse.shutdown()
    ours = cluster.run(with_thinwire, 2, free_port(), "thinwire for torchft", timeout=PATIENCE, join=False)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)  # twelve steps end with a sync


def with_accelerate(worker: int, port: int) -> list[Tensor]:
    forget_accelerate()
    world = {"RANK": str(worker), "LOCAL_RANK": str(worker), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with environment(**world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        return trained(worker, block("accelerate"), "")


def test_accelerate_local_sgd(cluster: Cluster) -> None:
    pytest.importorskip("accelerate")
    theirs = cluster.run(with_accelerate, 2, free_port(), timeout=PATIENCE, join=False)
    ours = cluster.run(with_thinwire, 2, free_port(), "thinwire for accelerate", timeout=PATIENCE, join=False)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
