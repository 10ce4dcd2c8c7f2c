"""What every checkout must hold true: the commands can run, and what they write stays out of git."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")

WRITTEN = [  # by make train, make test, make lint and a build
    ".venv/bin/python",
    "runs/default/metrics.jsonl",
    "build/lib/thinwire/fleet.py",
    "dist/thinwire.whl",
    "thinwire.egg-info/PKG-INFO",
    "thinwire/__pycache__/fleet.pyc",
    ".pytest_cache/README.md",
    ".mypy_cache/3.11/cache",
    ".ruff_cache/cache",
    ".hypothesis/examples/one",
]


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if name]


def test_ci_entry_is_executable() -> None:
    entry = ROOT / ".ci" / "run"
    assert os.access(entry, os.X_OK)
    assert "make test" in entry.read_text()
    assert subprocess.run(["bash", "-n", entry]).returncode == 0


@needs_git
def test_ci_entry_is_executable_in_git_too() -> None:
    (entry,) = git("ls-files", "-z", "--stage", ".ci/run")
    assert entry.startswith("100755")


@needs_git
@pytest.mark.parametrize("path", WRITTEN)
def test_what_commands_write_is_ignored(path: str) -> None:
    assert subprocess.run(["git", "check-ignore", "--quiet", "--no-index", path], cwd=ROOT).returncode == 0


@needs_git
def test_nothing_tracked_is_something_that_commands_write() -> None:
    assert git("ls-files", "-z", "--cached", "--ignored", "--exclude-standard") == []


@needs_git
def test_no_project_file_is_tied_to_one_machine() -> None:
    """No index address and no absolute home path in what sets the project up."""
    tied = re.compile(r"index-url|find-links|/(home|root|Users)/")
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run"):
        assert not tied.search((ROOT / name).read_text()), name


def test_set_up_is_pinned_and_users_are_free() -> None:
    assert re.search(r"^torch==\d", (ROOT / "constraints.txt").read_text(), re.M)
    assert re.search(r'^dependencies = \["torch>=2\.7"\]', (ROOT / "pyproject.toml").read_text(), re.M)
