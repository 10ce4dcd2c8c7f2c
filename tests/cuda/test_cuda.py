"""On a GPU: staging through pinned memory, offload, NCCL, and the same numbers as on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.toy import FRAGMENTS, adamw, batch, sgd, small_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.xdist_group("processes"),
]
METHODS = {
    "desloc": lambda: tw.desloc(2, delay=1),
    "diloco": lambda: tw.diloco(3),
    "eager e3m0": lambda: tw.eager_diloco(3, FRAGMENTS, codec=tw.E3M0()),
    "decoupled": lambda: tw.decoupled_momentum(3),
    "sparseloco": lambda: tw.sparseloco(3),
    "demo": lambda: tw.demo(),
}


def run(
    name: str, device: str, transport: tw.Transport, workers: list[int], offload: bool = False
) -> list[list[torch.Tensor]]:
    make = sgd if name == "demo" else adamw
    models = [copy.deepcopy(small_model()).to(device) for _ in workers]
    replicas = [tw.Replica(model, make(model.parameters())) for model in models]
    fleet = tw.Fleet(replicas, METHODS[name](), transport, offload=offload)
    for step in range(8):
        for worker, model in zip(workers, models, strict=True):
            inputs, targets = (t.to(device) for t in batch(step, worker))
            (model(inputs) - targets).square().mean().backward()
        fleet.step()
        fleet.zero_grad()
    fleet.finish()
    return [[p.detach().cpu() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_trains_as_a_cpu_does(name: str) -> None:
    on_gpu, on_cpu = (run(name, device, tw.Local(), [0, 1, 2]) for device in ("cuda", "cpu"))
    tolerance = 2e-2 if name in ("decoupled", "demo", "sparseloco") else 1e-4  # a near tie may fall either way
    torch.testing.assert_close(on_gpu, on_cpu, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_offload_changes_no_bit(name: str) -> None:
    plain, offloaded = (run(name, "cuda", tw.Local(), [0, 1], offload=o) for o in (False, True))
    torch.testing.assert_close(offloaded, plain, rtol=0, atol=0)


def test_a_model_that_is_moved_later_is_refused() -> None:
    model = small_model()
    fleet = tw.Fleet([tw.Replica(model, adamw(model.parameters()))], tw.diloco(1), tw.Local())
    model.to("cuda")
    inputs, targets = (t.to("cuda") for t in batch(0, 0))
    (model(inputs) - targets).square().mean().backward()
    with pytest.raises(ValueError, match="was moved from cpu to cuda:0 after the fleet was made"):
        fleet.step()


def over_gloo(rank: int, name: str) -> list[list[torch.Tensor]]:
    return run(name, "cuda", tw.Group(), [rank])


@pytest.mark.parametrize("name", METHODS)
def test_tensors_of_a_gpu_travel_over_gloo(cluster: Cluster, name: str) -> None:
    simulated = run(name, "cuda", tw.Local(), [0, 1])
    real = [values for answer in cluster.run(over_gloo, 2, name) for values in answer]
    torch.testing.assert_close(real, simulated, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_nccl_alone(name: str) -> None:
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        real = run(name, "cuda", tw.Group(), [0])
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(real, run(name, "cuda", tw.Local(), [0]), rtol=1e-5, atol=1e-6)
