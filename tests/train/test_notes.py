"""Notes among processes: they may be read late, and are there until everybody has read them."""

from __future__ import annotations

import torch.distributed as dist

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
