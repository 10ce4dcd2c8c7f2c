"""The counters against the kernel's: one network namespace per worker, joined by a bridge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.netns import Network

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).parents[2]
STEPS, LOOKS = 4, 3
METHODS = [
    "tw.ddp()",
    "tw.local_sgd(1)",
    "tw.diloco(1, codec=tw.BFloat16())",
    "tw.diloco(1, codec=tw.Int8())",
    "tw.diloco(1, codec=tw.TopK(2048, values=tw.Int8()))",
]  # messages of 1 MB or more: all-reduce, two-shot above two workers, gather


@pytest.fixture(params=[2, 4])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        with Network(request.param, name="twtest") as network:
            yield network
    except (RuntimeError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


def start(network: Network) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.processes.counted", network.address(0), "29600"]
    return [
        network.start(
            worker, [*command, str(worker), str(network.workers), str(STEPS), str(LOOKS), *METHODS],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for worker in range(network.workers)
    ]  # fmt: skip


def when_ready(network: Network, started: list[subprocess.Popen[str]]) -> list[tuple[dict[str, int], tuple[int, int]]]:
    """Once all workers wait: what each has counted, and the kernel's counters of its interface."""
    words = [json.loads(process.stdout.readline()) for process in started if process.stdout]
    moved = [network.moved(worker) for worker in range(network.workers)]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return list(zip(words, moved, strict=True))


def over(counted: dict[str, int], earlier: tuple[int, int], later: tuple[int, int]) -> dict[str, float]:
    """The kernel's bytes over ours, each way."""
    ways = enumerate(("sent", "received"))
    return {direction: (later[way] - earlier[way]) / counted[direction] for way, direction in ways}


def test_the_kernel_counts_what_we_count(network: Network) -> None:
    """Of three looks the best: on busy cores TCP repeats and acknowledges more, which is not what a method sends."""
    started = start(network)
    try:
        for method in METHODS:
            looks = []
            for _ in range(LOOKS):
                before, after = when_ready(network, started), when_ready(network, started)
                pairs = zip(before, after, strict=True)
                looks.append([over(counted, earlier, later) for (_, earlier), (counted, later) in pairs])
            ratios = [ratio for look in looks for each in look for ratio in each.values()]
            assert min(ratios) >= 1.0, (method, looks)
            assert min(max(ratio for each in look for ratio in each.values()) for look in looks) <= 1.08, (
                method,
                looks,
            )
    finally:
        for process in started:
            process.kill()
            process.wait()
