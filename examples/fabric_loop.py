"""Lightning Fabric on two workers: its loop is your own, so one `tw.attach` is all.

    python examples/fabric_loop.py --worker 0      # in one shell
    python examples/fabric_loop.py --worker 1      # in another

`fabric.setup` wraps the model and the optimizer; thinwire takes what is inside.
"""

import argparse

import torch
from lightning.fabric import Fabric
from torch import nn

import thinwire as tw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", default="127.0.0.1:29530")
    chosen = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    transport = tw.Group.connect(chosen.connect, worker=chosen.worker, workers=chosen.workers)
    fleet = tw.attach(model.module, optimizer.optimizer, tw.diloco(every=16), transport)

    generator = torch.Generator().manual_seed(chosen.worker)  # every worker has its own data
    for _ in range(160):
        inputs = torch.rand(32, 2, generator=generator) * 4 - 2
        loss = nn.functional.mse_loss(model(inputs), (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()
    weight = float(net[0].weight.detach().double().sum())
    print(f"worker {chosen.worker}: weights {weight:.6f}, {fleet.bytes_sent / 1e3:.0f} kB sent")


if __name__ == "__main__":
    main()
