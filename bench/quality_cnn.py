"""Accuracy of a small CNN with BatchNorm at equal images: M replicas in one process, scikit-learn's digits, on a CPU.

python bench/quality_cnn.py --out bench/results/decoupled_cnn.json
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire as tw

EVERY, IMAGES, RATE = 16, 64, 2e-3  # period, images a step over all workers, learning rate
METHODS = {
    "ddp": lambda: tw.ddp(),
    "diloco": lambda: tw.diloco(EVERY),
    "consensus": lambda: tw.decoupled_momentum(EVERY, variant="consensus"),
    "mean": lambda: tw.decoupled_momentum(EVERY, variant="mean"),
    "paper": lambda: tw.decoupled_momentum(EVERY, variant="paper"),
}


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits  # `evaluate` is of use without it

    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held = order[:1400], order[1400:]
    return images[train], labels[train], images[held], labels[held]


def train(method: tw.Method, workers: int, steps: int, seed: int) -> dict[str, Any]:
    images, labels, held, answers = digits()
    base = cnn()
    models = [copy.deepcopy(base) for _ in range(workers)]
    replicas = [tw.Replica(m, torch.optim.AdamW(m.parameters(), lr=RATE, betas=(0.9, 0.95))) for m in models]
    fleet = tw.Fleet(replicas, method, tw.Local())
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for replica in replicas:
            for group in replica.optimizers[0].param_groups:
                group["lr"] = RATE * (1 - step / steps)
        picks = torch.randint(len(labels), (IMAGES,), generator=generator).chunk(workers)
        for model, pick in zip(models, picks, strict=True):
            F.cross_entropy(model(images[pick]), labels[pick]).backward()
        fleet.step()
        fleet.zero_grad()
    return {"bytes_sent": fleet.bytes_sent, **evaluate(fleet, held, answers)}


@torch.no_grad()
def evaluate(fleet: tw.Fleet, held: Tensor, answers: Tensor) -> dict[str, float]:
    """The consensus, and the mean of the workers' parameters beside it."""
    model = fleet.replicas[0].model.eval()
    with fleet.evaluating():
        logits = model(held)
    right = (logits.argmax(1) == answers).float().mean()
    found = {"loss": float(F.cross_entropy(logits, answers)), "accuracy": float(right)}
    for parts in zip(*(replica.model.parameters() for replica in fleet.replicas), strict=True):
        parts[0].copy_(torch.stack(parts).mean(0))
    found["loss_of_the_mean"] = float(F.cross_entropy(model(held), answers))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, began = [], time.monotonic()
    for workers in (2, 4, 8):
        for name, make in METHODS.items():
            for seed in (0, 1):
                found = train(make(), workers, args.steps, seed)
                results.append({"method": name, "workers": workers, "seed": seed, **found})
                print(json.dumps(results[-1]), file=sys.stderr)
    facts = {"steps": args.steps, "every": EVERY, "images": IMAGES, "seconds": time.monotonic() - began}
    facts |= {"torch": torch.__version__, "command": " ".join(sys.argv), "runs": results}
    args.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
