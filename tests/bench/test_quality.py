"""The quality harness: lists that can be run, a driver that resumes, a page that says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import claims  # noqa: E402
import lm  # noqa: E402
import prepare_corpus  # noqa: E402
import quality  # noqa: E402

import thinwire as tw  # noqa: E402

LISTS = sorted((ROOT / "bench/runs").glob("*.json"))
TINY = {"preset": "tiny", "context": 16, "tokens": 256, "steps": 3, "lr": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens")
    for name, count in (("train", 4000), ("held", 1000)):
        np.random.default_rng(0).integers(0, 64, count).astype(np.uint16).tofile(path / f"{name}.bin")
    (path / "facts.json").write_text(json.dumps({"vocabulary": 64}))
    return path


def test_names_are_unique() -> None:
    files = [run.file for path in LISTS for run in quality.read_list(path)]
    assert len(files) == len(set(files)) > 0


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_listed_run_takes_a_step(path: Path, folder: Path) -> None:
    corpus = lm.Corpus(folder, "cpu", TINY["context"])
    for run in quality.read_list(path, **TINY):
        assert torch.isfinite(quality.Trial(run, corpus, compiled=False).step(0)).all(), run.name


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"defaults": {}, "runs": [{"name": "a", "outer": 1}]}')
    with pytest.raises(ValueError, match="unknown keys.*outer"):
        quality.read_list(tmp_path / "list.json")


def test_workers_double_and_newcomers_take_the_mean_state(folder: Path) -> None:
    run = quality.Run("double", "tw.desloc(2)", 2, double_at=2, **{**TINY, "steps": 4})
    trial = quality.Trial(run, lm.Corpus(folder, "cpu", TINY["context"]), compiled=False)
    for number in range(4):
        trial.step(number)
    assert trial.fleet.workers == 4
    first = [dict(inner[0].state_dict()["state"][0]) for inner in trial.optimizers]
    assert all(torch.equal(state["step"], first[0]["step"]) for state in first)


def test_a_start_without_delay(folder: Path) -> None:
    run = quality.Run("start", "tw.carry_diloco(2)", 2, start="tw.diloco(1)", start_steps=2, **TINY)
    trial = quality.Trial(run, lm.Corpus(folder, "cpu", TINY["context"]), compiled=False)
    for number in range(3):
        trial.step(number)
    assert trial.fleet.method.name == "carry_diloco"


def test_stacked_muon_is_muon() -> None:
    matrices = [torch.nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    copies = [torch.nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    stacked = lm.StackedMuon(matrices, lr=0.1, weight_decay=0.1)
    single = tw.Muon(copies, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for i, (matrix, copy) in enumerate(zip(matrices, copies, strict=True)):
            matrix.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + i))
            copy.grad = matrix.grad.clone()
        stacked.step()
        single.step()
    for matrix, copy in zip(matrices, copies, strict=True):
        assert torch.allclose(matrix, copy, atol=0.01)


def test_whole_novels_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    novel = "It was a dark night. " * 400
    (tmp_path / "novels.txt").write_text(prepare_corpus.SEPARATOR.join([novel] * 50 + ["The end of it all. " * 300]))
    command = ["prepare", str(tmp_path / "novels.txt"), "--out", str(tmp_path / "out"), "--vocabulary", "260"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(prepare_corpus, "HELD_OUT", 0.03)
    prepare_corpus.main()
    held = np.fromfile(tmp_path / "out/held.bin", dtype=np.uint16)
    assert 5700 * 0.2 < len(held) < 5700 + 20


@pytest.mark.xdist_group("processes")
def test_the_driver_waits_for_the_rate_and_resumes(tmp_path: Path, folder: Path) -> None:
    runs = [
        {"name": "rate 1", "method": "tw.ddp()", "workers": 1, "lr": 1e-3},
        {"name": "after", "method": "tw.diloco(2)", "workers": 2, "lr": "best of rate"},
    ]
    (tmp_path / "list.json").write_text(json.dumps({"defaults": {**TINY, "steps": 12}, "runs": runs}))
    command = [sys.executable, "bench/evidence.py", str(tmp_path / "list.json"), "--data", str(folder), "--plain"]
    command += ["--here", str(tmp_path / "here"), "--out", str(tmp_path / "out"), "--held", "1", "--seconds", "120"]
    outputs = [_run(command), _run(command)]
    records = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert {record["results"]["name"] for record in records} == {"rate 1", "after"}
    assert all(record["results"]["lr"] == 1e-3 and record["command"] for record in records)
    assert "started after" in outputs[0] and "started" not in outputs[1]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_claim_without_its_runs_is_not_run() -> None:
    claim = claims.Claim("a beats b", claims.gap_at_most("a", "b", 1.0))
    assert claim.judge(claims.Known({}))[0] == "not run"
    known = claims.Known({"a": {"finished": 3.0}, "b": {"finished": 2.0}})
    assert claim.judge(known) == ("does not hold", "+50.00% against b")
