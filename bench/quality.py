"""Loss at equal tokens: M replicas in one process, every method on the same model, batches and seeds.

    python bench/quality.py --data data/novels --runs bench/runs/overlap.json --out results.json
    python bench/quality.py --data data/novels --runs bench/runs/overlap.json --steps 60 --tokens 2048 --device cpu

A run is {"name", "method" (an expression on `tw` and `fragments(n)`), "workers", and any of "lr", "seed", "optimizer"}.
Every run sees the same tokens in the same order; with M workers each takes its M-th of every batch. Results are written
after each run, so that a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire as tw
from thinwire.train.models import PRESETS, Llama

CONTEXT = 512
WARM_UP = 100


class Corpus:
    """Tokens on the device; a batch is a function of its step."""

    def __init__(self, folder: Path, device: str) -> None:
        self.vocabulary = json.loads((folder / "facts.json").read_text())["vocabulary"]
        read = [np.fromfile(folder / f"{part}.bin", dtype=np.uint16).astype(np.int32) for part in ("train", "held")]
        self.train, self.held = (torch.from_numpy(tokens).to(device) for tokens in read)
        self.device = device

    def batch(self, step: int, rows: int, seed: int) -> Tensor:  # (rows, CONTEXT + 1)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - CONTEXT - 1, (rows,), generator=generator)
        return self._windows(self.train, starts)

    def held_batches(self, rows: int, count: int) -> list[Tensor]:
        starts = torch.linspace(0, len(self.held) - CONTEXT - 2, rows * count).long()
        return [self._windows(self.held, part) for part in starts.split(rows)]

    def _windows(self, tokens: Tensor, starts: Tensor) -> Tensor:
        return tokens[starts.to(self.device)[:, None] + torch.arange(CONTEXT + 1, device=self.device)].long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Gradients:
    """Forward and backward of all replicas; on a GPU one CUDA graph, a stream per replica."""

    def __init__(self, models: list[nn.Module], rows: int, device: str) -> None:
        self.models, self.graph = models, None
        self.inputs = [torch.zeros(rows, CONTEXT + 1, dtype=torch.long, device=device) for _ in models]
        if device == "cuda":
            self._capture()

    def _run(self) -> Tensor:
        main, losses = (torch.cuda.current_stream() if self.inputs[0].is_cuda else None), []
        for i, (model, tokens) in enumerate(zip(self.models, self.inputs, strict=True)):
            if main is None:
                losses.append(self._one(model, tokens))
                continue
            self.streams[i].wait_stream(main)
            with torch.cuda.stream(self.streams[i]):
                losses.append(self._one(model, tokens))
        for stream in self.streams if main else ():
            main.wait_stream(stream)
        return torch.stack(losses)

    def _one(self, model: nn.Module, tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        return loss.detach()

    def _capture(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in self.models]
        for _ in range(3):
            self._run()
        torch.cuda.synchronize()
        for model in self.models:
            model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = self._run()
        self.grads = [(p, p.grad) for model in self.models for p in model.parameters()]

    def step(self, tokens: Tensor) -> Tensor:
        for static, part in zip(self.inputs, tokens.chunk(len(self.inputs)), strict=True):
            static.copy_(part)
        if self.graph is None:
            return self._run()
        for parameter, gradient in self.grads:
            parameter.grad = gradient
            gradient.zero_()
        self.graph.replay()
        return self.losses


def optimizer_of(name: str, model: nn.Module, lr: float, device: str) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    if name == "adopt":
        return tw.ADOPT(model.parameters(), lr=lr)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device == "cuda")


def rate_at(step: int, steps: int, peak: float) -> float:
    """Warm-up, then a cosine to a tenth."""
    warm = min(WARM_UP, steps // 5)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


@torch.no_grad()
def held_loss(fleet: tw.Fleet, batches: list[Tensor]) -> float:
    with fleet.evaluating():
        return float(torch.stack([loss_of(fleet.replicas[0].model, tokens) for tokens in batches]).mean())


@torch.no_grad()
def mean_loss(models: list[nn.Module], batches: list[Tensor]) -> float:
    """Of the plain mean of the workers' parameters, whatever the method says to evaluate."""
    mean = copy.deepcopy(models[0])
    for parts in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
        parts[0].copy_(torch.stack(parts[1:]).mean(0))
    return float(torch.stack([loss_of(mean, tokens) for tokens in batches]).mean())


def train(run: dict[str, Any], corpus: Corpus, args: argparse.Namespace) -> dict[str, Any]:
    device, workers, seed = args.device, run["workers"], run.get("seed", 0)
    models = []
    for _ in range(workers):
        torch.manual_seed(seed)
        models.append(Llama(PRESETS[args.preset], corpus.vocabulary, CONTEXT).to(device))
    peak = run.get("lr", args.lr)
    optimizers = [optimizer_of(run.get("optimizer", "adamw"), model, peak, device) for model in models]
    replicas = [tw.Replica(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    names = {"tw": tw, "fragments": lambda count: tw.by_layer(models[0], count)}
    method = eval(run["method"], names)
    fleet = tw.Fleet(replicas, method, tw.Local(), clip=1.0)
    rows = args.tokens // CONTEXT
    gradients = Gradients(models, rows // workers, device)
    held, curve, began = corpus.held_batches(16, args.held), [], time.monotonic()
    for step in range(args.steps):
        losses = gradients.step(corpus.batch(step, rows, seed))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, args.steps, peak)
        fleet.step()
        fleet.zero_grad()
        if (step + 1) % max(1, args.steps // 10) == 0:
            curve.append({"step": step + 1, "train": float(losses.mean()), "held": held_loss(fleet, held)})
            print(f"\r{run['name']}: step {step + 1}, {curve[-1]}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    before = curve[-1]["held"]
    of_mean = mean_loss(models, held)
    fleet.finish()
    final = held_loss(fleet, held)
    print(f"\r{run['name']}: {before:.4f}, finished {final:.4f}, {seconds:.0f} s".ljust(100), file=sys.stderr)
    return {
        **run, "held": before, "held_of_the_mean": of_mean, "finished": final, "curve": curve,
        "seconds": seconds, "bytes_sent": fleet.bytes_sent,
        "wire_received": fleet.wire_received, "stats": fleet.stats(), "events": fleet.events.counts,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="run number i of n, as i/n: several processes share a list")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=32768, help="per step, over all workers")
    parser.add_argument("--preset", default="12M")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--held", type=int, default=20, help="batches of 16 windows held out for evaluation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    corpus, runs = Corpus(args.data, args.device), json.loads(args.runs.read_text())
    first, every = map(int, args.only.split("/")) if args.only else (0, 1)
    began, results = time.monotonic(), []
    for run in runs[first::every]:
        if time.monotonic() - began > args.seconds:
            break
        results.append(train(run, corpus, args))
        facts = {name: getattr(args, name) for name in ("steps", "tokens", "preset", "lr")} | {
            "torch": torch.__version__
        }
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        args.out.write_text(json.dumps({**facts, "device": device, "command": sys.argv, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
