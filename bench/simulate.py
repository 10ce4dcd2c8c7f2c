"""What hosting costs: one process with M replicas against one model fed the same tokens.

    python bench/simulate.py --workers 2 4 8 16 --out bench/results/simulate_cpu.json
    python bench/simulate.py --device cuda --preset 5M --batch 16 --context 256 --precision bf16 --steps 200

Prints milliseconds a step for both, with and without CUDA graphs where there is a GPU, and the ratios. Each round times
both sides one after the other, and the median round counts: other load on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from results import machine, save, say

import thinwire as tw
from thinwire.train import data
from thinwire.train.config import Config, override
from thinwire.train.graphs import work_for
from thinwire.train.methods import build_method
from thinwire.train.place import Place, device_of
from thinwire.train.work import Team, Work, build_team

ROUNDS = 7


class Side:
    """One of the two things compared: replicas with their work, stepped by a fleet or by their own optimizer."""

    def __init__(self, config: Config, dataset: data.Dataset, graphs: bool, fleet: bool) -> None:
        config.train.graphs = graphs
        self.place = Place(list(range(config.workers)), device_of(config), tw.Local())
        self.team: Team = build_team(config, self.place, dataset)
        self.work: Work = work_for(self.team, config, self.place)
        self.clip, self.steps = config.train.clip, 0
        method = build_method(config.method, self.team.replicas[0].module)
        self.fleet = tw.Fleet(self.team.replicas, method, self.place.transport, clip=self.clip) if fleet else None

    def step(self) -> None:
        self.steps += 1
        self.work.run(self.steps)
        if self.fleet:
            self.fleet.step()
            self.fleet.zero_grad()
            return
        (replica,) = self.team.replicas
        torch.nn.utils.clip_grad_norm_(replica.module.parameters(), self.clip)
        for optimizer in replica.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def milliseconds(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / count


def measure(args: argparse.Namespace, workers: int, graphs: bool) -> dict[str, float]:
    config = _config(args, workers, args.batch)
    data.resolve(config)
    dataset = data.load(config)
    many = Side(config, dataset, graphs, fleet=True)
    config = _config(args, 1, args.batch * workers)
    data.resolve(config)
    one = Side(config, dataset, graphs, fleet=False)
    for side in (many, one):
        side.milliseconds(max(3, args.steps // 10))
    count = max(1, args.steps // ROUNDS)
    rounds = [(many.milliseconds(count), one.milliseconds(count)) for _ in range(ROUNDS)]
    ratio = statistics.median(m / o for m, o in rounds)
    return {
        "hosting_ms": statistics.median(m for m, _ in rounds),
        "one_model_ms": statistics.median(o for _, o in rounds),
        "ratio": ratio,
    }


def _config(args: argparse.Namespace, workers: int, batch: int) -> Config:
    config = Config(workers=workers)
    pairs = {"method.name": args.method, "model.preset": args.preset, "model.context": args.context}
    pairs |= {"train.batch": batch, "train.device": args.device, "train.precision": args.precision}
    for key, value in pairs.items():
        override(config, f"{key}={value}")
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    parser.add_argument("--method", default="desloc")
    parser.add_argument("--preset", default="1M")
    parser.add_argument("--batch", type=int, default=8, help="sequences of one worker")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=42)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    started, results = machine(), {}
    for workers in args.workers:
        say(f"{workers} replicas")
        results[f"{workers} replicas"] = measure(args, workers, graphs=False)
        if args.device.startswith("cuda"):
            results[f"{workers} replicas, CUDA graphs"] = measure(args, workers, graphs=True)
    for name, found in results.items():
        print(f"{name}: {found['hosting_ms']:.2f} ms, one model {found['one_model_ms']:.2f} ms, {found['ratio']:.2f}x")
    save(args.out, 0, results, started)


if __name__ == "__main__":
    main()
