"""Measures what the planner needs between the processes of a torchrun: each line both ways, latency, step time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.plan.inputs import Facts
from thinwire.plan.timeline import Link

_FIRST = 2**18  # bytes of the first transfer; doubled until one takes long enough to be believed
_LONG_ENOUGH = 0.5  # seconds
_MOST = 2**28  # bytes of a transfer, however fast the line
_PINGS = 20
_WIDTH = 1024
_SAMPLE = 2**22  # parameters of the block that is timed at the most; the rest is scaled from it


@contextmanager
def torchrun() -> Iterator[tuple[int, int]]:
    """A gloo group over the processes of a torchrun; gives this process's rank and their number."""
    if "RANK" not in os.environ:
        raise ValueError("--probe measures between processes: start it with torchrun on every machine")
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def measure(parameters: int, layers: int, batch_tokens: int) -> Facts:
    """What the processes of the group find; the same answer on each."""
    workers = dist.get_world_size()
    if workers < 2:
        raise ValueError("--probe needs two processes or more: torchrun --nproc-per-node 2, or more machines")
    latency = _latency()
    up, down = [0.0] * workers, [0.0] * workers
    for source, target in _pairs(workers):
        rate = _transfer(source, target, latency)
        up[source], down[target] = max(up[source], rate), max(down[target], rate)
    times = _everyone(_step_time(parameters, layers, batch_tokens))
    links = [Link(u, d, latency) for u, d in zip(up, down, strict=True)]
    return Facts(links=links, step_times=times, workers=workers)


def _pairs(workers: int) -> list[tuple[int, int]]:
    """Every pair both ways, or in a large fleet the neighbours: a line is as fast as its best transfer."""
    if workers > 8:
        return [pair for a in range(workers) for pair in ((a, (a + 1) % workers), ((a + 1) % workers, a))]
    return [(a, b) for a in range(workers) for b in range(workers) if a != b]


def _latency() -> float:
    """One way between the farthest pair: half of the slowest round trip from the first process."""
    worst = 0.0
    for other in range(1, dist.get_world_size()):
        trips = [_round_trip(0, other) for _ in range(_PINGS)]
        worst = max(worst, statistics.median(trips) / 2)
    return max(_everyone(worst))


def _round_trip(source: int, target: int) -> float:
    token, began = torch.zeros(1), time.perf_counter()
    if dist.get_rank() == source:
        dist.send(token, target)
        dist.recv(token, target)
    elif dist.get_rank() == target:
        dist.recv(token, source)
        dist.send(token, source)
    return time.perf_counter() - began if dist.get_rank() == source else 0.0


def _transfer(source: int, target: int, latency: float) -> float:
    """Bytes per second one way, from a transfer that took long enough; all processes keep in step."""
    size = _FIRST
    while True:
        dist.barrier()
        seconds = max(_everyone(_timed_send(source, target, torch.zeros(size, dtype=torch.uint8))))
        if seconds > _LONG_ENOUGH or size >= _MOST:
            return size / max(seconds - 2 * latency, 1e-9)
        size *= 2


def _timed_send(source: int, target: int, payload: Tensor) -> float:
    """Until the receiver's acknowledgement is back; 0 on processes that only look on."""
    began, answer = time.perf_counter(), torch.zeros(1)
    if dist.get_rank() == source:
        dist.send(payload, target)
        dist.recv(answer, target)
        return time.perf_counter() - began
    if dist.get_rank() == target:
        dist.recv(payload, source)
        dist.send(answer, source)
    return 0.0


def _everyone(value: float) -> list[float]:
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(v) for v in values]


def _step_time(parameters: int, layers: int, batch_tokens: int) -> float:
    """Forward and backward of matrices like one block's, scaled to the whole model and batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    depth = max(1, min(parameters // layers, _SAMPLE) // _WIDTH**2)
    block = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(depth))).to(device)
    tokens = min(batch_tokens, 1024 if device.type == "cpu" else 16384)
    x = torch.randn(tokens, _WIDTH, device=device, requires_grad=True)
    seconds = _median_time(lambda: block(x).sum().backward(), device)
    return seconds * (parameters / (depth * _WIDTH**2)) * (batch_tokens / tokens)


def _median_time(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])  # the first two warm up
