"""A user's type checker sees the types: the package as it is installed says that it has them (`py.typed`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thinwire

pytest.importorskip("mypy")

USER = """
import torch
import thinwire as tw

model = torch.nn.Linear(2, 2)
fleet = tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tw.desloc(every=8))
reveal_type(fleet.bytes_sent)
reveal_type(fleet.stats())
reveal_type(tw.cost(tw.ddp(), model, workers=2).bytes(3))
reveal_type(tw.Group.connect("127.0.0.1:1", worker=0, workers=2))
tw.desloc(every="often")
tw.attach(model)
"""
SETTINGS = """
[mypy]
[mypy-torch.*]
follow_imports = skip
"""  # reading torch whole takes half a minute


def environment(folder: Path) -> Path:
    """One with thinwire installed, and torch from where it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "thinwire").symlink_to(Path(thinwire.__file__).parent)
    (packages / "torch").symlink_to(Path(torch.__file__).parent)
    return folder / "bin" / "python"


def test_a_users_mypy_sees_the_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--python-executable", environment(tmp_path / "env"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = [line.removeprefix("user.py:") for line in done.stdout.splitlines() if line.startswith("user.py:")]
    assert said == [
        '7: note: Revealed type is "int"',
        '8: note: Revealed type is "dict[str, Any]"',
        '9: note: Revealed type is "int"',
        '10: note: Revealed type is "thinwire.group.Group"',
        '11: error: Argument "every" to "desloc" has incompatible type "str"; expected "int"  [arg-type]',
        '12: error: Missing positional arguments "optimizer", "method" in call to "attach"  [call-arg]',
    ]
