"""The comparisons with peers and the scaling runs start, measure something tiny, and write what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("bench")
ROOT = Path(__file__).parents[2]


def run(bench: str, out: Path, *options: str) -> Any:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    command = [sys.executable, f"bench/{bench}.py", "--quick", *options, "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode and ("ip netns" in done.stderr or "tc -n" in done.stderr):
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert {"command", "seed", "versions", "machine", "results"} <= record.keys()
    return record["results"]


@pytest.mark.slow
def test_a_peer_on_a_line(tmp_path: Path) -> None:
    """Both send what a round of two workers takes, a copy of the model each, and somewhat more."""
    pytest.importorskip("torchft")
    options = ("--lines", "1000", "--matches", "diloco")
    ours, theirs = run("peers", tmp_path / "out.json", *options)["matches"]
    assert (ours["contender"], theirs["contender"]) == ("thinwire diloco", "torchft diloco")
    assert ours["ours_over_it"] is None and theirs["ours_over_it"]["round"]["median"] > 0
    for each in (ours, theirs):
        assert each["round"]["median"] > 0 and 0 < each["waiting"]["median"] < 1
        assert 1 <= each["bytes"]["median"] / each["copy"] < 2
        assert each["memory"]["peak"] > each["memory"]["bare_peak"]


def test_scaling(tmp_path: Path) -> None:
    """That the engine and the bare loop compute the same is checked by the bench itself."""
    found = run("scaling", tmp_path / "out.json")
    (processes,), (tensors,) = found["processes"], found["tensors"]
    assert processes["processes"] == 2 and processes["bytes"]["median"] >= processes["counted"] >= processes["message"]
    assert tensors["engine"]["median"] > 0 and tensors["bare"]["median"] > 0
