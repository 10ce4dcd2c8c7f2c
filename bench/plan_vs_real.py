"""The planner against real runs: gloo workers on shaped lines train a real model; predicted over measured utilization.

    sudo python bench/plan_vs_real.py [--workers 2] [--rates 10,50,250,1000] [--json out.json]

Each worker is a process in a network namespace of its own (`netns.py`). Utilization is what the workers' steps take
when nothing is exchanged, over the wall time they take with the exchange. The steps are real, but stretched to a fixed
time, as if an accelerator took them. Needs root, and a machine with little else to do.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from netns import Network
from torch import nn

import thinwire as tw
from thinwire.plan.method import MEASURED, NONE, utilization
from thinwire.plan.timeline import Compute, Link
from thinwire.train.methods import build_method
from thinwire.train.models import Llama, Shape

EVERY = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "diloco": {"name": "diloco", "every": EVERY},
    "desloc": {"name": "desloc", "every": EVERY},
    "streaming": {"name": "streaming_diloco", "every": EVERY, "fragments": 2, "codec": "E3M0()"},
    "eager": {"name": "eager_diloco", "every": EVERY, "fragments": 2, "codec": "E3M0()"},
}
STEPS = {"ddp": (2, 6), "desloc": (EVERY, 6 * EVERY)}  # to warm up, and timed
ALONE = 10  # steps that are timed without any exchange, before and after
PACE = 0.3  # seconds of forward and backward; the model itself needs less


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Llama(Shape(4, 192, 4, 512), vocabulary=512, context=64)


# -- one worker ----------------------------------------------------------------------------------------------------


def work(worker: int, workers: int, setting: dict[str, Any], batch: int) -> None:
    """Train beside the others; the parent says when to go on, so that all measure the same thing together."""
    torch.set_num_threads(1)
    tokens = torch.randint(512, (batch, 65), generator=torch.Generator().manual_seed(worker))
    before = timed_alone(tokens)
    handled = timed_handling(tokens, setting)
    model, optimizer = trainee()
    transport = tw.Group.connect("10.77.0.1:29555", worker=worker, workers=workers)
    fleet = tw.attach(model, optimizer, build_method(setting, model), transport)
    warm, steps = STEPS.get(setting["name"], (2 * EVERY, 4 * EVERY))
    take(model, optimizer, tokens, warm)
    rendezvous("timed")
    wall = sum(take(model, optimizer, tokens, steps))
    fleet.drain()
    after = timed_alone(tokens)
    found = {"before": before, "after": after, "handled": handled, "wall": wall, "steps": steps}
    print(json.dumps(found), flush=True)


def trainee() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def timed_alone(tokens: torch.Tensor) -> float:
    """Seconds of a step when nothing is exchanged, with all workers computing at once."""
    model, optimizer = trainee()
    take(model, optimizer, tokens, 2)
    rendezvous("alone")
    seconds = statistics.median(take(model, optimizer, tokens, ALONE))  # one slow step of a busy machine does not count
    rendezvous("done")
    return seconds


def timed_handling(tokens: torch.Tensor, setting: dict[str, Any]) -> float:
    """Seconds of a step with the method's own work (encoding, decoding, outer steps) but nobody to exchange with."""
    model, optimizer = trainee()
    fleet = tw.attach(model, optimizer, build_method(setting, model), tw.Local())
    take(model, optimizer, tokens, 2 * EVERY)
    rendezvous("handling")
    seconds = statistics.mean(take(model, optimizer, tokens, 2 * EVERY))
    rendezvous("done")
    fleet.detach()
    return seconds


def take(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> list[float]:
    """Seconds of so many steps. Each is stretched to PACE: the processors are then free, as beside a GPU."""
    ends = [time.perf_counter()]
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        time.sleep(max(0.0, ends[-1] + PACE - time.perf_counter()))
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]


def rendezvous(name: str) -> None:
    print(name, flush=True)
    sys.stdin.readline()


# -- the parent ----------------------------------------------------------------------------------------------------


def measure(workers: int, rate: float, setting: dict[str, Any], batch: int) -> dict[str, float]:
    """Start the workers on lines of this rate (bytes per second), lead them, and read what they found."""
    own = [sys.executable, __file__, "--setting", json.dumps(setting), "--batch", str(batch), "--workers", str(workers)]
    with Network(workers, up=rate) as network:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [network.start(i, [*own, "--worker", str(i)], **options) for i in range(workers)]
        try:
            found = lead(started)
        finally:
            for process in started:
                process.kill()
                process.wait()
    alone = statistics.mean((each["before"] + each["after"]) / 2 for each in found)
    handled = max(alone, statistics.mean(each["handled"] for each in found))
    wall = max(each["wall"] for each in found) / found[0]["steps"]
    return {"alone": alone, "handled": handled, "step": wall, "measured": alone / wall}


def lead(started: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    """Every worker says where it is; when all have, all go on; the last line is the result."""
    while True:
        lines = [process.stdout.readline() if process.stdout else "" for process in started]
        if not all(lines):
            raise RuntimeError("a worker ended early; its own message is above")
        if lines[0].startswith("{"):
            return [json.loads(line) for line in lines]
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()


def predict(workers: int, rate: float, setting: dict[str, Any], alone: float, handled: float) -> dict[str, float]:
    """The bare link model, and the planner's: what gloo and TCP add, and the time the method itself takes here."""
    model = model_of()
    price = tw.cost(build_method(setting, model), model, workers, torch.optim.AdamW(model.parameters()))
    links = [Link(rate, rate)]
    bare = float(utilization(price, Compute([alone] * workers), links, NONE)[0])
    real = float(utilization(price, Compute([handled] * workers), links, MEASURED)[0]) * alone / handled
    return {"analytic": bare, "predicted": real}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rates", default="10,50,250,1000", help="Mbit/s")
    parser.add_argument("--methods", default=",".join(SETTINGS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return work(options.worker, options.workers, json.loads(options.setting), options.batch)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed then, too
    rows = []
    print(f"{'method':<10} {'Mbit/s':>7} {'alone':>8} {'measured':>9} {'analytic':>9} {'predicted':>9} {'ratio':>6}")
    for name in options.methods.split(","):
        for rate in map(float, options.rates.split(",")):
            rows.append(row(name, rate, options))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def row(name: str, mbits: float, options: argparse.Namespace) -> dict[str, Any]:
    rate = mbits * 1e6 / 8
    found = measure(options.workers, rate, SETTINGS[name], options.batch)
    found |= predict(options.workers, rate, SETTINGS[name], found["alone"], found["handled"])
    ratio = found["predicted"] / found["measured"]
    print(
        f"{name:<10} {mbits:>7g} {1e3 * found['alone']:>6.1f}ms {found['measured']:>9.1%} {found['analytic']:>9.1%} "
        f"{found['predicted']:>9.1%} {ratio:>6.2f}",
        flush=True,
    )
    return {"method": name, "mbits": mbits, "workers": options.workers, "ratio": ratio} | found


if __name__ == "__main__":
    main()
