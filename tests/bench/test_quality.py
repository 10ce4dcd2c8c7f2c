"""The quality harness: lists that can be run, a driver that resumes, a page that says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import claims  # noqa: E402
import fill  # noqa: E402
import known as knowledge  # noqa: E402
import lm  # noqa: E402
import plots  # noqa: E402
import prepare_corpus  # noqa: E402
import quality  # noqa: E402
import quality_resnet  # noqa: E402
import speed_tables  # noqa: E402
import write_results  # noqa: E402

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


def test_slow_adam_follows_its_equation() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    slow = lm.SlowAdam([{"params": [parameter], "weight_decay": 0.5}], 0.1, (0.99, 0.95), share=0.9)
    x, u, v = torch.ones(5), torch.zeros(5), torch.zeros(5)
    for step in range(1, 5):
        g = parameter.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
        u, v = 0.99 * u + 0.01 * g, 0.95 * v + 0.05 * g * g
        direction = 0.1 * g + 0.9 * u / (1 - 0.99**step)
        x = x * (1 - 0.1 * 0.5) - 0.1 * direction / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        slow.step()
    assert torch.allclose(parameter, x, atol=1e-6)


def test_whole_novels_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    novel = "It was a dark night. " * 400
    (tmp_path / "novels.txt").write_text(prepare_corpus.SEPARATOR.join([novel] * 50 + ["The end of it all. " * 300]))
    command = ["prepare", str(tmp_path / "novels.txt"), "--out", str(tmp_path / "out"), "--vocabulary", "260"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(prepare_corpus, "HELD_OUT", 0.03)
    prepare_corpus.main()
    held = np.fromfile(tmp_path / "out/held.bin", dtype=np.uint16)
    assert 5700 * 0.2 < len(held) < 5700 + 20


@pytest.mark.slow
@pytest.mark.xdist_group("bench")
def test_the_driver_waits_for_the_rate_and_resumes(tmp_path: Path, folder: Path) -> None:
    runs = [
        {"name": "trial 1", "method": "tw.ddp()", "workers": 1, "lr": 1e-3},
        {"name": "after", "method": "tw.diloco(2)", "workers": 2, "lr": "best of trial"},
    ]
    (tmp_path / "list.json").write_text(json.dumps({"defaults": {**TINY, "steps": 12}, "runs": runs}))
    command = [sys.executable, "bench/evidence.py", str(tmp_path / "list.json"), "--data", str(folder), "--plain"]
    command += ["--here", str(tmp_path / "here"), "--out", str(tmp_path / "out"), "--held", "1", "--seconds", "120"]
    outputs = [_run(command), _run(command)]
    records = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert {record["results"]["name"] for record in records} == {"trial 1", "after"}
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
    assert claim.judge(losses(a=3.0, b=2.0)) == ("does not hold", "+50.00% against b")


def losses(**finished: float) -> claims.Known:
    """Names with `_again` are those of the second seed."""
    return claims.Known({name.replace("_again", knowledge.AGAIN): {"finished": f} for name, f in finished.items()})


def test_both_seeds_are_judged_where_both_are_known() -> None:
    test = claims.gap_at_most("a", "b", 1.0)
    assert test(losses(a=2.0, b=2.0, a_again=9.0)) == ("holds", "+0.00% against b")
    both = losses(a=2.0, b=2.0, a_again=2.03, b_again=2.0)
    assert test(both) == ("holds on average", "+0.00% and +1.50% (two seeds) against b")
    both.results["a"]["finished"] = 2.02
    assert test(both)[0] == "does not hold"


def test_the_lowest_point_of_a_curve() -> None:
    known = claims.Known({"a": {"finished": 2.0}, "b": {"finished": 2.0, "curve": [{"held": 1.6}, {"held": 2.0}]}})
    assert claims.gap_at_most("a", "b", 1.0, lowest=True)(known) == ("does not hold", "+25.00% against the lowest of b")


def test_noise_is_what_another_seed_changes() -> None:
    known = losses(a=2.0, a_again=2.02, b=2.0, b_again=1.94, c=2.0, c_again=2.004, d=2.0)
    assert known.noise("a") == pytest.approx(1.0)
    assert known.noise("a", "b") == pytest.approx(3.0)
    assert known.noise("a", "d") == pytest.approx(1.0)  # the median, if one has no second seed
    known.results["e"] = {"finished": 2.0, "preset": "another"}
    with pytest.raises(claims.NotRun, match="e's size"):
        known.noise("e")


def test_what_is_within_noise_is_the_same() -> None:
    known = losses(a=2.0, a_again=2.01, b=2.002, b_again=2.008)
    for name, result in known.results.items():
        result["bytes_sent"] = 100 if name.startswith("b") else 50
    assert claims.same("a", "b", 1.9)(known)[0] == "holds"
    assert claims.same("a", "b", 2.1)(known)[0] == "does not hold"
    assert claims.worse("a", "b")(known)[0] == "does not hold"
    known.results["a"]["finished"] = 2.1
    assert claims.same("a", "b", 1.9)(known)[0] == "holds on average"  # its seeds differ by 4%
    known.results["a, seed 1"]["finished"] = 2.1
    assert claims.same("a", "b", 1.9)(known)[0] == "does not hold"
    assert claims.worse("a", "b")(known)[0] == "holds"


def test_decoupled_momentum_must_lie_between_the_periods() -> None:
    runs = {"diloco 128": (3.7, 1600), "decoupled 128 mean": (3.9, 100), "diloco 512": (4.0, 400)}
    known = claims.Known({name: {"finished": loss, "bytes_sent": sent} for name, (loss, sent) in runs.items()})
    assert claims.between_the_periods("decoupled 128 mean")(known)[0] == "holds"
    known.results["decoupled 128 mean"]["finished"] = 4.1
    assert claims.between_the_periods("decoupled 128 mean")(known)[0] == "does not hold"
    known.results["decoupled 128 mean"].update(finished=3.9, bytes_sent=101)
    assert claims.between_the_periods("decoupled 128 mean")(known)[0] == "does not hold"


def test_a_gap_that_is_halved() -> None:
    known = losses(a=2.05, b=2.1, base=2.0)
    assert claims.gap_halved("a", "b", "base")(known)[0] == "holds"
    known.results["a"]["finished"] = 2.06
    assert claims.gap_halved("a", "b", "base")(known) == ("does not hold", "+3.00% instead of +5.00% against base")


def test_the_best_of_a_prefix_is_judged() -> None:
    known = claims.Known({"1000x a": {"finished": 2.1}, "1000x b": {"finished": 2.01}, "ddp": {"finished": 2.0}})
    assert claims.best_at_most("1000x", "ddp", 1)(known) == ("holds", "best: 1000x b, +0.5% against ddp")
    assert claims.best_at_most("1000x", "ddp", 0.4)(known)[0] == "does not hold"


def test_received_is_against_ddp_among_as_many() -> None:
    run = {"workers": 4, "parameters": 100, "steps": 10, "wire_received": 60, "bytes_sent": 40}
    known = claims.Known({"a": run})
    assert known.fewer("a") == 100
    assert known.fewer_received("a") == 2 * 3 * 4 * 100 / 4 * 10 / 60  # a ring takes 2 (M - 1) / M copies


def test_numbers_are_put_into_the_prose() -> None:
    known = claims.Known({"a b": {"finished": 3.0}, "c": {"finished": 2.0}, "d": {"finished": 1.99}})
    text = "- it gives <a b : c> and <d :\n  c>,\n  from <c>\n- more, <?e : c>"
    wanted = "- it gives +50.0% and -0.50%, from 2.0000\n- more, not run"
    assert fill.flow(fill.filled(text, known)) == wanted
    with pytest.raises(claims.NotRun, match="e"):
        fill.filled("<e>", known)


def test_other_numbers_of_a_run() -> None:
    curve = [{"train": 4.0, "held": 2.0}, {"train": 1.5, "held": 2.5}]
    known = claims.Known({"a b": {"finished": 2.5, "curve": curve, "second_test": 5.0}})
    text = "<train of a b>, <lowest of a\nb>, <second of a b>, <a b : lowest of a b>"
    assert fill.filled(text, known) == "1.5000, 2.0000, 5.0000, +25.0%"


@pytest.fixture
def all_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if every run of every list had a result."""
    known = write_results.read_results()
    listed = [run for path in LISTS for run in quality.read_list(path) if run.name not in known]
    made_up = {run.name: {**known["muon 100M two bits 64"], **vars(run), "lr": 1e-3} for run in listed}
    monkeypatch.setattr(write_results, "read_results", lambda: {**known, **made_up})
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    runs = [
        {"method": name, "workers": workers, "seed": 0, "loss": 0.3, "accuracy": 0.9, "bytes_sent": 1_000_000}
        for name in quality_resnet.METHODS
        for workers in (2, 4, 8)
    ]
    (tmp_path / "resnet.json").write_text(json.dumps({"results": {"runs": runs}}))
    monkeypatch.setattr(write_results, "RESNET", replace(speed_tables.RESNET, file=str(tmp_path / "resnet")))


@pytest.mark.usefixtures("all_run")
def test_the_pages_take_every_result_that_may_come() -> None:
    known = write_results.everything()
    page, runs = write_results.page(), write_results.runs_page()
    assert "| paper | 0.300 (90.0%), 1.00 MB | 0.300 (90.0%), 1.00 MB | 0.300 (90.0%), 1.00 MB |" in runs
    every = [claim for topic in write_results.TOPICS for claim in topic.claims + topic.cpu_claims]
    assert [claim.text for claim in every if claim.judge(known)[0] == "not run"] == []
    assert "\nNot run:" not in runs and "| not run |" not in page


def test_the_pages_and_their_pictures_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    for name, write in write_results.PAGES.items():
        assert write() == (write_results.DOCS / name).read_text(), f"{name}: run python bench/write_results.py"
    shown = {path.name for path in (ROOT / "docs/results").glob("*.svg")}
    assert shown == {path.name for path in tmp_path.iterdir()}


def test_a_speed_table_without_its_file_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(write_results, "SPEED", speed_tables.peer_tables())
    assert "each peer's round beside ours (peers)" in write_results.not_measured()
    spread = {"low": 0.1, "median": 0.2, "high": 0.3}
    match = {"contender": "torchft", "workers": 2, "size": "30M", "line": "20", "copy": 10, "ours_over_it": None}
    match |= {"round": spread, "waiting": spread, "bytes": spread, "memory": {"extra_copies": 3.0}}
    record = {"command": "python bench/peers.py --workers 2", "results": {"matches": [match]}}
    (tmp_path / "peers_2.json").write_text(json.dumps(record))
    (found,) = speed_tables.peer_tables()
    assert "| torchft | 2 | 30M | 20 | 200 (100 .. 300) |  | 20.0% | 0.020 | 3.00 |" in found.section()
    assert "`sudo python bench/peers.py --workers 2`" in found.section() and not found.missing
