"""What a run leaves when it ends badly: a full disk, damage, Ctrl-C, divergence. And that the next start goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import metrics
from tests.train.test_run import same_run, steps_done, until
from thinwire.report import metrics as records
from thinwire.train import checkpoint


def strict(text: str) -> Any:
    """As readers of JSON other than Python's read it: NaN is no word of it."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


# -- comparisons -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "method", "said"),
    [((), "demo", "--set optimizer.name=sgd"), (("--set", "method.fragments=99"), "streaming_diloco", "99")],
)
def test_a_comparison_refuses_a_method_before_the_first_run(
    tmp_path: Path, thinwire, tiny: list[str], sets: tuple[str, ...], method: str, said: str
) -> None:
    result = thinwire("compare", *tiny, *sets, "--methods", f"desloc,{method}", "--out", tmp_path / "all", status=2)
    assert f"{method} cannot run here" in one_line(result) and said in result.stderr
    assert not (tmp_path / "all" / "desloc").exists()


def test_a_comparison_refuses_the_folder_of_a_run(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    result = thinwire("compare", *tiny, "--methods", "desloc", "--out", tmp_path / "run", status=2)
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "compare.json").touch()
    other = thinwire("train", *tiny, "--out", tmp_path / "compared", status=2)
    assert "holds a comparison" in one_line(other)
    assert "holds a run" in one_line(result) and [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]


def test_a_comparison_takes_a_methods_key_by_its_last_part(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    out = tmp_path / "all"
    thinwire("compare", *tiny, "--set", "outer_lr=.5", "--methods", "ddp,diloco", "--steps", 2, "--out", out)
    assert "outer_lr = 0.5" in (out / "diloco" / "config.toml").read_text()
    result = thinwire(
        "compare", *tiny, "--set", "outer_lr=.5", "--methods", "desloc", "--out", tmp_path / "b", status=2
    )
    assert "none of these methods has 'method.outer_lr'" in one_line(result)


def test_a_comparison_keeps_what_is_finished_at_ctrl_c(tmp_path: Path, start, thinwire, tiny: list[str]) -> None:
    out = tmp_path / "all"
    rare = ("--set", "train.eval_every=0", "--set", "train.checkpoint_every=0")
    process = start(
        "compare", *tiny, *rare, "--methods", "desloc,local_sgd", "--steps", 500, "--workers", 1, "--out", out
    )
    until(lambda: steps_done(out / "local_sgd") >= 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and f"finished 1 of 2: desloc: thinwire report {out}" in err
    assert [entry["label"] for entry in json.loads((out / "compare.json").read_text())] == ["desloc"]
    thinwire("report", out)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_pruning_counts_only_what_the_run_can_go_back_to(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    """12 is damaged, so the run goes on from 8: then 12 is neither kept nor counted."""
    run = tmp_path / "run"
    often = ("--set", "train.checkpoint_every=4", "--set", "train.keep=2")
    thinwire("train", *tiny, *often, "--workers", 1, "--steps", 20, "--stop-at", 12, "--out", run)
    assert checkpoint.steps_in(run) == [12, 8]
    (run / "checkpoint-000012" / "worker-0" / "state.pt").write_bytes(b"")
    thinwire("train", "--resume", run, "--stop-at", 10, "--set", "train.keep=1")
    assert checkpoint.steps_in(run) == [10]
    assert "at step 10" in thinwire("train", "--resume", run).stderr


def test_a_run_that_died_before_its_first_checkpoint_begins_again(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    common = ("train", *tiny, "--workers", 2, "--steps", 8)
    thinwire(*common, "--out", tmp_path / "whole")
    run = tmp_path / "run"
    thinwire(*common, "--stop-at", 4, "--out", run)
    (run / "checkpoint-000004" / "worker-0").rename(run / "checkpoint-000004" / ".worker-0.draft")
    shutil.rmtree(run / "checkpoint-000004" / "worker-1")
    assert "begins at step 0" in thinwire("train", "--resume", run).stderr
    same_run(tmp_path / "whole", run)


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    thinwire("train", *tiny, "--set", "logging.tensorboard=true", "--steps", 8, "--out", run)
    shutil.rmtree(run / "checkpoint-000008")  # as if it had been killed before it was saved
    thinwire("train", "--resume", run)
    stored = events.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in stored.Scalars("loss")] == [*range(1, 9)]


@pytest.mark.parametrize("mode", [(), ("--processes", 2)], ids=["one process", "two processes"])
def test_too_little_memory_is_one_line(tmp_path: Path, thinwire, tiny: list[str], mode: tuple[object, ...]) -> None:
    huge = ("--set", "model.width=100000000", "--set", "train.wait=60")
    said = one_line(thinwire("train", *tiny, *huge, *mode, "--steps", 4, "--out", tmp_path / "run", status=2))
    assert "out of memory (asked for " in said and "lower train.batch" in said


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "empty folder"])
def test_memory_that_runs_out_in_the_first_step_leaves_no_run(
    tmp_path: Path, thinwire, tiny: list[str], there: bool
) -> None:
    """A run of too large a batch could be resumed otherwise, at a step that it never took."""
    run = tmp_path / "run"
    if there:
        run.mkdir()
    huge = ("--set", "train.batch=100000", "--set", "model.hidden=40000", "--set", "logging.tensorboard=true")
    limit = ("sh", "-c", 'ulimit -v 8000000; exec "$@"', "sh")
    command = ("train", *tiny, *huge, "--workers", 1, "--steps", 4, "--out", run)
    assert "out of memory" in one_line(thinwire(*command, prefix=limit, status=2))
    assert run.exists() == there and [path.name for path in run.rglob("*")] == [".lock"] * there


def test_a_new_run_does_not_drop_the_checkpoints_of_another(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    thinwire("train", *tiny, "--workers", 1, "--steps", 3, "--out", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    new = ("train", *tiny, "--workers", 1, "--steps", 3, "--out", tmp_path / "run")
    assert "holds a run already" in one_line(thinwire(*new, status=2))
    (tmp_path / "run" / "config.toml").unlink()
    assert "has lost its config.toml: put that back" in one_line(thinwire(*new, status=2))
    assert checkpoint.steps_in(tmp_path / "run") == [3]


# -- disks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [32, 80], ids=["model.safetensors", "state.pt"])
def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, thinwire, tiny: list[str], blocks: int) -> None:
    """A limit of 512-byte blocks on the size of a file stands for a full disk."""
    run = tmp_path / "run"
    thinwire("train", *tiny, "--workers", 2, "--steps", 12, "--stop-at", 5, "--out", run)
    limit = ("sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh")
    failed = thinwire("train", "--resume", run, prefix=limit, status=1, env={"PYTHONDONTWRITEBYTECODE": "1"})
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("thinwire: cannot save at step 10: ") and "Traceback" not in failed.stderr
    assert "too large" in last and f"the last whole checkpoint is {run}/checkpoint-000005" in last
    assert checkpoint.steps_in(run) == [5]
    assert "at step 5" in thinwire("train", "--resume", run).stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 100 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("mode", [(), ("--processes", 2)], ids=["one process", "two processes"])
def test_a_full_disk(small_disk: Path, thinwire, tiny: list[str], mode: tuple[object, ...]) -> None:
    """The second worker's part has no room: the first one's is no checkpoint, and the run begins again."""
    common = ("--workers", 2, "--steps", 12, *mode)
    board = ("--set", "logging.tensorboard=true")
    failed = thinwire("train", *tiny, *board, *common, "--out", small_disk / "run", status=1)
    assert "No space left on device" in failed.stderr and "Traceback" not in failed.stderr
    assert "there is no checkpoint yet; free space" in failed.stderr


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "empty folder"])
def test_a_disk_that_is_full_from_the_start(small_disk: Path, thinwire, tiny: list[str], there: bool) -> None:
    """What fails leaves nothing that passes for a run: the same command does it once there is space."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    if there:
        run.mkdir()
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    command = ("train", *tiny, "--workers", 1, "--steps", 2, "--out", run)
    said = one_line(thinwire(*command, status=1))
    assert f"cannot begin in {run}: " in said and "No space left on device; free space and start again" in said
    assert run.exists() == there and [path.name for path in run.rglob("*")] == [".lock"] * there
    subprocess.run(["mount", "-o", "remount,size=10m", small_disk], check=True)
    thinwire(*command)


def test_a_read_only_disk(tmp_path: Path, small_disk: Path, thinwire, tiny: list[str]) -> None:
    pytest.importorskip("plotly")
    thinwire("train", *tiny, "--workers", 1, "--steps", 2, "--out", tmp_path / "run")
    shutil.copy(tmp_path / "run" / "metrics.jsonl", small_disk)
    (small_disk / "new").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    plan = ("plan", "--params", "1M", "--layers", 2, "--step-time", "1s", "--bandwidth", "1Gbit", "--workers", 2)
    for arguments, status in (
        (("train", *tiny, "--out", small_disk / "new"), 2),
        (("train", *tiny, "--out", small_disk / "new", "--workers", 2, "--processes", 2), 2),
        (("report", small_disk), 1),
        ((*plan, "--plot", small_disk / "plot.html"), 1),
    ):
        assert "Read-only file system" in one_line(thinwire(*arguments, status=status))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here that opens but cannot be read")
@pytest.mark.parametrize("mode", [(), ("--processes", 2)], ids=["one process", "two processes"])
def test_data_that_cannot_be_read(tmp_path: Path, thinwire, tiny: list[str], mode: tuple[object, ...]) -> None:
    unreadable = ("--set", "data.files=/proc/self/mem", "--workers", 2)
    result = thinwire("train", *tiny, *unreadable, *mode, "--out", tmp_path / "run", status=1)
    assert "Input/output error" in one_line(result)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a file", "the folder"])
def test_a_name_that_is_not_utf_8_is_refused_at_the_start(tmp_path: Path, thinwire, tiny: list[str], what: str) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    more = ("--set", f"data.files={name}") if what == "a file" else ()
    out = tmp_path / "run" if what == "a file" else Path(name)
    Path(name).touch() if what == "a file" else None
    result = thinwire("train", *tiny, "--workers", 1, "--steps", 2, *more, "--out", out, status=2)
    assert "caf\\xe9" in one_line(result) and "is not UTF-8: rename" in result.stderr
    assert not out.exists()


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_without_its_metrics(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    run = tmp_path / "run"
    thinwire("train", *tiny, "--workers", 2, "--steps", 9, "--out", run)
    before = json.loads((run / "summary.json").read_text())
    (run / "metrics.jsonl").unlink()
    assert "no report.html" in thinwire("train", "--resume", run, "--set", "logging.report=true").stderr
    after = json.loads((run / "summary.json").read_text())
    unknown = (
        "seconds",
        "wire_sent",
        "wire_received",
    )  # the wire's are those of the checkpoint, and of finishing again
    assert {key: after[key] for key in after if key not in unknown} == {
        key: before[key] for key in before if key not in unknown
    }


def test_what_diverged_is_null_in_json(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    wild = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e38", "--set", "train.clip=0", "--steps", 8)
    held = ("--set", "data.holdout=0")  # then a resume takes the last loss from metrics.jsonl
    thinwire("compare", *tiny, *wild, *held, "--methods", "local_sgd", "--workers", 1, "--out", tmp_path / "all")
    run = tmp_path / "all" / "local_sgd"
    assert strict((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] is None
    assert strict((tmp_path / "all" / "compare.json").read_text())[0]["loss"] is None
    assert strict((run / "summary.json").read_text())["perplexity"] is None
    result = thinwire("train", "--resume", run, "--set", "logging.report=true")
    assert "nan" in result.stdout and (run / "report.html").exists()
    assert len(metrics(run)) == 8


@pytest.mark.parametrize("tail", [b'\x00\xff\xfe{"st', b"5\n", b"null\n", b'{"loss": 1}\n', b'{"step": "7"}\n'])
def test_what_is_no_record_ends_the_records(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert records.read(path) == [{"step": 1}, {"step": 2}]
    assert records.cut_after(path, 1) == {"step": 1} and path.read_bytes() == b'{"step": 1}\n'


def test_a_run_with_garbage_behind_its_records_goes_on(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    pytest.importorskip("plotly")
    common = ("train", *tiny, "--workers", 1, "--steps", 8)
    thinwire(*common, "--out", tmp_path / "whole")
    thinwire(*common, "--stop-at", 4, "--out", tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xe9\xff" * 40)
    thinwire("report", tmp_path / "run")
    thinwire("train", "--resume", tmp_path / "run")
    same_run(tmp_path / "whole", tmp_path / "run")


def test_cutting_makes_no_file_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    assert records.cut_after(path, 3) is None and list(tmp_path.iterdir()) == []
    path.write_text('{"step": 1}\n')
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        records.cut_after(path, 0)
    assert list(tmp_path.iterdir()) == [path] and records.read(path) == [{"step": 1}]
