"""The benches start, measure something tiny, and write what they promise. Numbers are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(bench: str, out: Path, *options: str) -> dict:
    command = [sys.executable, f"bench/{bench}.py", *options, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert {"command", "seed", "versions", "machine", "results"} <= record.keys()
    return record["results"]


def test_steps_on_which_nothing_is_due(tmp_path: Path) -> None:
    found = run("overhead", tmp_path / "out.json", "--parts", "idle", "--parameters", "20000", "--rounds", "3")
    assert all(result["ratio"] > 1 and result["hooks"]["median"] > 0 for result in found["idle"].values())


@pytest.mark.xdist_group("bench")
def test_a_round_against_its_parts(tmp_path: Path) -> None:
    sizes = ("--parameters", "20000", "--tensors", "4", "--rounds", "2", "--profile", "1")
    found = run("overhead", tmp_path / "out.json", "--parts", "round", *sizes)["round"]["4"]
    assert found["ratios"]["parts"]["total"]["median"] > 0
    assert found["profile"]
    assert "torchft" in found["ratios"] or found["torchft"].startswith("skipped")


def test_the_toy_of_desloc(tmp_path: Path) -> None:
    found = run("toy_desloc", tmp_path / "out.json", "--workers", "8", "--steps", "700")
    methods = found["methods"]
    assert methods["DES-LOC"]["most_apart"] < 0.1 * found["way"]
    assert methods["DES-LOC"]["bytes_sent"] < methods["Local Adam"]["bytes_sent"]


@pytest.mark.slow
@pytest.mark.xdist_group("bench")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_memory_at_the_peak(tmp_path: Path) -> None:
    sizes = ("--parameters", "40000", "--layers", "4", "--workers", "1", "--methods", "diloco")
    (found,) = run("memory", tmp_path / "out.json", *sizes)["methods"]
    assert found["measured"] > 0 and found["predicted"] > 0


@pytest.mark.slow
@pytest.mark.xdist_group("bench")
def test_overlap_on_a_shaped_line(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    options = ("--workers", "2", "--rates", "1000", "--methods", "ddp", "--pace", "0.01")
    try:
        (found,) = run("overlap", tmp_path / "out.json", *options)
    except AssertionError as error:
        if "ip netns" in str(error) or "tc -n" in str(error):
            pytest.skip(f"network namespaces are not permitted here: {str(error).splitlines()[-1]}")
        raise
    assert 0 < found["inside"] < 1 and found["planned"] <= 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_overlap_says_that_it_needs_root(tmp_path: Path) -> None:
    program = "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['overlap']; sys.path.insert(0, 'bench'); "
    program += "runpy.run_path('bench/overlap.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "root" in done.stderr
