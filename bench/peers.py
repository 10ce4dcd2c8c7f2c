"""Each peer's round beside ours: time, waiting, memory and bytes. Real processes in network namespaces; needs root.

    sudo python bench/peers.py                                        # 2 workers, 30M parameters, loopback and lines
    sudo python bench/peers.py --workers 4 --lines loopback --matches diloco
    sudo python bench/peers.py --size 124M --lines loopback --rounds 3
    sudo python bench/peers.py --quick                                # a tiny model, to see that it runs

A match is one of our methods and its peers: the same model, data, AdamW and steps, one process with one torch thread
per worker. `loopback` is `lo` in a namespace of its own; a number is a line of so many Mbit/s between namespaces,
shaped both ways by `tc tbf`. On loopback and on lines of 500 Mbit/s or more the contenders of a match take turns,
period by period, and ratios are of neighbours in time. On slower lines, where the processor idles, they run one period
at the same time, each on lines of its own. `round` is what a period takes beyond its steps, the mean of the workers;
`waiting` its share of the period; `sent` what the kernel counted, a worker; `extra` the peak beyond that of the bare
steps. Bytes and memory are in fp32 copies of the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from netns import Network
from overhead import milliseconds, ratio_text
from peer_worker import SIZES, model_of
from results import machine, save, say, spread, table

WORKER = Path(__file__).with_name("peer_worker.py")
MATCHES = {
    "diloco": ["thinwire diloco", "torchft diloco"],
    "streaming": ["thinwire streaming", "torchft streaming", "thinwire streaming E3M0"],
    "local sgd": ["thinwire local_sgd", "accelerate LocalSGD", "torch PostLocalSGD"],
    "ddp": ["thinwire ddp", "torch DDP"],
}
PORT = 29500
BARE = 6  # steps timed without any library
SLOW = 500  # Mbit/s: below, the line is all that counts


class Crew:
    """The workers of one contender, in namespaces of their own."""

    def __init__(self, name: str, number: int, workers: int, loopback: bool, args: argparse.Namespace) -> None:
        self.name, self.workers, self.loopback = name, workers, loopback
        self.steps = 1 if "ddp" in name.lower() else args.every
        self.network = Network(1 if loopback else workers, name=f"peers{number}x").__enter__()
        try:
            self.processes = [self._start(i, args) for i in range(workers)]
        except BaseException:
            self.network.__exit__()
            raise

    def _address(self, worker: int) -> str:
        return "127.0.0.1" if self.loopback else self.network.address(worker)

    def _start(self, worker: int, args: argparse.Namespace) -> subprocess.Popen[str]:
        place = {
            "worker": worker, "workers": self.workers, "host": self._address(0), "own": self._address(worker),
            "port": PORT, "every": args.every,
        }  # fmt: skip
        facts = {"place": place, "contender": self.name, "size": args.size, "pace": args.pace}
        quiet = {"RUST_LOG": "error", "TORCHFT_LOG": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self._device}
        command = [sys.executable, str(WORKER), json.dumps(facts)]
        space = 0 if self.loopback else worker
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return self.network.start(space, command, env=environment, text=True, **pipes)

    @property
    def _device(self) -> str:
        return "lo" if self.loopback else "eth0"

    def tell(self, job: str, steps: int = 0) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([job, steps]) + "\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise RuntimeError(f"a worker of {self.name} ended early; its own message is above")
        return [json.loads(line) for line in lines]

    def sent(self) -> float:
        """Bytes that a worker has sent so far, the mean of the workers, as the kernel counts them."""
        read = ["cat", f"/sys/class/net/{self._device}/statistics/tx_bytes"]
        spaces = [self.network.namespace(i) for i in range(self.network.workers)]
        counts = [subprocess.check_output(["ip", "netns", "exec", space, *read]) for space in spaces]
        return sum(map(int, counts)) / self.workers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.network.__exit__()


# -- measuring ---------------------------------------------------------------------------------------------------------


def prepare(crews: Sequence[Crew]) -> list[dict[str, float]]:
    """The bare steps of each crew by itself, then one period with its library, which opens connections and buffers."""
    found = []
    for crew in crews:  # one that still starts would slow the first one's bare steps
        crew.tell("ready")
        crew.hear()
    for crew in crews:
        crew.tell("bare", BARE)
        heard = crew.hear()
        found.append({key: statistics.mean(each[key] for each in heard) for key in ("step", "peak")})
        crew.tell("join", max(2, crew.steps))
        crew.hear()
    return found


def periods(crews: Sequence[Crew]) -> list[dict[str, float]]:
    """One period of each of these crews, at the same time."""
    before = [crew.sent() for crew in crews]
    for crew in crews:
        crew.tell("take", crew.steps)
    heard = [crew.hear() for crew in crews]
    sent = [crew.sent() - was for crew, was in zip(crews, before, strict=True)]
    return [period_of(each) | {"bytes": moved} for each, moved in zip(heard, sent, strict=True)]


def period_of(heard: list[dict[str, float]]) -> dict[str, float]:
    means = {key: statistics.mean(each[key] for each in heard) for key in ("inside", "cpu")}
    return {"wall": max(each["wall"] for each in heard), "round": means["inside"], "cpu": means["cpu"]}


def taken_on(line: str, crews: Sequence[Crew], rounds: int) -> list[list[dict[str, float]]]:
    """For each crew its periods on this line: in turn where it is fast, once and all together where it is slow."""
    if line != "loopback":
        for crew in crews:
            crew.network.shape(float(line) * 1e6 / 8, float(line) * 1e6 / 8)
    if line != "loopback" and float(line) < SLOW:
        return [[found] for found in periods(crews)]
    turns = [[periods([crew])[0] for crew in crews] for _ in range(rounds)]
    return [list(each) for each in zip(*turns, strict=True)]


def summary(crew: Crew, bare: dict[str, float], taken: list[dict[str, float]], ours: list[dict[str, float]]) -> Any:
    pairs = list(zip(ours, taken, strict=True))
    ratios = {key: spread(our[key] / their[key] for our, their in pairs) for key in ("round", "wall", "cpu")}
    return {
        "contender": crew.name, "steps": crew.steps, "bare_step": bare["step"],
        "round": spread(each["round"] for each in taken),
        "waiting": spread(each["round"] / each["wall"] for each in taken),
        "cpu": spread(each["cpu"] for each in taken),
        "period": spread(each["wall"] for each in taken),
        "bytes": spread(each["bytes"] for each in taken),
        "ours_over_it": None if taken is ours else ratios,
    }  # fmt: skip


def memory(crew: Crew, bare: dict[str, float], copy: int) -> dict[str, float]:
    """What the last worker held at most (it has no store or lighthouse); also: did the rounds really happen?"""
    crew.tell("end")
    heard = crew.hear()
    if heard[0]["equal"] and len({each["norm"] for each in heard}) > 1:
        raise RuntimeError(f"{crew.name}: the workers do not agree after a round: {heard}")
    if heard[0]["rounds"] == 0:
        raise RuntimeError(f"{crew.name} committed no round")
    peak = heard[-1]["peak"]
    return {"peak": peak, "bare_peak": bare["peak"], "extra_copies": (peak - bare["peak"]) / copy}


def fight(match: str, workers: int, lines: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One match on these lines: on loopback, or on shaped ones; the crews are started once for all of them."""
    say(f"{match}, {workers} workers, {args.size}: starting")
    copy = 4 * sum(p.numel() for p in model_of(args.size).parameters())
    crews: list[Crew] = []
    try:
        for number, name in enumerate(MATCHES[match]):
            crews.append(Crew(name, number, workers, lines[0] == "loopback", args))
        bare = prepare(crews)
        found = []
        for line in lines:
            say(f"{match}, {workers} workers, {args.size}: {line}")
            load = os.getloadavg()[0]
            taken = taken_on(line, crews, args.rounds)
            facts = {"match": match, "workers": workers, "size": args.size, "line": line, "load": load}
            found += [facts | summary(c, b, t, taken[0]) for c, b, t in zip(crews, bare, taken, strict=True)]
        held = {crew.name: memory(crew, b, copy) for crew, b in zip(crews, bare, strict=True)}
        return [each | {"memory": held[each["contender"]], "copy": copy} for each in found]
    finally:
        for crew in crews:
            crew.close()


def run(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Match after match, so that what is known can be saved."""
    shaped = [line for line in args.lines if line != "loopback"]
    for workers in args.workers:
        for match in args.matches:
            for lines in (["loopback"] if "loopback" in args.lines else [], shaped):
                if lines:
                    yield fight(match, workers, lines, args)


# -- showing -----------------------------------------------------------------------------------------------------------


def show(results: list[dict[str, Any]]) -> None:
    rows = []
    for each in results:
        over = each["ours_over_it"]
        rows.append((
            each["contender"], each["workers"], each["size"], each["line"],
            milliseconds(each["round"]), ratio_text(over["round"]) if over else "",
            f"{1e3 * each['cpu']['median']:.0f}",
            f"{each['waiting']['median']:.1%}", f"{each['bytes']['median'] / each['copy']:.3f}",
            f"{each['memory']['peak'] / 1e6:.0f}", f"{each['memory']['extra_copies']:.2f}",
        ))  # fmt: skip
    head = (
        "contender",
        "workers",
        "size",
        "line",
        "round ms",
        "ours over it",
        "processor ms",
        "waiting",
        "sent, copies",
    )
    table((*head, "peak MB", "extra copies"), rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--size", choices=list(SIZES), default="30M")
    parser.add_argument("--lines", nargs="+", default=["loopback", "1000", "100", "20"], help="loopback, or Mbit/s")
    parser.add_argument("--matches", nargs="+", choices=list(MATCHES), default=list(MATCHES))
    parser.add_argument("--every", type=int, default=6, help="steps of a period")
    parser.add_argument("--rounds", type=int, default=5, help="periods on loopback and on fast lines")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step spent asleep in the model's blocks")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.size, args.rounds, args.pace = "tiny", 1, 0.0
    return args


def main() -> None:
    args, started = parsed(), machine()
    settings = {"every": args.every, "rounds": args.rounds, "pace": args.pace}
    known = {"accelerate": importlib.metadata.version("accelerate"), "settings": settings}
    results: list[dict[str, Any]] = []
    for found in run(args):
        results += found
        save(args.json, 0, {**known, "matches": results}, started)
    show(results)


if __name__ == "__main__":
    main()
