"""A user's type checker sees the types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

USER = """
import torch
import thinwire as tw

model = torch.nn.Linear(2, 2)
fleet = tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tw.desloc(every=8))
reveal_type(fleet.bytes_sent)
reveal_type(fleet.consensus())
reveal_type(tw.cost(tw.ddp(), model, workers=2).bytes(3))
reveal_type(tw.Group.connect("127.0.0.1:1", worker=0, workers=2))
tw.desloc(every="often")
tw.attach(model)
"""


def test_a_users_mypy_sees_the_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run([*command, "user.py"], cwd=tmp_path, capture_output=True, text=True)
    assert [line.split("user.py:")[1] for line in done.stdout.splitlines() if "user.py" in line] == [
        '7: note: Revealed type is "int"',
        '8: note: Revealed type is "dict[str, torch._tensor.Tensor]"',
        '9: note: Revealed type is "int"',
        '10: note: Revealed type is "thinwire.group.Group"',
        '11: error: Argument "every" to "desloc" has incompatible type "str"; expected "int"  [arg-type]',
        '12: error: Missing positional arguments "optimizer", "method" in call to "attach"  [call-arg]',
    ]
