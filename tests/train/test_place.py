"""Where a process stands: what it says while the others have not come."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from thinwire.train import place
from thinwire.train.config import Config, Train
from thinwire.train.errors import UserError


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What was said while a worker came `late` seconds after the first."""
    monkeypatch.setattr(place, "PATIENCE", 0.3)

    def wait(late: float) -> str:
        store = dist.HashStore()
        store.set("processes/0", "1")
        coming = threading.Timer(late, store.set, ("processes/1", "1"))
        coming.start()
        place._wait_for_all(store, ["processes/0", "processes/1"], 60, "10.0.0.1:29500")
        coming.join()
        return capsys.readouterr().err

    return wait


def test_who_waits_says_once_for_whom_and_where(told) -> None:
    assert told(late=1.5) == "waiting for worker 1 at 10.0.0.1:29500\n"


def test_who_waits_a_moment_says_nothing(told) -> None:
    assert told(late=0.0) == ""


def test_processes_inside_a_worker_need_several_processes() -> None:
    with pytest.raises(UserError, match="start it with torchrun"):
        place.alone(Config(train=Train(inside="fsdp")))
