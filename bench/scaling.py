"""How a round grows: with the number of processes, and with tensors and parameters. The first part needs root.

    sudo python bench/scaling.py                               # both parts, about three minutes on two idle cores
    python bench/scaling.py --parts tensors --parameters 1000000
    python bench/scaling.py --parts tensors --device cuda --parameters 1000000000 --json bench/results/scaling_cuda.json
    sudo python bench/scaling.py --quick                       # tiny, to see that it runs

Processes: a DiLoCo round of a small model on 2, 4, 8 and 16 gloo processes, one torch thread each, on `lo` in a network
namespace, beside one raw all-reduce of the same bytes, in turn; with more processes than cores the time is that of the
cores, so processor time stands beside it. Bytes are the kernel's, a process and round, and the engine's own count.

Tensors: the engine with two replicas in one process (`tw.Local`) against a loop over the tensors that does the same
arithmetic: the drift of each replica, the mean, and a Nesterov step and a write for each replica. In turn, one thread,
in processor time, which other load hardly touches. On a GPU in wall time, and again with anchors and velocities in
pinned memory on the host (`offload`), where the way between the two is the floor.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netns import Network
from overhead import LR, MOMENTUM, Pile, milliseconds, ratio_text, timed
from results import machine, save, say, spread, table
from torch import Tensor

import thinwire as tw

PORT = 29500
WARM = 2
LARGE = 50_000_000


@torch.no_grad()
def perturb(*models: Pile) -> None:
    for model in models:
        torch._foreach_mul_(list(model.parameters()), 0.999)


# -- processes ---------------------------------------------------------------------------------------------------------


class Member:
    """One process of a scaling run: does a round, or a raw all-reduce, when told to."""

    def __init__(self, worker: int, workers: int, parameters: int, tensors: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        store = f"tcp://127.0.0.1:{PORT}"
        dist.init_process_group("gloo", store, rank=worker, world_size=workers)
        self.model = Pile(parameters, tensors)
        self.flat = torch.zeros(sum(p.numel() for p in self.model.parameters()))
        replica = tw.Replica(self.model, torch.optim.SGD(self.model.parameters(), lr=0.0))
        self.fleet = tw.Fleet([replica], tw.diloco(1, LR, MOMENTUM), tw.Group())

    def round(self) -> None:
        self.fleet.before_step()
        self.fleet.after_step()

    def all_reduce(self) -> None:
        dist.all_reduce(self.flat)

    def do(self, job: str) -> dict[str, float]:
        perturb(self.model)
        dist.barrier()
        busy, wire = time.process_time(), self.fleet.wire_sent
        seconds = timed(getattr(self, job))
        return {"wall": seconds, "cpu": time.process_time() - busy, "wire": self.fleet.wire_sent - wire}


def serve(args: argparse.Namespace) -> None:
    member = Member(args.worker, args.processes[0], args.small, args.small_tensors)
    for line in sys.stdin:
        print(json.dumps(member.do(line.strip())), flush=True)
    os._exit(0)  # gloo's threads would wait for peers that are gone


class Crew:
    """`count` processes in one namespace."""

    def __init__(self, network: Network, count: int, args: argparse.Namespace) -> None:
        sizes = ["--small", str(args.small), "--small-tensors", str(args.small_tensors)]
        command = [sys.executable, __file__, *sizes, "--processes", str(count), "--worker"]
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        options["env"] = {**os.environ, **quiet}
        self.network, self.count = network, count
        self.processes = [network.start(0, [*command, str(i)], **options) for i in range(count)]

    def do(self, job: str) -> dict[str, float]:
        """Of all processes the slowest; the mean of what they computed, of what the kernel and the engine counted."""
        before = self._sent()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(job + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(lines):
            raise RuntimeError("a process ended early; its own message is above")
        heard = [json.loads(line) for line in lines]
        mean = {key: statistics.mean(each[key] for each in heard) for key in ("cpu", "wire")}
        return {**mean, "wall": max(each["wall"] for each in heard), "bytes": (self._sent() - before) / self.count}

    def _sent(self) -> int:
        read = ["cat", "/sys/class/net/lo/statistics/tx_bytes"]
        return int(subprocess.check_output(["ip", "netns", "exec", self.network.namespace(0), *read]))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def on_processes(count: int, args: argparse.Namespace) -> dict[str, Any]:
    say(f"{count} processes, {args.small:,} parameters")
    with Network(1, name="scaling") as network:
        crew = Crew(network, count, args)
        try:
            turns = [(crew.do("round"), crew.do("all_reduce")) for _ in range(args.rounds + WARM)][WARM:]
        finally:
            crew.close()
    ours, raw = zip(*turns, strict=True)
    return {
        "processes": count, "message": 4 * args.small, "load": os.getloadavg()[0],
        "round": spread(each["wall"] for each in ours), "all_reduce": spread(each["wall"] for each in raw),
        "cpu": spread(each["cpu"] for each in ours), "all_reduce_cpu": spread(each["cpu"] for each in raw),
        "ratio": spread(o["wall"] / r["wall"] for o, r in turns),
        "bytes": spread(each["bytes"] for each in ours), "counted": ours[0]["wire"],
    }  # fmt: skip


# -- tensors -----------------------------------------------------------------------------------------------------------


class Bare:
    """DiLoCo's round of two replicas, written out: a loop over the tensors, every replica with its own outer state."""

    def __init__(self, replicas: list[Pile], offload: bool) -> None:
        self.live = [[p.detach() for p in replica.parameters()] for replica in replicas]
        self.anchors = [[self._kept(p.clone(), offload) for p in tensors] for tensors in self.live]
        self.velocities = [[self._kept(torch.zeros_like(p), offload) for p in tensors] for tensors in self.live]

    @staticmethod
    def _kept(tensor: Tensor, offload: bool) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor) if offload else tensor

    def round(self) -> None:
        for tensors in zip(*self.live, *self.anchors, *self.velocities, strict=True):
            live, kept = tensors[:2], tensors[2:]
            near = [tensor.to(live[0].device, non_blocking=True) for tensor in kept]  # itself, without offload
            self._one(live, near[:2], near[2:])
            for far, tensor in zip(kept, near, strict=True):
                if far is not tensor:
                    far.copy_(tensor, non_blocking=True)

    def _one(self, live: Sequence[Tensor], anchors: Sequence[Tensor], velocities: Sequence[Tensor]) -> None:
        drifts = [anchor - x for x, anchor in zip(live, anchors, strict=True)]
        mean = drifts[0].add_(drifts[1]).div_(2)
        for x, anchor, velocity in zip(live, anchors, velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(mean)
            anchor.sub_(mean.add(velocity, alpha=MOMENTUM), alpha=LR)
            x.copy_(anchor)


def of_tensors(tensors: int, parameters: int, offload: bool, args: argparse.Namespace) -> dict[str, Any]:
    say(f"{tensors} tensors, {parameters:,} parameters{', offload' * offload}")
    torch.manual_seed(0)
    with torch.device(args.device):
        start = Pile(parameters, tensors)
    replicas, others = ([copy.deepcopy(start) for _ in range(2)] for _ in range(2))
    hosted = [tw.Replica(model, torch.optim.SGD(model.parameters(), lr=0.0)) for model in replicas]
    fleet = tw.Fleet(hosted, tw.diloco(1, LR, MOMENTUM), tw.Local(), offload=offload)
    bare = Bare(others, offload)
    fleet.begin()
    pairs = (
        (_taken(fleet_round(fleet), replicas), _taken(bare.round, others)) for _ in range(rounds_of(parameters, args))
    )
    turns = list(pairs)[WARM:]
    apart = farthest(replicas[0], others[0])
    if apart > 1e-4:
        raise RuntimeError(f"the engine and the bare loop do not compute the same: {apart} apart")
    kind = "wall" if start.weights[0].is_cuda else "cpu"
    return {
        "tensors": tensors, "parameters": parameters, "offload": offload, "load": os.getloadavg()[0], "apart": apart,
        "engine": spread(ours[kind] for ours, _ in turns), "bare": spread(theirs[kind] for _, theirs in turns),
        "ratio": spread(ours[kind] / theirs[kind] for ours, theirs in turns),
        "wall_ratio": spread(ours["wall"] / theirs["wall"] for ours, theirs in turns),
    }  # fmt: skip


@torch.no_grad()
def farthest(one: Pile, other: Pile) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def fleet_round(fleet: tw.Fleet) -> Callable[[], None]:
    def round() -> None:
        fleet.before_step()
        fleet.after_step()

    return round


def rounds_of(parameters: int, args: argparse.Namespace) -> int:
    """With those that warm up. Long rounds are steady ones: fewer will do."""
    return WARM + (args.rounds if parameters < LARGE else max(3, args.rounds // 3))


def _taken(round: Callable[[], None], models: list[Pile]) -> dict[str, float]:
    for number, model in enumerate(models):  # replicas drift apart
        torch._foreach_mul_([p.detach() for p in model.parameters()], 0.999 - 0.001 * number)
    _wait(models[0])
    busy, wall = time.process_time(), timed(lambda: (round(), _wait(models[0])))
    return {"wall": wall, "cpu": time.process_time() - busy}


def _wait(model: Pile) -> None:
    if model.weights[0].is_cuda:
        torch.cuda.synchronize()


# -- showing -----------------------------------------------------------------------------------------------------------


def show_processes(found: list[dict[str, Any]]) -> None:
    rows = [
        (
            each["processes"], milliseconds(each["round"]), milliseconds(each["all_reduce"]), ratio_text(each["ratio"]),
            milliseconds(each["cpu"]), f"{each['bytes']['median'] / each['message']:.3f}",
            f"{each['counted'] / each['message']:.3f}",
        )
        for each in found
    ]  # fmt: skip
    table(("processes", "round ms", "all-reduce ms", "ratio", "processor ms", "sent, copies", "counted, copies"), rows)


def show_tensors(found: list[dict[str, Any]]) -> None:
    rows = []
    for each in found:
        more = (each["engine"]["median"] - each["bare"]["median"]) / each["tensors"]
        times = milliseconds(each["engine"]), milliseconds(each["bare"])
        rows.append(
            (f"{each['parameters']:,}", each["tensors"], "yes" if each["offload"] else "no", *times,
             ratio_text(each["ratio"]), f"{1e6 * more:.0f}")
        )  # fmt: skip
    table(("parameters", "tensors", "offload", "engine ms", "bare loop ms", "ratio", "us more a tensor"), rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("processes", "tensors"), default=["processes", "tensors"])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--small", type=int, default=1_000_000, help="parameters of the model on many processes")
    parser.add_argument("--small-tensors", type=int, default=20)
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", help="of the tensors")
    parser.add_argument("--quick", action="store_true", help="two processes, tiny models, two rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.processes, args.small, args.small_tensors = [2], 2000, 4
        args.tensors, args.parameters, args.rounds = [4], [2000], 2
    return args


def main() -> None:
    args, started = parsed(), machine()
    if args.worker is not None:
        return serve(args)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "processes" in args.parts:
        found["processes"] = [on_processes(count, args) for count in args.processes]
        show_processes(found["processes"])
    if "tensors" in args.parts:
        places = (False, True) if args.device == "cuda" else (False,)
        wanted = [(t, p, offload) for p in args.parameters for t in args.tensors for offload in places]
        found["tensors"] = [of_tensors(*each, args) for each in wanted]
        show_tensors(found["tensors"])
    save(args.json, 0, found, started)


if __name__ == "__main__":
    main()
