"""Checkpoints that a kill, a lost peer or another number of workers left, and what a resume makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.train.conftest import TINY, write_text
from tests.train.test_run import same_run
from thinwire.train import checkpoint, data, run
from thinwire.train import config as configs
from thinwire.train.config import Config
from thinwire.train.errors import UserError
from thinwire.train.launch import in_one_process
from thinwire.train.notes import Notes
from thinwire.train.place import Place, alone
from thinwire.train.progress import talker
from thinwire.train.resume import Keeper
from thinwire.train.run import Order, PeerGone


def configured(folder: Path, **more: Any) -> Config:
    """A tiny run of 10 steps and two checkpoints; `train__keep=1` is `train.keep=1`, and None leaves a key out."""
    config = Config(workers=2, steps=10)
    pairs = TINY | {"data.files": str(write_text(folder))} | {key.replace("__", "."): more[key] for key in more}
    for key, value in sorted(pairs.items(), key=lambda pair: pair[0] != "method.name"):
        if value is not None:
            configs.override(config, f"{key}={value}")
    return config


def train(config: Config, folder: Path, stop_at: int | None = None) -> Path:
    folder.mkdir()
    in_one_process(config, Order(folder, stop_at=stop_at, quiet=True))
    return folder


def resume(folder: Path, **more: Any) -> None:
    config = configs.load(folder / "config.toml")
    for key, value in more.items():
        configs.assign(config, key.replace("__", "."), value)
    in_one_process(config, Order(folder, resume=True))


def manifests(folder: Path, step: int) -> list[str]:
    return [path.read_text() for path in sorted(checkpoint.folder_of(folder, step).glob("*/manifest.json"))]


def test_a_peer_lost_while_the_run_finishes_leaves_the_last_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the model holds the mean, and finishing that again is another model."""
    method = {"method__name": "eager_diloco", "steps": 11}
    whole = train(configured(tmp_path, **method), tmp_path / "whole")

    def lost(trainer: object) -> dict[str, Any]:
        raise tw.PeerLost("worker 1 is gone", [1])

    with monkeypatch.context() as patched, pytest.raises(PeerGone, match="saved .*checkpoint-000011"):
        patched.setattr(run, "summarise", lost)
        train(configured(tmp_path, **method), tmp_path / "run")
    assert manifests(tmp_path / "run", 11) == manifests(whole, 11)
    resume(tmp_path / "run")
    same_run(whole, tmp_path / "run")


def test_a_step_whose_gradients_did_not_meet_is_taken_with_the_same_batches_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"method__name": "ddp", "method__every": None}
    whole = train(configured(tmp_path, **method), tmp_path / "whole")
    step = tw.Fleet.step

    def lost(fleet: tw.Fleet) -> None:
        if fleet.steps == 6:
            raise tw.PeerLost("worker 1 is gone", [1])
        step(fleet)

    with monkeypatch.context() as patched, pytest.raises(PeerGone, match="after step 6: .*checkpoint-000006"):
        patched.setattr(tw.Fleet, "step", lost)
        train(configured(tmp_path, **method), tmp_path / "run")
    resume(tmp_path / "run")
    same_run(whole, tmp_path / "run")


@pytest.mark.parametrize(("processes", "kept"), [(1, [8]), (2, [8, 4])])
def test_among_processes_two_checkpoints_are_kept_and_who_is_alone_drops_none(
    tmp_path: Path, processes: int, kept: list[int]
) -> None:
    """Some have written the newest, others not yet: what all have is the one before."""
    config = configured(tmp_path, train__keep=1)
    data.resolve(config)
    trainer = run._set_up(config, alone(config))
    trainer.open_fleet(config.method)
    place = Place([0], torch.device("cpu"), tw.Local(), Notes(0, processes))
    keeper = Keeper(tmp_path, config, place, talker(False, 1, 0))
    for trainer.step in (4, 8):
        keeper.save(trainer)
    assert checkpoint.steps_in(tmp_path) == kept
    trainer.step = 9
    keeper.save_alone(trainer)
    assert checkpoint.steps_in(tmp_path) == [9, *kept]


def test_parts_of_workers_that_are_no_more_are_dropped(tmp_path: Path) -> None:
    folder = train(configured(tmp_path, workers=4, train__keep=1), tmp_path / "run", stop_at=5)
    resume(folder, workers=2)
    assert checkpoint.steps_in(folder) == [10]
    resume(folder, workers=1)  # writes the same step again
    assert checkpoint.parts_in(folder, 10) == ["worker-0"]


def test_part_of_the_workers_is_no_checkpoint_for_another_number(tmp_path: Path, capsys) -> None:
    """It was killed between two parts: the mean of the others would be half a run."""
    folder = train(configured(tmp_path, workers=4), tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-000010" / "worker-3")
    resume(folder, workers=2, steps=12)
    said = capsys.readouterr().err
    assert "refused checkpoint-000010/worker-3" in said and "at step 5" in said


def test_parts_of_two_numbers_of_workers_are_no_checkpoint(tmp_path: Path, capsys) -> None:
    """It was killed while it wrote a step again with fewer workers."""
    folder, other = (train(configured(tmp_path, workers=count), tmp_path / str(count)) for count in (4, 2))
    shutil.rmtree(folder / "checkpoint-000010" / "worker-0")
    shutil.copytree(other / "checkpoint-000010" / "worker-0", folder / "checkpoint-000010" / "worker-0")
    resume(folder, workers=2)
    said = capsys.readouterr().err
    assert "is of a run with 4 workers, other parts of one with 2" in said and "at step 5" in said


def test_a_kill_between_the_parts_of_the_first_checkpoint_begins_at_step_0(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = train(configured(tmp_path), tmp_path / "whole"), tmp_path / "run"
    save_part = checkpoint.save_part

    def killed(run: Path, step: int, part: str, *rest: Any) -> None:
        if part == "worker-1":
            raise KeyboardInterrupt
        save_part(run, step, part, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoint, "save_part", killed)
        train(configured(tmp_path), folder)
    assert checkpoint.parts_in(folder, 5) == ["worker-0"]
    resume(folder)
    assert "no checkpoint yet: it begins at step 0" in capsys.readouterr().err
    same_run(whole, folder)
    assert not list(folder.glob(".*.unsaved"))


@pytest.mark.xdist_group("train")
def test_processes_of_which_one_had_written_no_part_yet_begin_at_step_0(tmp_path: Path, thinwire) -> None:
    folder = train(configured(tmp_path), tmp_path / "run", stop_at=5)
    shutil.rmtree(folder / "checkpoint-000005" / "worker-1")
    checkpoint.mark_unsaved(folder, ["worker-1"])
    assert "begins at step 0" in thinwire("train", "--resume", folder, "--processes", 2).stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("workers", [2, 3], ids=["as many workers", "another number"])
def test_a_part_that_was_saved_and_is_missing_is_refused_and_the_others_are_kept(
    tmp_path: Path, capsys, workers: int
) -> None:
    folder = train(configured(tmp_path), tmp_path / "run", stop_at=5)
    shutil.rmtree(folder / "checkpoint-000005" / "worker-1")
    before = contents(folder)
    with pytest.raises(UserError, match="000005 holds worker 0's part of 2, but not worker 1's.*--connect.*--out$"):
        resume(folder, workers=workers)
    assert contents(folder) == before and capsys.readouterr().err == ""


def test_processes_refuse_a_missing_part_alike(tmp_path: Path, thinwire) -> None:
    """Process 0 has its part: it is told by process 1."""
    folder = train(configured(tmp_path), tmp_path / "run", stop_at=5)
    shutil.rmtree(folder / "checkpoint-000005" / "worker-1")
    before = contents(folder)
    (line,) = thinwire("train", "--resume", folder, "--processes", 2, status=2).stderr.splitlines()
    assert "holds worker 0's part of 2, but not worker 1's" in line
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("train --workers 2 --steps 9 --out a", ""),
        ("train --workers=4 --processes=2", "--processes 2"),
        (
            "train --worker 1 --out a --connect=h:1 --workers 2 --local train.batch=2",
            "--connect h:1 --workers 2 --worker 1",
        ),
        (
            "train --join h:1 --min-workers 2 --workers 3 --address 10.0.0.2 --secret-file s",
            "--join h:1 --secret-file s --address 10.0.0.2 --min-workers 2",
        ),
    ],
)
def test_a_run_is_gone_on_with_as_it_was_launched(line: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["thinwire", *line.split()])
    assert run._again(Path("my run")) == " ".join(["thinwire train --resume 'my run'", *kept.split()])


def test_a_stray_file_in_a_part_is_not_read(tmp_path: Path) -> None:
    whole = train(configured(tmp_path), tmp_path / "whole")
    folder = train(configured(tmp_path), tmp_path / "run", stop_at=5)
    (folder / "checkpoint-000005" / "worker-0" / "notes.txt").write_text("")
    (folder / "checkpoint-000005" / "worker-of-mine").mkdir()
    resume(folder)
    same_run(whole, folder)


@pytest.mark.parametrize("text", ["[]", "{}", '{"files": [], "workers": 2}', '{"files": {"a": 1}, "workers": 2}', "1"])
def test_a_manifest_of_other_json_is_damage(tmp_path: Path, text: str) -> None:
    part = tmp_path / "checkpoint-000005" / "worker-0"
    part.mkdir(parents=True)
    (part / "manifest.json").write_text(text)
    assert checkpoint.workers_of(tmp_path, 5) is None
    with pytest.raises(checkpoint.Damaged, match="checkpoint-000005/worker-0 is missing or has no manifest"):
        checkpoint.verify(tmp_path, 5, "worker-0", None)


def test_a_part_that_is_written_again_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    for number, content in ((0, "old"), (1, "new"), (2, "newer")):
        killed = number == 1

        def renamed(self: Path, target: Path, killed: bool = killed) -> Path:
            if killed and self.suffix == ".draft":
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", renamed)
        try:
            checkpoint.save_part(tmp_path, 5, "worker-0", 1, {"state.json": content})
        except KeyboardInterrupt:
            checkpoint.put_back(tmp_path)
            assert checkpoint.load_part(tmp_path, 5, "worker-0") == {"state.json": "old"}
        checkpoint.verify(tmp_path, 5, "worker-0", 1)
    assert checkpoint.load_part(tmp_path, 5, "worker-0") == {"state.json": "newer"}
    assert [path.name for path in (tmp_path / "checkpoint-000005").iterdir()] == ["worker-0"]
