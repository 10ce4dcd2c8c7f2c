"""Work shared among threads: everything is done once, and nothing depends on how many threads there are."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.codec.reference import CPU, filled
from thinwire.codec import DCT, Int8, TopK
from thinwire.codec.crew import share

SHAPES = [torch.Size([2500, 832]), torch.Size([900, 900])]


@pytest.fixture
def threads():
    """Sets how many threads torch uses, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_item_is_taken_once(threads, count):
    threads(count)
    taken = []
    share(list(range(1000)), taken.extend, CPU)
    assert sorted(taken) == list(range(1000))


def test_each_thread_keeps_to_one_core_and_the_others_to_theirs(threads):
    threads(3)
    inside = []
    share([0, 1, 2], lambda left: inside.extend((torch.get_num_threads(), item)[0] for item in left), CPU)
    assert inside == [1, 1, 1] and torch.get_num_threads() == 3


def test_what_goes_wrong_in_a_thread_is_heard_of(threads):
    threads(2)
    with pytest.raises(ZeroDivisionError):
        share([1, 0, 1], lambda left: [1 // item for item in left] and None, CPU)


@pytest.mark.parametrize("codec", [DCT(TopK(32)), TopK(64), DCT(TopK(20), 33), DCT(Int8(), 33)], ids=repr)
def test_the_same_bits_with_any_number_of_threads(threads, codec):
    layout, buffer = filled(codec, SHAPES)
    found = []
    for count in (1, 2, 3, 4):
        threads(count)
        payload, own = codec.encode_with_own(buffer, layout)
        found.append((payload, own, codec.merge([payload, payload], [1.0, 2.0], layout)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_a_crew_of_its_own(threads):
    threads(2)
    seen = []
    share([1, 2, 3, 4], seen.extend, CPU)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        found = []
        share([1, 2, 3, 4], found.extend, CPU)
        os._exit(len(found))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(seen) == 4
