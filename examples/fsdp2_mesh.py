"""FSDP2 inside a worker, thinwire between workers: two workers of two shards each, on one 2-D device mesh.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_mesh.py

FSDP2 shards the model over the fast dimension of the mesh and gathers it at every step; thinwire gets the slow one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw


def sharded_model(shards: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=shards)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model = sharded_model(mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fleet = tw.attach(model, optimizer, tw.desloc(every=10), tw.Group(mesh["workers"]))

    generator = torch.Generator().manual_seed(dist.get_rank())  # every process has its own data
    for _ in range(60):
        inputs = torch.rand(32, 2, generator=generator) * 4 - 2
        loss = nn.functional.mse_loss(model(inputs), (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()

    weight = float(sum(p.detach().double().sum().full_tensor() for p in model.parameters()))
    print(f"worker {fleet.worker}, shard {mesh['shards'].get_local_rank()}: loss {loss:.4f}, weights {weight:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
