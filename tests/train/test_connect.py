"""Separate sites over one line: two runs that share nothing but an address."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import free_port
from tests.train.conftest import Process, arguments_of, ended, metrics, write_text
from tests.train.test_run import same_run, steps_done, until
from thinwire.train import checkpoint
from thinwire.train.config import Config
from thinwire.train.launch import as_site
from thinwire.train.run import Order, PeerGone

pytestmark = pytest.mark.xdist_group("train")


@pytest.fixture
def pair(tmp_path: Path, start: Callable[..., Process]) -> Callable[..., list[Process]]:
    """Start two sites; arguments for one of them alone as `only={1: (...)}`."""

    def begin(*arguments: object, only: dict[int, tuple[object, ...]] | None = None) -> list[Process]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{probe.getsockname()[1]}"
        common = ("--connect", where, "--workers", 2)
        return [start(*arguments, *common, "--worker", i, *(only or {}).get(i, ())) for i in range(2)]

    return begin


def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / "site-0", tmp_path / "site-1"]


def outs(tmp_path: Path) -> dict[int, tuple[object, ...]]:
    return {i: ("--out", folder) for i, folder in enumerate(folders(tmp_path))}


def test_two_sites_are_one_run_and_resume_from_what_both_have(tmp_path: Path, thinwire, pair, tiny: list[str]) -> None:
    thinwire("train", *tiny, "--workers", 2, "--steps", 12, "--out", tmp_path / "one")
    for site in pair("train", *tiny, "--steps", 12, "--stop-at", 10, only=outs(tmp_path)):
        ended(site)
    first, second = folders(tmp_path)
    shutil.rmtree(second / "checkpoint-000010")  # this site lost its newest
    resumed = [ended(site) for site in pair("train", only={i: ("--resume", f) for i, f in enumerate((first, second))})]
    assert all("at step 5" in site.stderr for site in resumed)
    assert not any("--connect" in site.stdout for site in resumed), "they know how machines join"
    same_run(first, second)
    losses = [[line["loss"] for line in metrics(folder)] for folder in (tmp_path / "one", first)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("little", [10_000, 600, 100], ids=["fewer batches", "one short batch", "nothing held out"])
def test_sites_may_have_more_or_less_data(tmp_path: Path, pair, tiny: list[str], little: int) -> None:
    first, second = folders(tmp_path)
    part = tmp_path / "part.txt"
    part.write_text((tmp_path / "text.txt").read_text()[:little])
    own = {0: outs(tmp_path)[0], 1: (*outs(tmp_path)[1], "--local", f"data.files={part}")}
    for site in pair("train", *tiny, "--set", "train.eval_batches=5", "--steps", 12, only=own):
        ended(site)
    held = [[line["val_loss"] for line in metrics(folder) if "val_loss" in line] for folder in (first, second)]
    assert len(held[0]) == 3 and held[0] == held[1]


def test_sites_whose_bpe_differs_are_refused(tmp_path: Path, pair, tiny: list[str]) -> None:
    pytest.importorskip("tokenizers")
    other = tmp_path / "other.txt"
    other.write_text("other words than there " * 400)
    bpe = ("--set", "data.tokenizer=bpe", "--set", "data.vocabulary=270", "--set", f"data.cache={tmp_path / 'cache'}")
    own = {0: outs(tmp_path)[0], 1: (*outs(tmp_path)[1], "--local", f"data.files={other}")}
    for site in pair("train", *tiny, *bpe, "--steps", 4, only=own):
        assert "different tokenizers" in ended(site, 2).stderr
    assert not any(folder.exists() for folder in folders(tmp_path))


def test_nothing_in_common_is_refused_with_who_has_what(tmp_path: Path, pair, tiny: list[str]) -> None:
    for site in pair("train", *tiny, "--steps", 12, "--stop-at", 5, only=outs(tmp_path)):
        ended(site)
    first, second = folders(tmp_path)
    shutil.rmtree(second / "checkpoint-000005")
    for site in pair("train", only={i: ("--resume", f) for i, f in enumerate((first, second))}):
        assert "process 0 has 5; process 1 has none" in ended(site, 2).stderr


def test_what_a_stopped_site_says_goes_on_with_the_run(tmp_path: Path, start, pair, tiny: list[str]) -> None:
    stopped = [ended(site) for site in pair("train", *tiny, "--steps", 12, "--stop-at", 7, only=outs(tmp_path))]
    lines = [shlex.split(site.stderr.rpartition("go on with: thinwire ")[2]) for site in stopped]
    resumed = [ended(site) for site in [start(*line) for line in lines]]
    assert all("at step 7" in site.stderr for site in resumed)
    same_run(*folders(tmp_path))


def test_a_site_is_no_whole_run_and_not_another_site(tmp_path: Path, thinwire, pair, tiny: list[str]) -> None:
    for site in pair("train", *tiny, "--steps", 12, "--stop-at", 5, only=outs(tmp_path)):
        ended(site)
    first, second = folders(tmp_path)
    (alone,) = thinwire("train", "--resume", second, status=2).stderr.splitlines()
    assert "checkpoint-000005 holds worker 1's part of 2, but not worker 0's part: resume with the --connect" in alone
    swapped = pair("train", only={0: ("--resume", second), 1: ("--resume", first)})
    lines = [ended(site, 2).stderr for site in swapped]
    for worker, line in enumerate(lines):
        assert f"holds worker {1 - worker}'s part, this is --worker {worker}: " in line
        assert len([text for text in line.splitlines() if not text.startswith("waiting for")]) == 1
    for worker, folder in enumerate((first, second)):
        checkpoint.verify(folder, 5, f"worker-{worker}", 2)
        assert len(metrics(folder)) == 5


def test_what_must_be_equal_is_compared_and_what_is_local_may_differ(tmp_path: Path, pair) -> None:
    text = write_text(tmp_path)
    only = outs(tmp_path)
    local = {0: only[0], 1: (*only[1], "--local", "batch=4")}
    for site in pair("train", *arguments_of(text), "--steps", 4, only=local):
        ended(site)
    shutil.rmtree(tmp_path / "site-0")
    shutil.rmtree(tmp_path / "site-1")
    other = {0: only[0], 1: (*only[1], "--set", "optimizer.lr=0.5")}
    for site in pair("train", *arguments_of(text), "--steps", 4, only=other):
        lines = ended(site, 2).stderr.splitlines()
        (said,) = [line for line in lines if not line.startswith("waiting for")]  # a site that started late
        assert "optimizer.lr" in said and "0.5" in said and "0.003" in said


def test_a_stop_on_one_is_a_stop_on_all_after_the_same_step(tmp_path: Path, pair, tiny: list[str]) -> None:
    sites = pair("train", *tiny, "--steps", 100000, only=outs(tmp_path))
    first, second = folders(tmp_path)
    until(lambda: steps_done(second) >= 10, sites[1])
    sites[1].send_signal(signal.SIGTERM)
    said = [ended(site).stderr for site in sites]
    assert all("SIGTERM on worker 1" in text for text in said)
    assert metrics(first)[-1]["step"] == metrics(second)[-1]["step"] == checkpoint.steps_in(first)[0]


def test_a_lost_peer_is_named_and_the_run_is_saved(tmp_path: Path, pair, tiny: list[str]) -> None:
    sites = pair("train", *tiny, "--steps", 100000, only=outs(tmp_path))
    first, second = folders(tmp_path)
    until(lambda: steps_done(first) >= 10, sites[0])
    sites[1].kill()
    said = ended(sites[0], 1).stderr.splitlines()[-1]
    assert re.search("worker 1 not heard from|process 1 is gone", said) and "saved" in said
    newest = checkpoint.steps_in(first)[0]
    checkpoint.verify(first, newest, "worker-0", 2)
    assert metrics(first)[-1]["step"] >= newest - 1


@pytest.mark.parametrize(
    ("worker", "said"),
    [(0, "worker 1 did not come in 3 s"), (1, "start worker 0 there"), ("taken", "cannot listen at")],
)
def test_a_worker_that_is_alone_says_who_has_not_come(
    tmp_path: Path, start, tiny: list[str], worker: object, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        where, taken = f"127.0.0.1:{door.getsockname()[1]}", worker == "taken"
        if not taken:
            door.close()
        there = ("--connect", where, "--workers", 2, "--worker", 0 if taken else worker, "--local", "train.wait=3")
        result = ended(start("train", *tiny, *there, "--out", tmp_path / "run"), 2 if taken else 1)
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


def test_nobody_at_the_address_is_one_line(tmp_path: Path) -> None:
    config = Config(workers=2)
    config.train.wait = 1
    with pytest.raises(PeerGone, match="ended while setting up: worker 0 did not answer at 127.0.0.1"):
        as_site(config, Order(tmp_path), f"127.0.0.1:{free_port()}", 1)
