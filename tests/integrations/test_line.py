"""The kernel's counters of the line between two Trainers: between two rounds next to nothing crosses it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.netns import Network

pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("integrations")
ROOT = Path(__file__).parents[2]
FIRST, LAST = 31, 51  # rounds are after step 30 and, but for the end, 60


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        with Network(2, name="twhf") as network:
            yield network
    except (RuntimeError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces are not permitted here: {error}")


def start(network: Network, folder: Path) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.integrations.counted_trainer", network.address(0), "29610"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [
        network.start(w, [*command, str(w), str(folder), str(FIRST), str(LAST)], cwd=ROOT, env=environment, **pipes)
        for w in range(2)
    ]


def counters(network: Network, started: list[subprocess.Popen[str]], step: int) -> list[tuple[int, int]]:
    """Once both workers wait after `step`."""
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == f"step {step}\n"
    moved = [network.moved(worker) for worker in range(2)]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return moved


def test_between_two_rounds_less_than_10_kB_a_step_crosses_the_line(network: Network, tmp_path: Path) -> None:
    started = start(network, tmp_path)
    try:
        before, after = counters(network, started, FIRST), counters(network, started, LAST)
        assert [process.wait(timeout=60) for process in started] == [0, 0]
        for earlier, later in zip(before, after, strict=True):
            assert sum(later) - sum(earlier) < 10_000 * (LAST - FIRST)
            assert sum(earlier) > 10_000  # the round itself was counted
    finally:
        for process in started:
            process.kill()
            process.wait()
