"""Two workers under one torchrun: a plain training loop, and one line more.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_loop.py

Each worker trains a small byte-level language model on its own half of a text. With DES-LOC the parameters meet every
16 steps and the optimizer's moments less often; between two rounds nothing crosses the line.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

STEPS, BATCH, CONTEXT = 96, 16, 64


class ByteModel(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recur(self.embed(tokens))[0])


def text_of(worker: int, workers: int) -> torch.Tensor:
    """This worker's share of a text that every machine has: the source of Python's argparse."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    return text.chunk(workers)[worker]


def batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    rows = torch.stack([text[at : at + CONTEXT + 1] for at in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    model = ByteModel()  # the workers may start from different values: worker 0's are sent to all
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    fleet = tw.attach(model, optimizer, tw.desloc(every=16))

    text = text_of(fleet.worker, fleet.workers)
    generator = torch.Generator().manual_seed(fleet.worker)
    held_out = batch(text_of(0, 1), torch.Generator().manual_seed(99))
    for step in range(1, STEPS + 1):
        loss_of(model, batch(text, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 32 == 0:
            with torch.no_grad(), fleet.evaluating():  # the consensus, the same on both workers
                loss = float(loss_of(model, held_out))
            if fleet.worker == 0:
                print(f"step {step}: loss {loss:.3f}, {fleet.bytes_sent / 1e6:.1f} MB sent")
    fleet.finish()  # the mean of both, in both models

    if fleet.worker == 0:
        ddp = tw.cost(tw.ddp(), model, workers=2).bytes(STEPS)
        print(f"DDP would have sent {ddp / 1e6:.1f} MB: {ddp / fleet.bytes_sent:.1f} times as much")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
