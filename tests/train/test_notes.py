"""Notes among processes: they may be read late, and are there until everybody has read them."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import thinwire as tw
from thinwire.train.notes import Notes


def test_a_note_that_is_read_late_is_still_there() -> None:
    """As in a run: one note is pending, an evaluation exchanges another, a checkpoint posts a third and reads all."""
    store = dist.HashStore()
    both = [Notes(process, 2, store, wait=2) for process in range(2)]
    pending = [notes.post("losses") for notes in both][0]
    evaluation = [notes.post("evaluation") for notes in both][0]
    assert [notes.read(evaluation) for notes in both] == [["evaluation"] * 2] * 2
    last = [notes.post("checkpoint") for notes in both][0]
    for notes in both:  # the first is done with all before the second has read any
        assert notes.read(pending) == ["losses"] * 2 and notes.read(last) == ["checkpoint"] * 2


def test_notes_do_not_pile_up() -> None:
    store = dist.HashStore()
    both = [Notes(process, 2, store, wait=2) for process in range(2)]
    for _ in range(20):
        number = [notes.post("step") for notes in both][0]
        assert [notes.read(number) for notes in both]
    assert store.num_keys() <= 4


@pytest.fixture
def three() -> list[Notes]:
    """Notes of three processes that watch each other, here in one process."""
    store = dist.HashStore()
    everybody = [Notes(process, 3, store, wait=60, host="127.0.0.1") for process in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Notes.keep_watch, everybody))
    while len(everybody[0].watch.links) < 2:
        time.sleep(0.01)
    return everybody


def end(notes: Notes) -> None:
    """What the system does to the connections of a process that ends."""
    for link in list(notes.watch.links):  # each goes from the list as it ends
        link.shutdown(socket.SHUT_RDWR)


def test_who_is_gone_is_named_to_all_and_what_it_wrote_is_still_read(three: list[Notes]) -> None:
    last = [notes.post("last") for notes in three][0]
    end(three[1])
    for notes in (three[0], three[2]):
        while notes.watch.gone != {1}:
            time.sleep(0.01)
        assert notes.read(last) == ["last"] * 3
        with pytest.raises(tw.PeerLost, match="process 1 is gone") as lost:
            notes.exchange("next")
        assert list(lost.value.workers) == [1]


def test_the_first_process_is_watched_by_the_others(three: list[Notes]) -> None:
    end(three[0])
    for notes in three[1:]:
        number = notes.post("next")
        while 0 not in notes.watch.gone:
            time.sleep(0.01)
        with pytest.raises(tw.PeerLost, match="process 0"):
            notes.read(number)


def test_a_slow_process_is_waited_for(three: list[Notes]) -> None:
    late = threading.Timer(1.5, three[1].post, ["next"])
    late.start()
    three[2].post("next")
    assert three[0].exchange("next") == ["next"] * 3


def test_a_silent_process_is_waited_for_as_long_as_is_said() -> None:
    with pytest.raises(tw.PeerLost, match="process 1 not heard from for 1 s"):
        Notes(0, 2, dist.HashStore(), wait=1).exchange("hello")
