"""Whole runs by the command line: what they leave, how they stop, and that a resume is the same run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from tests.train.conftest import arguments_of, begin, ended, environment, metrics, write_text
from thinwire.train import checkpoint
from thinwire.train import config as configs
from thinwire.train.models import Llama, Shape


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same_run(one: Path, other: Path) -> None:
    """Bit for bit: every loss, every held-out loss, every byte count, every exported weight."""
    keys = ("step", "loss", "val_loss", "bytes_sent", "tokens", "lr")
    rows = [[[record.get(key) for key in keys] for record in metrics(folder)] for folder in (one, other)]
    assert rows[0] == rows[1]
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def until(condition, process: subprocess.Popen[str] | None = None) -> None:
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_what_a_run_leaves(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    run = tmp_path / "run"
    extra = ("--set", "logging.tensorboard=true", "--set", "logging.report=true")
    result = thinwire("train", *tiny, *extra, "--workers", 2, "--steps", 12, "--out", run)
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(type(line["step"]) is int and type(line["bytes_sent"]) is int for line in lines)
    model = Llama(Shape(1, 16, 2, 16), 256, 16)
    cost = tw.cost(tw.desloc(4), model, 2, optimizer=torch.optim.AdamW(model.parameters()))
    assert [line["bytes_sent"] for line in lines] == [cost.bytes(step) for step in range(1, 13)]
    assert lines[-1]["val_loss"] < lines[4]["val_loss"]
    stored = configs.load(run / "config.toml")
    assert stored.parameters == sum(p.numel() for p in model.parameters()) and stored.steps == 12
    assert json.loads((run / "versions.json").read_text())["torch"] == torch.__version__
    assert list((run / "tensorboard").iterdir()) and (run / "report.html").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["bytes_ddp"] == tw.cost(tw.ddp(), model, 2).bytes(12)
    for said in ("held-out loss", "bytes sent per worker", "DDP", str(run), "report.html", "--connect"):
        assert said in result.stdout


@pytest.mark.parametrize("method", ["streaming_diloco", "decoupled_momentum"])
def test_half_and_resume_is_the_whole(tmp_path: Path, thinwire, tiny: list[str], method: str) -> None:
    common = ("train", *tiny, "--method", method, "--workers", 2, "--steps", 12, "--set", "model.layers=2")
    thinwire(*common, "--out", tmp_path / "whole")
    half = thinwire(*common, "--out", tmp_path / "half", "--stop-at", 6)
    assert "stopped after step 6" in half.stderr and "--resume" in half.stderr
    thinwire("train", "--resume", tmp_path / "half")
    same_run(tmp_path / "whole", tmp_path / "half")


@pytest.mark.xdist_group("train")
def test_processes_are_the_same_run_as_one_process_and_resume_as_it(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    common = ("train", *tiny, "--workers", 2, "--steps", 12)
    thinwire(*common, "--out", tmp_path / "one")
    thinwire(*common, "--out", tmp_path / "two", "--processes", 2)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    thinwire(*common, "--out", tmp_path / "half", "--processes", 2, "--stop-at", 7)
    shutil.copytree(tmp_path / "half", tmp_path / "other")
    thinwire("train", "--resume", tmp_path / "half", "--processes", 2)
    same_run(tmp_path / "two", tmp_path / "half")
    thinwire("train", "--resume", tmp_path / "other")  # the same workers, now in one process
    same_run(tmp_path / "one", tmp_path / "other")


def test_more_steps_than_before_and_the_schedule_of_the_longer_run(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    common = ("train", *tiny, "--set", "schedule.name=constant", "--workers", 1)
    thinwire(*common, "--steps", 6, "--out", tmp_path / "run")
    thinwire("train", "--resume", tmp_path / "run", "--steps", 9)
    thinwire(*common, "--steps", 9, "--out", tmp_path / "whole")
    mine, whole = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_exits_cleanly(tmp_path: Path, start, tiny: list[str], name: str) -> None:
    run = tmp_path / "run"
    process = start("train", *tiny, "--workers", 2, "--steps", 100000, "--out", run)
    until(lambda: steps_done(run) >= 2, process)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and name in err and "Traceback" not in err
    last = metrics(run)[-1]["step"]
    assert checkpoint.steps_in(run)[0] == last


def test_a_run_killed_while_it_saves_goes_on(tmp_path: Path, thinwire, start, tiny: list[str]) -> None:
    """It saves after every step, so the kill comes within or between two saves."""
    common = ("train", *tiny, "--set", "train.checkpoint_every=1", "--workers", 2, "--steps", 60)
    run = tmp_path / "killed"
    process = start(*common, "--out", run)
    for more in (5, 9):
        goal = steps_done(run) + more
        until(lambda goal=goal: steps_done(run) >= goal, process)
        process.kill()
        process.wait()
        process = start("train", "--resume", run)
        until(lambda: "fleet.pt" in {path.name for path in run.glob("checkpoint-*/worker-0/*")})
    assert process.wait() == 0
    thinwire(*common, "--out", tmp_path / "whole")
    same_run(tmp_path / "whole", run)


@pytest.fixture(scope="module")
def stopped_and_whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 12 steps that was stopped after 10, and one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    common = ("train", *arguments_of(write_text(folder)), "--workers", 2, "--steps", 12)
    ended(begin(*common, "--stop-at", 10, "--out", folder / "stopped", cwd=folder))
    ended(begin(*common, "--out", folder / "whole", cwd=folder))
    return folder / "stopped", folder / "whole"


@pytest.mark.parametrize("harm", ["truncated", "changed", "absent"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(
    tmp_path: Path, thinwire, stopped_and_whole: tuple[Path, Path], harm: str
) -> None:
    run = shutil.copytree(stopped_and_whole[0], tmp_path / "run")
    victim = run / "checkpoint-000010" / "worker-1" / "state.pt"
    content = victim.read_bytes()
    if harm == "absent":
        victim.unlink()
    else:
        victim.write_bytes(content[:-9] if harm == "truncated" else content[:-9] + b"x" * 9)
    again = thinwire("train", "--resume", run)
    assert "refused checkpoint-000010/worker-1/state.pt" in again.stderr and "at step 5" in again.stderr
    same_run(stopped_and_whole[1], run)


def test_when_all_are_damaged_it_says_so(tmp_path: Path, thinwire, stopped_and_whole: tuple[Path, Path]) -> None:
    run = shutil.copytree(stopped_and_whole[0], tmp_path / "run")
    for manifest in run.glob("checkpoint-*/worker-0/manifest.json"):
        manifest.write_text("{")
    result = thinwire("train", "--resume", run, status=2)
    assert "checkpoint-000010/worker-0" in result.stderr and "no checkpoint" in result.stderr


def test_the_last_checkpoints_are_kept(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    keep = ("--set", "train.keep=2", "--set", "train.checkpoint_every=2")
    thinwire("train", *tiny, *keep, "--workers", 1, "--steps", 9, "--out", tmp_path / "run")
    assert checkpoint.steps_in(tmp_path / "run") == [9, 8]


def test_another_number_of_workers_and_another_method(
    tmp_path: Path, thinwire, stopped_and_whole: tuple[Path, Path]
) -> None:
    run = shutil.copytree(stopped_and_whole[0], tmp_path / "run")
    three = thinwire("train", "--resume", run, "--workers", 3, "--steps", 30, "--stop-at", 15)
    for said in ("parameters", "moments", "residuals"):
        assert re.search(rf"workers 2 -> 3: .*{said}", three.stderr)
    other = thinwire("train", "--resume", run, "--method", "diloco")
    assert "method desloc -> diloco" in other.stderr
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 31))
    sent = [line["bytes_sent"] for line in lines]
    assert sent == sorted(sent) and lines[-1]["val_loss"] < lines[4]["val_loss"]
    wire = [line["wire_sent"] for line in lines]
    assert wire == sorted(wire), "what crossed the wire is cumulative too"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", 5), "is at step 10 already: --steps 5 is behind it"),
        (("--stop-at", 5), "is at step 10 already: --stop-at 5 is behind it"),
        (("--set", "optimizer.name=sgd"), "optimizer.name"),
        (("--set", "optimizer.name=muon"), "optimizer.name"),
        (("--method", "demo"), "--set optimizer.name=sgd"),
    ],
)
def test_a_resume_that_cannot_be_is_refused_and_leaves_the_run_as_it_was(
    tmp_path: Path, thinwire, stopped_and_whole: tuple[Path, Path], arguments: tuple[object, ...], said: str
) -> None:
    run = shutil.copytree(stopped_and_whole[0], tmp_path / "run")
    result = thinwire("train", "--resume", run, *arguments, status=2)
    assert said in result.stderr and len(result.stderr.splitlines()) == 1
    assert (run / "config.toml").read_text() == (stopped_and_whole[0] / "config.toml").read_text()


def test_a_resume_takes_the_optimizers_settings_from_the_config(
    tmp_path: Path, thinwire, stopped_and_whole: tuple[Path, Path]
) -> None:
    run = shutil.copytree(stopped_and_whole[0], tmp_path / "run")
    thinwire("train", "--resume", run, "--set", "optimizer.weight_decay=0.7")
    state = torch.load(run / "checkpoint-000012" / "worker-0" / "state.pt", weights_only=True)
    assert [group["weight_decay"] for group in state["optimizers"][0]["param_groups"]] == [0.7, 0.0]


def test_a_config_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("steps = 7")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))  # killed just before
    with pytest.raises(KeyboardInterrupt):
        checkpoint.replace_text(tmp_path / "config.toml", "steps = 9")
    assert (tmp_path / "config.toml").read_text() == "steps = 7"


@pytest.mark.parametrize("mode", [(), ("--processes", 2)], ids=["one process", "two processes"])
def test_a_folder_with_a_run_is_not_written_over(
    thinwire, stopped_and_whole: tuple[Path, Path], mode: tuple[object, ...]
) -> None:
    result = thinwire("train", "--steps", 2, "--out", stopped_and_whole[0], *mode, status=2)
    assert "--resume" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("optimizer", ["adopt", "muon", "sgd"])
def test_inner_optimizers_with_the_rest_of_the_recipe(
    tmp_path: Path, thinwire, tiny: list[str], optimizer: str
) -> None:
    recipe = ("train.precision=bf16", "train.accumulate=2", "schedule.name=wsd", f"optimizer.name={optimizer}")
    sets = [part for key in recipe for part in ("--set", key)]
    thinwire("train", *tiny, *sets, "--workers", 2, "--steps", 8, "--out", tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["tokens"] == 8 * 2 * 2 * 2 * 16


def test_a_resnet_on_digits(tmp_path: Path, thinwire) -> None:
    pytest.importorskip("sklearn")
    sets = (
        "model.kind=resnet",
        "train.batch=32",
        "logging.tensorboard=false",
        "logging.report=false",
        "method.every=4",
    )
    arguments = [part for key in sets for part in ("--set", key)]
    thinwire("train", *arguments, "--workers", 2, "--steps", 20, "--out", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert any("running_mean" in name for name in weights(tmp_path / "run"))


def test_exported_weights_load_in_transformers(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    thinwire("train", *tiny, "--workers", 2, "--steps", 6, "--out", tmp_path / "run")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    part = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-000006" / "worker-1")
    assert isinstance(loaded, transformers.LlamaForCausalLM) and isinstance(part, transformers.LlamaForCausalLM)
    assert torch.equal(loaded.model.norm.weight, weights(tmp_path / "run")["model.norm.weight"])


def test_without_the_report_library_training_runs_and_says_so(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    """A folder named plotly without content shadows the installed one."""
    (tmp_path / "shadow" / "plotly").mkdir(parents=True)
    root = Path(__file__).parents[2]
    env = {"PYTHONPATH": f"{tmp_path / 'shadow'}:{root}"}
    (tmp_path / "shadow" / "plotly" / "__init__.py").write_text("raise ImportError('no plotly', name='plotly')")
    arguments = (*tiny, "--set", "logging.report=true", "--workers", 1, "--steps", 2, "--out", tmp_path / "run")
    result = thinwire("train", *arguments, env=env)
    assert "no report.html: plotly" in result.stderr and (tmp_path / "run" / "summary.json").exists()


@pytest.mark.xdist_group("train")
@pytest.mark.parametrize("inside", ["fsdp", "ddp"])
def test_under_torchrun_each_node_is_a_worker(tmp_path: Path, thinwire, tiny: list[str], inside: str) -> None:
    """Two nodes of two processes; stopped, resumed, and held against both workers in one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = ("--master_addr", "127.0.0.1", "--master_port", str(probe.getsockname()[1]))
    common = ("train", *tiny, "--steps", 10, "--workers", 2)
    thinwire(*common, "--out", tmp_path / "one")

    def nodes(*arguments: object) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2", *where]
        started = [
            subprocess.Popen(
                [*torchrun, "--node_rank", str(node), "-m", "thinwire.cli", *map(str, arguments)],
                env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for node in range(2)
        ]  # fmt: skip
        for process in started:
            ended(process)

    nodes(*common, "--set", f"train.inside={inside}", "--out", tmp_path / "nodes", "--stop-at", 6)
    nodes("train", "--resume", tmp_path / "nodes")
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "nodes")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "nodes")
    assert one.keys() == two.keys() and all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)
