"""`thinwire train --join`: the trainer among workers that come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

pytest.importorskip("torchft")

import thinwire as tw
from tests.cluster import free_port
from tests.elastic.pack import ROOT
from tests.elastic.sockets import complaints
from thinwire.cli import app
from thinwire.elastic.coordinator import Coordinator
from thinwire.train import checkpoint
from thinwire.train import place as places
from thinwire.train.command import Join
from thinwire.train.config import Config
from thinwire.train.errors import UserError

pytestmark = pytest.mark.xdist_group("chaos")
SMALL = ["--set", "model.context=16", "--set", "model.layers=1", "--set", "model.width=32", "--set", "train.batch=2",
         "--set", "data.cap=200000", "--set", "train.eval_every=0", "--set", "train.eval_batches=1",
         "--set", "logging.report=false", "--set", "logging.tensorboard=false"]  # fmt: skip


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator(port=free_port(), heartbeat_timeout=3.0)
    yield made
    made.close()


def join(where: Coordinator, out: Path, *more: str, steps: int = 48) -> subprocess.Popen[str]:
    words = ["train", "--join", where.address, "--method", "diloco", "--set", "method.every=8", "--steps", str(steps)]
    words += [*SMALL, *([] if "--resume" in more else ["--out", str(out)]), *more]
    if "--resume" in more:
        words = ["train", "--join", where.address, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "thinwire.cli", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def records(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ended(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return out + errors


def counts_what_the_fleet_did(stayed: Path, came: Path) -> None:
    """Tokens are all workers', as many as there were at each step; bytes are compared over a worker's own steps."""
    mine, theirs = ({row["step"]: row["tokens"] for row in records(folder)} for folder in (stayed, came))
    assert all(mine[step] == tokens for step, tokens in theirs.items() if step in mine)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (stayed, came)]
    ddp = [summary["bytes_ddp"] / summary["steps"] for summary in summaries]
    assert ddp[1] < ddp[0] and summaries[0]["tokens"] == summaries[1]["tokens"]


def model(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def wait_until(true: object, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_join_one_dies_and_comes_back_from_its_disk(coordinator: Coordinator, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    every = ["--set", "train.checkpoint_every=16", "--min-workers", "2"]
    first, second = join(coordinator, a, *every, steps=400), join(coordinator, b, *every, steps=400)
    try:
        wait_until(lambda: len(records(b)) > 40)
        assert complaints("worker", first.pid, "127.0.0.1") == []
        second.send_signal(signal.SIGKILL)
        second.wait()
        second = join(coordinator, b, "--resume", str(b))
        said, also = ended(first), ended(second)
    finally:
        for process in (first, second):
            process.kill()
    assert "resumed" in also and "joined" in also
    assert model(a) == model(b)
    rows = records(b)
    assert rows[-1]["step"] == 400 and all(x["step"] < y["step"] for x, y in zip(rows, rows[1:], strict=False))
    assert {"committed", "lost", "alone"} <= set(rows[-1])
    counts_what_the_fleet_did(a, b)
    assert "--connect" not in said
    late = ended(join(coordinator, tmp_path / "late", *every, steps=400))
    assert "is finished" in late and "joined" not in late and records(tmp_path / "late") == []


def test_a_worker_that_waits_for_others_stops_when_it_is_asked_to(coordinator: Coordinator, tmp_path: Path) -> None:
    out = [tmp_path / "a", tmp_path / "b"]
    first, second = (join(coordinator, folder, "--min-workers", "2", steps=4000) for folder in out)
    try:
        wait_until(lambda: len(records(out[0])) > 8)
        second.kill()
        second.wait()
        assert first.stderr is not None
        for waited in (": 2 workers", "1 of 2 workers are here"):  # whoever came first has waited once already
            while waited not in (line := first.stderr.readline()):
                assert line, "it ended before it waited"
        first.send_signal(signal.SIGTERM)
        _, errors = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
    assert first.returncode == 1 and "Traceback" not in errors
    said = re.search(r"after step (\d+): asked to stop while .*; saved (.*)", errors)
    assert said and int(said[1]) % 8 == 0 and said[2] == f"{out[0]}/checkpoint-{int(said[1]):06d}"
    assert checkpoint.steps_in(out[0])[0] == int(said[1])


def test_several_processes_in_one_elastic_worker_are_refused_in_one_line(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    config.train.inside = "fsdp"
    with pytest.raises(UserError, match="an elastic worker is one process.*leave it at 'none'.*--connect"):
        places.elastic(config, Join(coordinator.address, None, None, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = CliRunner().invoke(app, ["train", "--join", coordinator.address]).exception
    assert isinstance(refused, UserError) and "--join and torchrun exclude each other" in str(refused)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="an elastic worker is one process: join workers of several with"):
        tw.Elastic(coordinator.address).open(1, 64)


@pytest.mark.slow
def test_a_worker_without_its_disk_is_healed_and_settings_must_agree(coordinator: Coordinator, tmp_path: Path) -> None:
    slow = ["--set", "train.checkpoint_every=0", "--set", "train.batch=48"]  # long enough for the others to come
    first = join(coordinator, tmp_path / "a", *slow, steps=1500)
    try:
        wait_until(lambda: len(records(tmp_path / "a")) > 20)
        other = join(coordinator, tmp_path / "x", "--set", "optimizer.lr=1", *slow, steps=1500)
        _, errors = other.communicate(timeout=90)
        assert other.returncode != 0 and "optimizer.lr" in errors and "Traceback" not in errors
        newcomer = join(coordinator, tmp_path / "b", *slow, steps=1500)
        ended(first), ended(newcomer)
    finally:
        first.kill()
    rows = records(tmp_path / "b")
    assert rows[0]["step"] > 20, "a joiner's step is the fleet's"
    assert model(tmp_path / "a") == model(tmp_path / "b")
    assert any(row["alone"] for row in records(tmp_path / "a")), "rounds made alone are in the metrics"
    counts_what_the_fleet_did(tmp_path / "a", tmp_path / "b")
