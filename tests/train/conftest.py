"""The real command line, on a model small enough that starting Python takes longer than training it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.hidden": 16,
    "model.context": 16,
    "train.batch": 2,
    "train.eval_batches": 2,
    "train.eval_every": 5,
    "train.checkpoint_every": 5,
    "schedule.warmup": 3,
    "method.every": 4,
    "logging.tensorboard": "false",
    "logging.report": "false",
}

Process = subprocess.Popen[str]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "COV"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "COLUMNS": "200"}


def begin(*arguments: Any, cwd: Path, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Process:
    """Start `thinwire ...` and leave it running."""
    command = [*prefix, sys.executable, "-m", "thinwire.cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, cwd=cwd, env=environment() | (env or {}), **pipes)


def ended(process: Process, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Wait for a process to end as it should."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def arguments_of(text: Path, **more: Any) -> list[str]:
    """Arguments of a tiny run on this text; `train__batch=3` is `--set train.batch=3`."""
    pairs = TINY | {"data.files": str(text)} | {key.replace("__", "."): value for key, value in more.items()}
    return [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]


def write_text(folder: Path) -> Path:
    """A text to train on: this project's own source."""
    path = folder / "text.txt"
    sources = sorted((Path(__file__).parents[2] / "thinwire" / "train").glob("*.py"))
    path.write_text("\n".join(source.read_text() for source in sources))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start `thinwire ...`; whatever is still there at the end is ended."""
    started: list[Process] = []

    def call(*arguments: Any, **options: Any) -> Process:
        started.append(begin(*arguments, cwd=tmp_path, **options))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def thinwire(start: Callable[..., Process]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `thinwire ...` to its end."""
    return lambda *arguments, status=0, **options: ended(start(*arguments, **options), status)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    return arguments_of(write_text(tmp_path))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
