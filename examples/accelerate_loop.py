"""Accelerate in a loop of your own, on two workers: one `tw.attach` is all.

    python examples/accelerate_loop.py --worker 0      # in one shell
    python examples/accelerate_loop.py --worker 1      # in another

Each worker has an Accelerator of its own (with several GPUs, under a torchrun of its own), and thinwire joins them.
`every` counts optimizer steps, so micro-batches that only accumulate gradients do not count.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import thinwire as tw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", default="127.0.0.1:29540")
    chosen = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    transport = tw.Group.connect(chosen.connect, worker=chosen.worker, workers=chosen.workers)
    fleet = tw.attach(model, optimizer, tw.local_adam(every=10), transport)
    accelerator.register_for_checkpointing(fleet)  # accelerator.save_state and load_state then keep the fleet too

    generator = torch.Generator().manual_seed(chosen.worker)  # every worker has its own data
    for _ in range(160):
        with accelerator.accumulate(model):
            inputs = torch.rand(32, 2, generator=generator) * 4 - 2
            loss = nn.functional.mse_loss(model(inputs), (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    fleet.finish()
    weight = float(net[0].weight.detach().double().sum())
    print(f"worker {chosen.worker}: {fleet.steps} steps, weights {weight:.6f}, {fleet.bytes_sent / 1e3:.0f} kB sent")


if __name__ == "__main__":
    main()
