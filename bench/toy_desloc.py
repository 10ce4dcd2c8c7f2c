"""The toy of DES-LOC: 256 replicas in one process go down a noisy valley; DES-LOC and Local Adam coincide.

    python bench/toy_desloc.py                        # under a minute on one core

f(a, b) = (1 - a)^2 + 100 (b - a^2)^2, Gaussian noise of sigma 1.5 on every gradient. DES-LOC averages parameters and
first moments every 192 steps and second moments every 692; Local Adam averages all three every 192. Both see the same
noise. Beside them: the second moments never meet. The minimum is at (1, 1).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from results import machine, save, say, table
from torch import Tensor, nn

import thinwire as tw

EVERY, SECOND, SIGMA = 192, 692, 1.5
START = (-1.0, 1.5)
BETAS = (0.9, 0.999)  # 692 is the half-life of the second


class Point(nn.Module):
    def __init__(self, place: Tensor) -> None:
        super().__init__()
        self.place = nn.Parameter(place)


class Herd:
    """Replicas whose places and moments are rows of one tensor each, so that one call steps all their optimizers."""

    def __init__(self, method: tw.Method, workers: int, lr: float) -> None:
        self.places = nn.Parameter(torch.tensor(START).repeat(workers, 1))
        self.adam = torch.optim.Adam([self.places], lr=lr, betas=BETAS)
        points = [Point(row) for row in self.places.detach()]
        self.replicas = [tw.Replica(p, torch.optim.Adam(p.parameters(), lr=lr, betas=BETAS)) for p in points]
        self.fleet = tw.Fleet(self.replicas, method, tw.Local())

    def step(self, noise: Tensor) -> None:
        self.places.grad = gradient(self.places.detach()).add_(noise, alpha=SIGMA)
        self.fleet.before_step()
        self.adam.step()
        if self.fleet.steps == 0:
            self._share_moments()
        self.fleet.after_step()

    def _share_moments(self) -> None:
        """Adam has just made its state: each replica's own optimizer holds its row of it."""
        whole = self.adam.state[self.places]
        for i, replica in enumerate(self.replicas):
            rows = {name: whole[name][i] for name in ("exp_avg", "exp_avg_sq")}
            replica.optimizers[0].state[replica.trainable["place"]] = {"step": whole["step"], **rows}

    def mean(self) -> Tensor:
        return self.places.detach().mean(0)


def height(place: Tensor) -> Tensor:
    a, b = place.unbind(-1)
    return (1 - a) ** 2 + 100 * (b - a**2) ** 2


def gradient(place: Tensor) -> Tensor:
    a, b = place.unbind(-1)
    across = b - a**2
    return torch.stack([-2 * (1 - a) - 400 * a * across, 200 * across], dim=-1)


def methods() -> dict[str, tw.Method]:
    return {
        "DES-LOC": tw.desloc(EVERY, moments={"exp_avg": EVERY, "exp_avg_sq": SECOND}),
        "Local Adam": tw.local_adam(EVERY),
        "second moments local": tw.desloc(EVERY, moments={"exp_avg": EVERY}),
    }


def descend(args: argparse.Namespace) -> dict[str, Any]:
    herds = {name: Herd(method, args.workers, args.lr) for name, method in methods().items()}
    noise = torch.Generator().manual_seed(args.seed)
    paths: dict[str, list[list[float]]] = {name: [] for name in herds}
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        kick = torch.randn(args.workers, 2, generator=noise)
        for herd in herds.values():
            herd.step(kick)
        if step % EVERY == 0 or step == args.steps:
            for name, herd in herds.items():
                paths[name].append(herd.mean().tolist())
        if step % (10 * EVERY) == 0:
            say(f"step {step} of {args.steps}, {time.perf_counter() - began:.0f} s")
    return {"seconds": time.perf_counter() - began, **summary(herds, paths)}


def summary(herds: dict[str, Herd], paths: dict[str, list[list[float]]]) -> dict[str, Any]:
    reference = torch.tensor(paths["Local Adam"])
    found = {}
    for name, herd in herds.items():
        path = torch.tensor(paths[name])
        found[name] = {
            "place": herd.mean().tolist(),
            "height": float(height(herd.mean())),
            "most_apart": float((path - reference).norm(dim=1).max()),
            "bytes_sent": herd.fleet.bytes_sent,
            "path": paths[name],
        }
    return {"way": float((reference[-1] - torch.tensor(START)).norm()), "methods": found}


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['seconds']:.0f} s; Local Adam went {found['way']:.2f} from where it began")
    rows = [
        (name, "{:.4f}, {:.4f}".format(*f["place"]), f"{f['height']:.2e}", f"{f['most_apart']:.4f}", f["bytes_sent"])
        for name, f in found["methods"].items()
    ]
    table(("method", "ends at", "height there", "most apart from Local Adam", "bytes"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6144)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args, started = parser.parse_args(), machine()
    torch.set_num_threads(1)
    found = descend(args)
    show(found)
    save(args.out, args.seed, found, started)


if __name__ == "__main__":
    main()
