"""Half an hour of misfortune: workers are killed, stopped and cut off, the coordinator dies, one fault every 20 s.

    sudo python bench/chaos.py [--minutes 30] [--method diloco] [--json bench/results/chaos.json]

Four workers, each in a network namespace of its own, and a coordinator in a fifth. Afterwards: how many of the steps
that live workers took were committed, how the loss compares with an undisturbed run at equal committed steps, whether
anybody trained alone without saying so, and what the planner says of this rate of faults. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from netns import Network
from torch import nn

import thinwire as tw
from thinwire.plan import failures as plan
from thinwire.plan.failures import goodput

WORKERS, EVERY, CONTEXT, BATCH = 4, 10, 8, 32
METHODS = {
    "diloco": lambda: tw.diloco(EVERY, outer_momentum=0.6),
    "desloc": lambda: tw.desloc(EVERY),
    "consensus": lambda: tw.decoupled_momentum(EVERY),
    "eager": lambda: tw.eager_diloco(EVERY),
}


# -- what is trained: the next byte of Python's own source text --------------------------------------------------------


def corpus() -> torch.Tensor:
    text = b"".join(sorted(Path(os.__file__).parent.glob("*.py"))[i].read_bytes() for i in range(60))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.GELU(), nn.Linear(64, 256)
    )


def loss_of(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def batch_starts(text: torch.Tensor, slot: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * slot + step)
    return torch.randint(len(text) * 9 // 10, (BATCH,), generator=generator)


def held_loss(model: nn.Module, text: torch.Tensor) -> float:
    first, last = len(text) * 9 // 10, len(text) - CONTEXT - 1
    with torch.no_grad():
        return float(loss_of(model, text, torch.linspace(first, last, 2000).long()))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


# -- one worker --------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    text, model = corpus(), model_of()
    optimizer = optimizer_of(model)
    transport = tw.Elastic(options.coordinator, name=options.name, secret_file=options.secret)
    fleet = tw.attach(model, optimizer, METHODS[options.method](), transport)
    fleet.begin()
    tell(kind="begun", step=fleet.steps, at=time.time())
    noted = len(fleet.events)
    while True:
        begun, committed = time.monotonic(), transport.committed
        optimizer.zero_grad()
        loss_of(model, text, batch_starts(text, transport.slot, fleet.steps)).backward()
        optimizer.step()
        fresh, noted = fleet.events[noted - len(fleet.events) :] if len(fleet.events) > noted else [], len(fleet.events)
        met = transport.committed > committed
        tell(kind="step", step=fleet.steps, at=time.time(), committed=transport.committed, workers=fleet.workers,
             healed=any(event.kind == "healed" for event in fresh), lost=transport.lost,
             alone=any(event.kind == "alone" for event in fresh),
             held=consensus_loss(fleet, text) if met and fleet.steps % (5 * EVERY) == 0 else None)  # fmt: skip
        time.sleep(max(0.0, options.pace - (time.monotonic() - begun)))


def consensus_loss(fleet: tw.Fleet, text: torch.Tensor) -> float:
    with fleet.evaluating():
        return held_loss(fleet.replicas[0].module, text)


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


# -- the harm ----------------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """One process of a worker, from its start to its death, and what it told."""

    place: int
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append(json.loads(text))


class Fleet:
    """All processes of the run, and the faults done to them."""

    def __init__(self, network: Network, options: argparse.Namespace, folder: Path) -> None:
        self.network, self.options, self.folder = network, options, folder
        self.secret, self.lives, self.faults = folder / "secret", list[Life](), list[dict[str, Any]]()
        self.start_coordinator()
        self.live: dict[int, Life] = {}
        for place in range(WORKERS):
            self.live[place] = self.start(place)

    def start_coordinator(self) -> None:
        bind = self.network.address(WORKERS)
        command = [sys.executable, "-m", "thinwire.cli", "coordinator", "--bind", bind, "--secret-file", self.secret]
        path = self.folder / "coordinator.log"
        before = path.read_text().count("join with") if path.exists() else 0
        with path.open("a") as log:
            self.coordinator = self.network.start(WORKERS, list(map(str, command)), stdout=log, stderr=log)
        while path.read_text().count("join with") == before:
            time.sleep(0.2)

    def start(self, place: int) -> Life:
        where = f"{self.network.address(WORKERS)}:29510"
        words = [sys.executable, __file__, "--work", "--coordinator", where, "--secret", str(self.secret)]
        words += ["--name", f"w{place}", "--method", self.options.method, "--pace", str(self.options.pace)]
        with (self.folder / f"w{place}.log").open("a") as log:
            process = self.network.start(place, words, stdout=subprocess.PIPE, stderr=log, text=True)
        life = Life(place, process)
        self.lives.append(life)
        threading.Thread(target=life.read, daemon=True).start()
        return life

    def fault(self, dice: random.Random) -> None:
        kind, place = dice.choice(["kill", "kill", "stop", "cut", "coordinator"]), dice.randrange(WORKERS)
        fault = {"kind": kind, "place": place, "seconds": dice.uniform(5, 30), "at": time.time()}
        self.faults.append(fault)
        print(f"{time.strftime('%H:%M:%S')}  {kind} {place} {fault['seconds']:.0f} s", file=sys.stderr, flush=True)
        threading.Thread(target=HARM[kind], args=(self, fault), daemon=True).start()

    def kill(self, fault: dict[str, Any]) -> None:
        place = fault["place"]
        self.live[place].process.kill()
        self.live[place].process.wait()
        time.sleep(3)
        self.live[place] = self.start(place)

    def stop(self, fault: dict[str, Any]) -> None:
        process = self.live[fault["place"]].process
        process.send_signal(signal.SIGSTOP)
        time.sleep(fault["seconds"])
        process.send_signal(signal.SIGCONT)

    def cut(self, fault: dict[str, Any]) -> None:
        self._link(fault["place"], "down")
        time.sleep(fault["seconds"])
        self._link(fault["place"], "up")

    def _link(self, place: int, way: str) -> None:
        hub = self.network.namespace("hub")
        subprocess.run(["ip", "-n", hub, "link", "set", f"port{place}", way], check=True)

    def end_coordinator(self, fault: dict[str, Any]) -> None:
        self.coordinator.kill()
        self.coordinator.wait()
        time.sleep(2)
        self.start_coordinator()
        fault["seconds"] = time.time() - fault["at"]  # that it was away

    def end(self) -> None:
        for life in self.lives:
            life.process.kill()
        self.coordinator.kill()


HARM = {"kill": Fleet.kill, "stop": Fleet.stop, "cut": Fleet.cut, "coordinator": Fleet.end_coordinator}


def endure(options: argparse.Namespace, folder: Path) -> tuple[list[Life], list[dict[str, Any]]]:
    dice, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    with Network(WORKERS + 1, name="chaos") as network:
        fleet = Fleet(network, options, folder)
        try:
            time.sleep(30)
            while time.monotonic() < until:
                fleet.fault(dice)
                time.sleep(20)
            time.sleep(30)  # the last ones recover
        finally:
            fleet.end()
    return fleet.lives, fleet.faults


# -- what came of it ---------------------------------------------------------------------------------------------------


def account(life: Life) -> tuple[int, list[tuple[int, int]], int]:
    """Steps that it took, (fleet's step, own steps) of each committed round, and rounds made alone."""
    taken = since = committed = alone = 0
    rounds = []
    for line in life.lines:
        if line["kind"] == "begun":
            continue
        taken += 1
        since = 0 if line["healed"] else since + 1
        alone += line["alone"]
        if line["committed"] > committed and not line["healed"]:
            rounds.append((line["step"], since))
            since = 0
        committed = line["committed"]
    return taken, rounds, alone


def curve(lives: list[Life]) -> list[tuple[int, float]]:
    """(worker-steps committed by the whole fleet, held-out loss of what it agreed on)."""
    per_step: dict[int, int] = {}
    for life in lives:
        for step, own in account(life)[1]:
            per_step[step] = per_step.get(step, 0) + own
    total, totals = 0, {}
    for step in sorted(per_step):
        total += per_step[step]
        totals[step] = total
    held: dict[int, list[float]] = {}
    for life in lives:
        for line in life.lines:
            if line["kind"] == "step" and line["held"] is not None and line["step"] in totals:
                held.setdefault(line["step"], []).append(line["held"])
    return [(totals[step], sum(losses) / len(losses)) for step, losses in sorted(held.items())]


def undisturbed(method: str, worker_steps: int) -> list[tuple[int, float]]:
    """The same training, all workers in this process, nothing lost."""
    text, models = corpus(), [model_of() for _ in range(WORKERS)]
    replicas = [tw.Replica(model, optimizer_of(model)) for model in models]
    fleet, points = tw.Fleet(replicas, METHODS[method](), tw.Local()), []
    while fleet.steps * WORKERS < worker_steps:
        for slot, model in enumerate(models):
            loss_of(model, text, batch_starts(text, slot, fleet.steps)).backward()
        fleet.step()
        fleet.zero_grad()
        if fleet.steps % (5 * EVERY) == 0:
            points.append((fleet.steps * WORKERS, consensus_loss(fleet, text)))
    return points


def compare(disturbed: list[tuple[int, float]], calm: list[tuple[int, float]]) -> list[dict[str, float]]:
    """At each point of the disturbed run, the calm loss at equal committed steps."""
    rows = []
    for steps, loss in disturbed:
        later = next((i for i, (at, _) in enumerate(calm) if at >= steps), None)
        if later:
            (a, low), (b, high) = calm[later - 1], calm[later]
            expected = low + (high - low) * (steps - a) / (b - a)
            rows.append({"worker_steps": steps, "loss": loss, "calm": expected, "ratio": loss / expected})
    return rows


def returns(place: int, lives: list[Life]) -> Iterator[tuple[float, str]]:
    """When a worker began, was healed, or had a round count."""
    for life in (life for life in lives if life.place == place):
        committed = 0
        for line in life.lines:
            if line["kind"] == "begun" or line["healed"]:
                yield line["at"], "anew"
            elif line["committed"] > committed:
                yield line["at"], "on"
            committed = line.get("committed", 0)


def recovery_of(fault: dict[str, Any], lives: list[Life]) -> float:
    """Seconds until the worker began a phase again: its successor's first, one after it was healed, or the next."""
    awake = fault["at"] + (0 if fault["kind"] == "kill" else fault["seconds"])
    for at, how in sorted(returns(fault["place"], lives)):
        if at > fault["at"] and how == "anew":
            return float(at - fault["at"])
        if at > awake and fault["kind"] != "kill":
            return float(fault["seconds"])
    return max(line["at"] for life in lives for line in life.lines) - float(fault["at"])  # never


def exchange_of(lives: list[Life], pace: float) -> float:
    """Seconds that a round takes beyond its steps when nothing goes wrong: the median."""
    gaps = []
    for place in range(WORKERS):
        times = sorted(returns(place, lives))
        gaps += [later - at for (at, _), (later, how) in zip(times, times[1:], strict=False) if how == "on"]
    return max(0.0, median(gaps) - EVERY * pace)


def goodputs(options: argparse.Namespace, lives: list[Life], faults: list[dict[str, Any]], committed: int) -> Any:
    """Committed worker-steps over those of a fleet without faults: as measured, and as planned for these faults.

    The planner is told how often something happened and how long whoever was harmed was away, nothing of the others.
    """
    times = [line["at"] for life in lives for line in life.lines]
    seconds, absences = max(times) - min(times), [f["seconds"] for f in faults if f["kind"] == "coordinator"]
    recoveries = {k: [recovery_of(f, lives) for f in faults if f["kind"] == k] for k in ("kill", "stop", "cut")}
    harmed = [recovery for kind in recoveries.values() for recovery in kind]
    told = plan.Faults(
        mtbf=WORKERS * seconds / max(1, len(harmed)) - mean(harmed or [0]),  # between a return and the next death
        recovery=mean(harmed or [0]),
        coordinator_mtbf=seconds / max(1, len(absences)) - mean(absences or [0]),
        absence=mean(absences or [0]),
    )
    fleet = plan.Fleet(WORKERS, EVERY * options.pace, exchange_of(lives, options.pace), EVERY)
    planned, measured = goodput("quorum", fleet, told, rounds=50_000), committed * options.pace / (WORKERS * seconds)
    found = {"measured": measured, "planned": planned, "ratio": planned / measured, "exchange": fleet.exchange}
    return found | {"told": asdict(told), "mean_recovery": {k: mean(r) for k, r in recoveries.items() if r}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--method", default="diloco", choices=METHODS)
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--secret", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="w", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    folder = Path("runs") / f"chaos-{os.getpid()}"
    folder.mkdir(parents=True)
    lives, faults = endure(options, folder)
    found = report(options, lives, faults)
    print(json.dumps({key: value for key, value in found.items() if key != "curve"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def report(options: argparse.Namespace, lives: list[Life], faults: list[dict[str, Any]]) -> dict[str, Any]:
    accounts = [account(life) for life in lives]
    taken = sum(took for took, _, _ in accounts)
    committed = sum(own for _, rounds, _ in accounts for _, own in rounds)
    disturbed = curve(lives)
    rows = compare(disturbed, undisturbed(options.method, disturbed[-1][0]))
    settled = [row["ratio"] for row in rows[len(rows) // 10 :]]
    return {
        "method": options.method,
        "minutes": options.minutes,
        "faults": {kind: sum(f["kind"] == kind for f in faults) for kind in ("kill", "stop", "cut", "coordinator")},
        "processes": len(lives),
        "worker_steps": taken,
        "committed": committed,
        "committed_share": committed / taken,
        "goodput": goodputs(options, lives, faults, committed),
        "steps_of_the_fleet": max(line["step"] for life in lives for line in life.lines),
        "rounds_made_alone_and_said": sum(alone for _, _, alone in accounts),
        "loss_over_calm": {"worst": max(settled), "last": settled[-1]},
        "machine": platform.machine(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
        "curve": rows,
    }


if __name__ == "__main__":
    main()
