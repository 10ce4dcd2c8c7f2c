"""What is used only where it is installed: Hugging Face datasets, Weights & Biases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.train.conftest import arguments_of, metrics, write_text
from thinwire.cli import EXTRA
from thinwire.train.config import tomllib

MODULES = {"scikit-learn": "sklearn"}  # where a package is imported by another name


def test_each_package_of_the_extra_is_asked_for_in_one_line_when_it_is_missing() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    packages = [re.split(r"[<>=;]", text)[0] for text in project["project"]["optional-dependencies"]["train"]]
    assert {MODULES.get(name, name) for name in packages} == {*EXTRA, "typer"}


def test_a_hugging_face_dataset_from_disk(tmp_path: Path, thinwire) -> None:
    datasets = pytest.importorskip("datasets")
    lines = write_text(tmp_path).read_text().splitlines()
    datasets.Dataset.from_dict({"body": lines}).save_to_disk(tmp_path / "lines")
    keys = {"data__files": "", "data__kind": "hf", "data__dataset": tmp_path / "lines", "data__column": "body"}
    thinwire("train", *arguments_of(tmp_path, **keys), "--steps", 6, "--out", tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_weights_and_biases_offline(tmp_path: Path, thinwire, tiny: list[str]) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    thinwire("train", *tiny, "--set", "logging.wandb=demo", "--steps", 6, "--out", run, env={"WANDB_MODE": "offline"})
    assert list((run / "wandb").glob("offline-run-*/*.wandb"))
