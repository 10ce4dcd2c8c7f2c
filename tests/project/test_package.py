"""The wheel and the sdist: what they say, what they hold, and that an install is light and imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import torch

# one build serves the whole file
pytestmark = pytest.mark.xdist_group("package")

ROOT = Path(__file__).parents[2]
EXTRAS = {"train", "elastic", "hf", "lightning", "dev", "docs"}
OPTIONAL = {"lightning", "matplotlib", "plotly", "rich", "sklearn", "tensorboard", "torchft", "transformers", "typer"}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def project_files() -> list[Path]:
    """All that is or could be committed: building from a copy of it leaves the tree as it was."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, the wheel made from the sdist, with the setuptools at hand: no isolation, no download."""
    source = tmp_path_factory.mktemp("source")
    for name in project_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("thinwire-*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "thinwire"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_core_needs_torch_and_nothing_else(metadata: Message) -> None:
    """A lower bound and no more: an installed torch satisfies it and is left alone."""
    needs = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert needs == ["torch>=2.7"]


def test_wheel_holds_the_package_and_only_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [archive.read(n).decode() for n in names if n.endswith("entry_points.txt")]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"thinwire"}
    assert "thinwire/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "thinwire = thinwire.cli:main" in entry_points
    sources = {str(name) for name in project_files() if name.parts[0] == "thinwire" and name.suffix == ".py"}
    assert sources <= names


def test_sdist_builds_the_same_wheel_and_holds_the_licence(dist: Path) -> None:
    (found,) = dist.glob("thinwire-*.tar.gz")
    with tarfile.open(found) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "pyproject.toml", "thinwire/py.typed"} <= inside


LOOK = """
import importlib.metadata, sys
sys.path.append({site!r})  # where torch is; the .pth file that leads to the checkout is not read from here
import thinwire
print(list(thinwire.__path__)[0])
print(importlib.metadata.version("thinwire"))
print(sorted({optional!r} & set(sys.modules)))
"""


def test_wheel_installs_into_a_fresh_environment_and_imports(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", fresh, cwd=tmp_path)
    python = fresh / "bin" / "python"
    run(sys.executable, *f"-m pip --python {python} install --no-index --no-deps".split(), wheel, cwd=tmp_path)
    code = LOOK.format(site=str(Path(torch.__file__).parents[1]), optional=OPTIONAL)
    where, version, dragged_in = run(python, "-c", code, cwd=tmp_path, PYTHONPATH="").splitlines()
    assert where.startswith(str(fresh))
    assert wheel.name.split("-")[1] == version
    assert dragged_in == "[]", "importing the core must not import what only an extra installs"


def test_an_installed_torch_is_left_alone(wheel: Path, tmp_path: Path) -> None:
    """With no index at hand, pip could not replace torch if it wanted to: it finds that it need not."""
    plan = run(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", wheel, cwd=tmp_path)
    assert "torch-" not in plan
