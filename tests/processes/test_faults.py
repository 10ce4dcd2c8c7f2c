"""Workers that die, stall or stay silent: the others say who, where and when, and do not hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import free_port

pytestmark = pytest.mark.xdist_group("processes")
ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "tests.processes.worker"]


@contextmanager
def workers(count: int, method: str, steps: int, *options: tuple[str, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """`options[i]` goes to worker i. What is still alive at the end is killed."""
    port = free_port()
    started = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for worker in range(count):
        extra = options[worker] if worker < len(options) else ()
        command = [*WORKER, str(port), str(worker), str(count), method, str(steps)]
        started.append(
            subprocess.Popen([*command, *extra], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def last_words(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=60)
    return json.loads(out.strip().splitlines()[-1])


@pytest.mark.parametrize("method", ["tw.local_sgd(4)", "tw.eager_diloco(4)", "tw.sparseloco(4)"])
def test_a_killed_worker_is_named_with_row_round_and_step(method: str) -> None:
    with workers(3, method, 40, (), (), ("--die-at", "9")) as started:
        told = [last_words(process) for process in started[:2]]
        started[2].wait(timeout=30)
        assert started[2].returncode == -signal.SIGKILL
    for words in told:
        assert words["workers"] == [2] and "worker 2" in words["lost"]
        assert words["row"] == 0 and words["round"] in (2, 3) and words["step"] >= 8


def test_a_silent_worker_is_named_after_the_time_out_and_reported_before() -> None:
    quick = ("--timeout", "14")
    with workers(2, "tw.local_sgd(4)", 40, quick, (*quick, "--stop-at", "6")) as started:
        words = last_words(started[0])
    assert words["workers"] == [1] and words["round"] == 2
    assert any("waiting over 10 s for worker 1" in text for text in words["events"])


def test_an_exception_on_one_worker_ends_the_others() -> None:
    with workers(2, "tw.diloco(4)", 40, (), ("--stop-at", "6")) as started:
        for line in started[1].stdout or ():
            if line.startswith("step 5"):
                break
        started[1].send_signal(signal.SIGINT)
        words = last_words(started[0])
    assert words["workers"] == [1] and words["round"] == 2


def test_nobody_to_meet_is_an_error_within_the_time_out() -> None:
    port = free_port()
    command = [*WORKER, str(port), "0", "2", "tw.diloco(4)", "4", "--timeout", "3"]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert "could not connect to all of the 2 processes" in ended.stdout
