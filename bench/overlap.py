"""Does the overlap hide the link? Real workers train a real model over shaped lines. Needs root.

    sudo python bench/overlap.py                              # 2 and 4 workers, four rates: about half an hour
    sudo python bench/overlap.py --workers 2 --rates 100 --methods eager ddp
    sudo python bench/overlap.py --pace 0                     # steps as fast as they come, on an otherwise idle machine

Each worker is a process with one torch thread in a network namespace of its own, joined to the others by veth pairs and
shaped by `tc tbf`. Utilization is the time of a step with the link idle (all workers computing at once, right before
and right after) over the time of a step with the exchange. `inside` is the share of wall time not spent inside
thinwire's hooks: other load on the machine touches it less. With `--pace` every step lasts at least so long, the rest
of it asleep, as if the model ran on an accelerator and left the processor to the network: workers that share their
cores would else measure each other. `planned` is what thinwire's own timeline says of a step of that length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from netns import Network
from results import machine, save, say, table
from torch import Tensor, nn

import thinwire as tw
from thinwire.plan.method import utilization
from thinwire.plan.timeline import Compute, Link
from thinwire.train.models import Llama, Shape

EVERY = 10
VOCABULARY, CONTEXT = 512, 64
SPARE = 1.5  # a link with this much more than a method's average rate should be hidden
GOAL = 0.97
FRAMING = 1.06  # bytes of the line per byte of a message: headers of TCP and IP, acknowledgements
ALONE = 6  # steps timed with the link idle, before and after
PATIENCE = 25.0  # seconds of line time that a measurement may take at the lowest rates


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Llama(Shape(4, 192, 4, 512), VOCABULARY, CONTEXT)  # 1.9M parameters


def methods(model: nn.Module) -> dict[str, tw.Method]:
    fragments = tw.by_layer(model, 2)
    return {
        "ddp": tw.ddp(),
        "diloco": tw.diloco(EVERY),
        "streaming": tw.streaming_diloco(EVERY, fragments, delay=5),
        "eager": tw.eager_diloco(EVERY),
        "eager streaming": tw.eager_diloco(EVERY, fragments, codec=tw.E3M0()),
        "carry": tw.carry_diloco(EVERY),
        "desloc overlapped": tw.desloc(EVERY, delay=EVERY),
    }


# -- one worker --------------------------------------------------------------------------------------------------------


class Trainee:
    """A model at work; `seconds` of its steps, those inside the hooks apart."""

    def __init__(self, worker: int, batch: int, pace: float) -> None:
        generator = torch.Generator().manual_seed(worker)
        self.tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1), generator=generator)
        self.pace = pace
        self.model = model_of()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def loss(self) -> Tensor:
        logits = self.model(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def take(self, steps: int, fleet: tw.Fleet | None = None) -> dict[str, float]:
        hooks, began, busy = 0.0, time.perf_counter(), time.process_time() - time.thread_time()
        for _ in range(steps):
            hooks += self.step(fleet)
        wall = time.perf_counter() - began
        others = time.process_time() - time.thread_time() - busy  # processor time of gloo's threads
        return {"wall": wall / steps, "hooks": hooks / steps, "threads": others / steps}

    def step(self, fleet: tw.Fleet | None) -> float:
        due = time.perf_counter() + self.pace
        self.loss().backward()
        hooks = timed(fleet.before_step) if fleet else 0.0
        self.optimizer.step()
        time.sleep(max(0.0, due + hooks - time.perf_counter()))
        hooks += timed(fleet.after_step) if fleet else 0.0
        self.optimizer.zero_grad()
        return hooks


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def serve(args: argparse.Namespace) -> None:
    """Do the jobs that come in, one a line; the parent says when to go on, so that all measure together."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        trainee = Trainee(args.worker, args.batch, args.pace)
        trainee.take(2)
        rendezvous("alone")
        before = trainee.take(ALONE)
        transport = tw.Group.connect(f"10.77.0.1:{job['port']}", args.worker, job["workers"], timeout=600)
        replica = tw.Replica(trainee.model, trainee.optimizer)
        fleet = tw.Fleet([replica], methods(trainee.model)[job["method"]], transport)
        trainee.take(job["warm"], fleet)
        rendezvous("timed")
        sent = fleet.wire_sent
        found = trainee.take(job["steps"], fleet)
        sent = fleet.wire_sent - sent
        rendezvous("timed end")
        fleet.drain()
        rendezvous("alone again")
        after = trainee.take(ALONE)
        alone = (before["wall"] + after["wall"]) / 2
        print(json.dumps({**found, "alone": alone, "sent": sent, "steps": job["steps"]}), flush=True)


def rendezvous(name: str) -> None:
    print(name, flush=True)
    sys.stdin.readline()


# -- the parent --------------------------------------------------------------------------------------------------------


class Crew:
    """The workers, kept for all measurements: starting them takes longer than one."""

    def __init__(self, network: Network, args: argparse.Namespace) -> None:
        own = [sys.executable, __file__, "--batch", str(args.batch), "--pace", str(args.pace), "--worker"]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        options["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [network.start(i, [*own, str(i)], **options) for i in range(network.workers)]
        self.port = 29700

    def do(self, job: dict[str, Any]) -> list[dict[str, float]]:
        self.port += 1
        self._tell(json.dumps({**job, "workers": len(self.processes), "port": self.port}))
        while True:
            lines = [process.stdout.readline() for process in self.processes if process.stdout]
            if not all(lines):
                raise RuntimeError("a worker ended early; its own message is above")
            if lines[0].startswith("{"):
                return [json.loads(line) for line in lines]
            self._tell("go")

    def _tell(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def length(name: str, line_seconds: float) -> tuple[int, int]:
    """Steps to warm up and to time: whole periods, fewer where the line is slow (`line_seconds` of it a step)."""
    if name == "ddp":
        return 1, max(2, min(EVERY, int(PATIENCE / max(line_seconds, 1e-3))))
    period = 6 * EVERY if "desloc" in name else EVERY  # the rarest row of DES-LOC
    periods = max(1, min(3 if period == EVERY else 1, int(PATIENCE / max(line_seconds * period, 1e-3))))
    return (EVERY + 1 if "streaming" in name else EVERY), period * periods


def measure(crew: Crew, name: str, mbits: float) -> dict[str, Any]:
    rate, workers, model = mbits * 1e6 / 8, len(crew.processes), model_of()
    price = tw.cost(methods(model)[name], model, workers, torch.optim.AdamW(model.parameters()))
    horizon = 6 * EVERY * 10
    a_step = price.wire(horizon)[0] / horizon * FRAMING  # bytes of the line, in the long run
    warm, steps = length(name, a_step / rate)
    say(f"{workers} workers, {mbits:g} Mbit/s, {name}: {steps} steps")
    found = crew.do({"method": name, "warm": warm, "steps": steps})
    alone = statistics.mean(each["alone"] for each in found)
    wall = max(each["wall"] for each in found)
    planned = utilization(price, Compute([alone] * workers), [Link(rate, rate)])
    return {
        "workers": workers, "mbits": mbits, "method": name, "steps": steps, "alone": alone, "wall": wall,
        "utilization": alone / wall,
        "inside": 1 - statistics.mean(each["hooks"] / each["wall"] for each in found),
        "planned": float(planned[0]), "threads": statistics.mean(each["threads"] for each in found),
        "spare": rate / (a_step / alone),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for workers in args.workers:
        with Network(workers, name="overlap") as network:
            crew = Crew(network, args)
            try:
                for mbits in args.rates:
                    network.shape(mbits * 1e6 / 8, mbits * 1e6 / 8)
                    results += [measure(crew, name, mbits) for name in args.methods]
            finally:
                crew.close()
    return results


def show(results: list[dict[str, Any]]) -> None:
    print(f"\n* the line carries {SPARE}x the method's average rate or more; eager should then reach {GOAL:.0%}")
    rows = []
    for found in results:
        mark = "*" if found["spare"] >= SPARE else ""
        rows.append((
            found["method"], found["workers"], f"{found['mbits']:g}", f"{found['spare']:.2f}{mark}",
            f"{1e3 * found['alone']:.0f}", f"{1e3 * found['wall']:.0f}", f"{found['utilization']:.1%}",
            f"{found['inside']:.1%}", f"{found['planned']:.1%}", f"{1e3 * found['threads']:.1f}",
            f"{found['load']:.1f}",
        ))  # fmt: skip
    head = ("method", "workers", "Mbit/s", "line / need", "alone ms", "step ms", "utilization", "inside", "planned")
    table((*head, "gloo cpu ms", "load"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[10, 60, 200, 1000], help="Mbit/s")
    parser.add_argument("--methods", nargs="+", default=list(methods(model_of())), choices=list(methods(model_of())))
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--pace", type=float, default=0.25, help="seconds that a step lasts at least, 0: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args, started = parser.parse_args(), machine()
    if args.worker is not None:
        return serve(args)
    results = run(args)
    show(results)
    save(args.out, args.seed, results, started)


if __name__ == "__main__":
    main()
