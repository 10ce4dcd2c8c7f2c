"""What the words of the command line come to: who wins over whom, and what a start that fails leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import metrics
from thinwire.train import command
from thinwire.train.command import TrainRequest
from thinwire.train.config import tomllib


@pytest.fixture
def workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The number of workers that a command comes to; `text` is its config file."""

    def ask(*sets: str, text: str | None = None, **flags: object) -> int:
        path = tmp_path / "c.toml" if text is not None else None
        if path:
            path.write_text(text)
        command.train(TrainRequest(path, flags, list(sets), [], None, None, None, None, None, None, None, True))
        return int(tomllib.loads(capsys.readouterr().out)["workers"])

    return ask


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes on two nodes."""
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "6"), ("GROUP_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


def test_a_flag_wins_over_set_and_set_over_the_file(workers) -> None:
    assert workers("workers=4", workers=2, text="workers = 3") == 2
    assert workers("workers=4", text="workers = 3") == 4
    assert (workers(text="workers = 3"), workers(text="steps = 3"), workers()) == (3, 4, 4)


def test_under_torchrun_what_was_started_decides_where_the_file_does_not(workers, torchrun) -> None:
    assert (workers(), workers(text="steps = 3")) == (6, 6)
    assert workers("train.inside=fsdp", text="steps = 3") == workers(text="[train]\ninside = 'ddp'") == 2
    assert workers("train.inside=none", text="[train]\ninside = 'ddp'") == 6
    assert (workers(text="workers = 12"), workers("workers=3"), workers(workers=18)) == (12, 3, 18)


def test_the_lines_about_two_machines_name_the_workers_once(thinwire, tmp_path: Path, tiny: list[str]) -> None:
    said = thinwire("train", *tiny, "--set", "workers=3", "--steps", 2, "--out", tmp_path / "run").stdout
    assert len(metrics(tmp_path / "run")) == 2 and metrics(tmp_path / "run")[0]["workers"] == 3
    assert "--workers 2 --worker 0" in said and "workers=3" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--set", "data.files=absent.txt"),
        ("train", "--set", "model.preset=none"),
        ("train", "--out", "mine", "--set", "data.files=absent.txt"),
        ("compare", "--methods", "ddp", "--set", "method.evry=4"),
        ("compare", "--methods", "ddp", "--set", "model.preset=none"),
    ],
)
def test_a_start_that_fails_leaves_no_folder(thinwire, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    thinwire(*arguments, status=2)
    assert not list(tmp_path.glob("runs/*")) and not (tmp_path / "mine").exists()


def test_a_folder_that_was_there_before_stays(thinwire, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    thinwire("train", "--out", "mine", "--set", "data.files=absent.txt", status=2)
    assert (tmp_path / "mine").is_dir()
