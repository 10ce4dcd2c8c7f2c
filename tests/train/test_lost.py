"""A process that dies, or is stopped, while the others wait for its note: who notices, how soon, and what is left.

`train.wait` is 600 s everywhere unless a test says otherwise, so whatever ends in these tests has noticed by itself.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import free_port
from tests.train.conftest import Process, ended, metrics
from tests.train.test_run import steps_done, until
from thinwire.train import checkpoint
from thinwire.train.launch import _lost_among

pytestmark = pytest.mark.xdist_group("train")

# workers meet at their notes long before they meet in an exchange
RARE = ("method.every=100000", "train.eval_every=0", "train.checkpoint_every=0", "logging.every=5")
LONG = ("--steps", 1000000, *(part for setting in RARE for part in ("--set", setting)))
HOST_TOO = [pytest.param(0, marks=pytest.mark.slow), 1]  # process 0 hosts what they meet at
SOON = 90  # seconds; far less than `train.wait`, far more than it takes


@pytest.fixture
def sites(tmp_path: Path, start: Callable[..., Process], tiny: list[str]) -> Callable[..., list[Process]]:
    """Two sites that have taken some steps together."""

    def begin(*arguments: object) -> list[Process]:
        there = ("--connect", f"127.0.0.1:{free_port()}", "--workers", 2)
        common = ("train", *tiny, *LONG, *arguments, *there)
        pair = [start(*common, "--worker", i, "--out", tmp_path / f"site-{i}") for i in range(2)]
        until(lambda: all(steps_done(tmp_path / f"site-{i}") >= 10 for i in range(2)), pair[0])
        return pair

    return begin


@pytest.fixture
def family(tmp_path: Path, start: Callable[..., Process], tiny: list[str]) -> tuple[Process, list[int]]:
    """A run of two processes that has taken some steps, and its children in the order of their ranks."""
    parent = start("train", *tiny, *LONG, "--workers", 2, "--processes", 2, "--out", tmp_path / "run")
    until(lambda: steps_done(tmp_path / "run") >= 10, parent)
    return parent, trainers(parent.pid)


def trainers(parent: int) -> list[int]:
    listing = Path(f"/proc/{parent}/task/{parent}/children")
    if not listing.exists():
        pytest.skip("this system does not list the children of a process")
    children = [int(word) for word in listing.read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def said_at_the_end(process: Process, status: int) -> str:
    _, err = process.communicate(timeout=SOON)
    assert process.returncode == status, err
    return err.splitlines()[-1]


@pytest.mark.parametrize("victim", HOST_TOO)
def test_a_site_that_dies_is_noticed_by_one_that_waits_for_its_note(tmp_path: Path, sites, victim: int) -> None:
    pair = sites()
    pair[victim].kill()
    said = said_at_the_end(pair[1 - victim], 1)
    assert f"process {victim} is gone; saved" in said
    folder = tmp_path / f"site-{1 - victim}"
    checkpoint.verify(folder, checkpoint.steps_in(folder)[0], f"worker-{1 - victim}", 2)


@pytest.mark.parametrize("victim", HOST_TOO)
def test_a_child_that_dies_is_noticed_by_the_other(tmp_path: Path, family, victim: int) -> None:
    parent, children = family
    os.kill(children[victim], signal.SIGKILL)
    said = said_at_the_end(parent, 1)
    assert f"process {victim} is gone; saved" in said
    newest = checkpoint.steps_in(tmp_path / "run")[0]
    checkpoint.verify(tmp_path / "run", newest, f"worker-{1 - victim}", 2)


def test_children_of_a_killed_parent_save_and_end(tmp_path: Path, family) -> None:
    parent, _ = family
    parent.kill()
    _, err = parent.communicate(timeout=SOON)  # their output ends with them
    assert "SIGTERM on worker" in err
    last = metrics(tmp_path / "run")[-1]["step"]
    assert checkpoint.steps_in(tmp_path / "run") == [last]
    with (tmp_path / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("stopped", HOST_TOO)
def test_a_second_ctrl_c_ends_a_process_that_waits_for_a_stopped_one(tmp_path: Path, sites, stopped: int) -> None:
    pair, waiting = sites(), 1 - stopped
    pair[stopped].send_signal(signal.SIGSTOP)
    until(lambda: stands_still(tmp_path / f"site-{waiting}"), pair[waiting])
    pair[waiting].send_signal(signal.SIGINT)
    time.sleep(1)
    assert pair[waiting].poll() is None, "a process that is stopped is not gone"
    pair[waiting].send_signal(signal.SIGINT)
    pair[waiting].communicate(timeout=SOON)
    assert pair[waiting].returncode


def stands_still(folder: Path) -> bool:
    before = steps_done(folder)
    time.sleep(1)
    return steps_done(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_site_is_waited_for_as_long_as_the_config_says(tmp_path: Path, sites, stopped: int) -> None:
    pair = sites("--set", "train.wait=20")
    pair[stopped].send_signal(signal.SIGSTOP)
    assert f"process {stopped} not heard from for 20 s; saved" in said_at_the_end(pair[1 - stopped], 1)


def test_two_sites_stopped_at_once_end_alike(tmp_path: Path, sites) -> None:
    pair = sites()
    for site in pair:
        site.send_signal(signal.SIGTERM)
    said = [ended(site).stderr for site in pair]
    assert all(re.search("stopped after step .* SIGTERM", text.replace("(", "")) for text in said)


@pytest.mark.parametrize("met", [False, True])
def test_children_are_ended_when_one_dies_before_they_have_met(met: bool) -> None:
    context = multiprocessing.get_context("fork")
    event = context.Event()
    if met:
        event.set()
    patient = context.Process(target=time.sleep, args=(2 if met else 600,))
    failing = context.Process(target=os._exit, args=(3,))
    for child in (patient, failing):
        child.start()
    assert _lost_among([patient, failing], event) == [failing]
    assert patient.exitcode == (0 if met else -signal.SIGTERM)
