"""The real command line, on a model small enough that starting Python takes longer than training it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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

Start = Callable[..., "subprocess.Popen[str]"]
Call = Callable[..., "subprocess.CompletedProcess[str]"]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "COV"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "COLUMNS": "200"}


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start `thinwire ...` and leave it running; whatever is still there at the end is ended."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        *arguments: Any, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-m", "thinwire.cli", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, cwd=tmp_path, env=environment() | (env or {}), **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def thinwire(start: Start) -> Call:
    """Run `thinwire ...` to its end."""

    def call(*arguments: Any, status: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **options)
        out, err = process.communicate(timeout=240)
        assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text to train on: this project's own source."""
    path = tmp_path / "text.txt"
    sources = sorted((Path(__file__).parents[2] / "thinwire" / "train").glob("*.py"))
    path.write_text("\n".join(source.read_text() for source in sources))
    return path


@pytest.fixture
def tiny(text: Path) -> list[str]:
    """Arguments of a tiny run."""
    pairs = TINY | {"data.files": str(text)}
    return [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
