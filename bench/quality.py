"""Loss at equal tokens: M replicas in one process, every method on the same model, batches and seeds.

    python bench/quality.py --data data/novels --runs bench/runs/0_rates.json --out bench/results/quality
    python bench/quality.py --data data/novels --runs bench/runs/1_overlap.json --name ddp --lr 1e-3 --out tried

A list is {"defaults": {..}, "runs": [{"name", "method", "workers", ..}]}. `method` is an expression on `tw`,
`fragments(n)` (`tw.by_layer`), `rows(..)` below and `Forecast`; other keys are those of `Run`. Every run sees the same
tokens in the same order; with M workers each takes its M-th of every batch. Each run leaves one file, named after it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from forecast import Forecast
from lm import Corpus, Gradients, build, loss_of, optimizers_of, rate_at
from results import machine, save
from torch import Tensor

import thinwire as tw
from thinwire.methods.common import parameter_rows
from thinwire.train.models import Llama


@dataclass(frozen=True)
class Run:
    """One line of a list; `lr` may be "best of PREFIX": that of the best finished run whose name begins so."""

    name: str
    method: str
    workers: int
    lr: float | str = 1e-3
    seed: int = 0
    optimizer: str = "adamw"
    steps: int = 1536
    tokens: int = 32768  # per step, over all workers
    preset: str = "12M"
    context: int = 512
    decay: float = 0.1  # of the weights of matrices
    start: str | None = None  # another method for the first `start_steps`
    start_steps: int = 0
    double_at: int = 0  # a step after which there are twice the workers
    newcomers: str = "mean"  # what newcomers take the optimizer state from: "mean" of all, or the "first" worker

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "_", self.name.lower()).strip("_") + ".json"


def read_list(path: Path, **overrides: Any) -> list[Run]:
    table = json.loads(path.read_text())
    known = {field.name for field in fields(Run)}
    runs = [{**table["defaults"], **run, **overrides} for run in table["runs"]]
    for run in runs:
        if unknown := set(run) - known:
            raise ValueError(f"{path}: {run['name']} has unknown keys {sorted(unknown)}; known are {sorted(known)}")
    return [Run(**run) for run in runs]


def best_rate(prefix: str, folders: Iterable[Path]) -> float | None:
    """The learning rate of the finished run of lowest loss among those of the first seed whose names begin so."""
    found = [json.loads(path.read_text())["results"] for folder in folders for path in folder.glob("*.json")]
    rated = [(r["finished"], r["lr"]) for r in found if r["name"].startswith(prefix) and not r["seed"]]
    finite = [rate for rate in rated if math.isfinite(rate[0])]
    return min(finite)[1] if finite else None


def rows(
    rule: tw.Rule,
    every: int,
    delay: int = 0,
    codec: tw.Codec | None = None,
    feedback: float | None = None,
    fragments: Any = None,
) -> tw.Method:
    """A table of parameter rows, one per fragment."""
    return tw.table("composed", *parameter_rows(fragments, every, delay, rule, codec, feedback), every=every)


class Trial:
    """A run under way."""

    def __init__(self, run: Run, corpus: Corpus, compiled: bool) -> None:
        assert isinstance(run.lr, float)
        self.run, self.corpus, self.compiled, self.peak = run, corpus, compiled, run.lr
        self.models: list[Llama] = []
        self.optimizers: list[list[torch.optim.Optimizer]] = []
        self._recruit(run.workers)
        self.bytes_before = 0
        self._form(run.start or run.method)

    def _recruit(self, count: int) -> None:
        for _ in range(count):
            self.models.append(build(self.run.preset, self.corpus, self.run.seed, self.compiled))
            self.optimizers.append(optimizers_of(self.run.optimizer, self.models[-1], self.peak, self.run.decay))

    def _method(self, text: str) -> tw.Method:
        names = {
            "tw": tw,
            "Forecast": Forecast,
            "rows": rows,
            "fragments": lambda count: tw.by_layer(self.models[0], count),
        }
        return eval(text, names)

    def _form(self, method: str) -> None:
        replicas = [tw.Replica(model, inner) for model, inner in zip(self.models, self.optimizers, strict=True)]
        self.fleet = tw.Fleet(replicas, self._method(method), tw.Local(), clip=1.0)
        self.rows = self.run.tokens // self.run.context
        self.gradients = Gradients(self.models, self.rows // len(self.models), self.corpus, self.compiled)

    def step(self, number: int) -> Tensor:
        """Step `number` from 0; the losses of the replicas."""
        losses = self.gradients.step(self.corpus.batch(number, self.rows, self.run.seed))
        for optimizer in (optimizer for inner in self.optimizers for optimizer in inner):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(number, self.run.steps, self.peak)
        self.fleet.step()
        self.fleet.zero_grad()
        if self.run.start and number + 1 == self.run.start_steps:
            self.fleet.switch(self._method(self.run.method))
        if number + 1 == self.run.double_at:
            self._double()
        return losses

    def _double(self) -> None:
        """All take the mean of the parameters; newcomers take the optimizer state of the mean, or of one worker."""
        self.fleet.finish()
        self.bytes_before += self.fleet.bytes_sent
        workers = len(self.models)
        self._recruit(workers)
        for model, inner in zip(self.models[workers:], self.optimizers[workers:], strict=True):
            model.load_state_dict(self.models[0].state_dict())
            for i, optimizer in enumerate(inner):
                optimizer.load_state_dict(self._states(i, workers))
        self._form(self.run.method)

    @torch.no_grad()
    def _states(self, which: int, workers: int) -> dict[str, Any]:
        states = [inner[which].state_dict() for inner in self.optimizers[:workers]]
        if self.run.newcomers == "first":
            return states[0]
        mean = {
            p: {k: torch.stack([s["state"][p][k].float() for s in states]).mean(0) for k in states[0]["state"][p]}
            for p in states[0]["state"]
        }
        return {**states[0], "state": mean}

    @torch.no_grad()
    def held(self, batches: list[Tensor]) -> float:
        """Of what the method says to evaluate."""
        with self.fleet.evaluating(), torch.compiler.set_stance("force_eager"):
            return float(torch.stack([loss_of(self.models[0], tokens) for tokens in batches]).mean())

    @torch.no_grad()
    def held_of_the_mean(self, batches: list[Tensor]) -> float:
        """Of the plain mean of the workers' parameters, whatever the method says to evaluate."""
        mean = build(self.run.preset, self.corpus, 0, compiled=False)
        for parts in zip(mean.parameters(), *(model.parameters() for model in self.models), strict=True):
            parts[0].copy_(torch.stack(parts[1:]).mean(0))
        return float(torch.stack([loss_of(mean, tokens) for tokens in batches]).mean())


def train(run: Run, corpus: Corpus, compiled: bool, held_batches: int) -> dict[str, Any]:
    began = time.monotonic()
    trial, held, curve = Trial(run, corpus, compiled), corpus.batches(corpus.held, 16, held_batches), []
    second = corpus.batches(corpus.second, 16, held_batches) if corpus.second is not None else []
    ready = time.monotonic()
    for number in range(run.steps):
        losses = trial.step(number)
        if (number + 1) % max(1, run.steps // 12) == 0:
            curve.append({"step": number + 1, "train": float(losses.mean()), "held": trial.held(held)})
            print(f"{run.name}: {json.dumps(curve[-1])}", file=sys.stderr, flush=True)
    fleet, of_mean = trial.fleet, trial.held_of_the_mean(held)
    sent, wire = trial.bytes_before + fleet.bytes_sent, fleet.wire_received
    fleet.finish()
    return {
        **asdict(run), "held": curve[-1]["held"], "held_of_the_mean": of_mean, "finished": trial.held(held),
        "second_test": trial.held(second) if second else None, "curve": curve,
        "bytes_sent": sent, "wire_received": wire, "stats": fleet.stats(), "events": fleet.events.counts,
        "compiled": compiled, "parameters": sum(p.numel() for p in trial.models[0].parameters()),
        "device": torch.cuda.get_device_name() if corpus.device == "cuda" else "cpu", "torch": torch.__version__,
        "set_up_seconds": ready - began, "seconds": time.monotonic() - ready, "beside": os.environ.get("BESIDE"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--name", help="only this run of the list")
    parser.add_argument("--lr", type=float, help="in place of the list's")
    parser.add_argument("--steps", type=int, help="in place of the list's")
    parser.add_argument("--tokens", type=int, help="in place of the list's")
    parser.add_argument("--preset", help="in place of the list's")
    parser.add_argument("--context", type=int, help="in place of the list's")
    parser.add_argument("--held", type=int, default=32, help="batches of 16 windows held out for evaluation")
    parser.add_argument("--compiled", action="store_true", help="torch.compile the blocks and the loss")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    given = {name: getattr(args, name) for name in ("lr", "steps", "tokens", "preset", "context")}
    runs = read_list(args.runs, **{name: value for name, value in given.items() if value is not None})
    for run in runs if args.name is None else [run for run in runs if run.name == args.name]:
        started = machine()
        results = train(run, Corpus(args.data, args.device, run.context), args.compiled, args.held)
        save(args.out / run.file, run.seed, results, started)


if __name__ == "__main__":
    main()
