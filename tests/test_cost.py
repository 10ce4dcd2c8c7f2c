"""What a method takes in memory, before it runs."""

from __future__ import annotations

import pytest
from torch import nn

import thinwire as tw

MODEL = nn.Linear(100, 100)
COPY = 4 * (100 * 100 + 100)


@pytest.mark.parametrize("every", [1, 100, 5000, 100_000])
def test_memory_does_not_depend_on_the_period(every: int) -> None:
    """A round costs what it costs, however seldom it is made."""
    assert tw.cost(tw.local_sgd(every), MODEL, workers=4).memory() == (COPY, 0)
    assert tw.cost(tw.diloco(every), MODEL, workers=4).memory() == (3 * COPY, 0)  # outer copy, velocity, message
    assert tw.cost(tw.diloco(every), MODEL, workers=4).memory(offload=True) == (3 * COPY, 2 * COPY)


def test_rounds_under_way_add_up() -> None:
    """With two periods to arrive there are two messages on their way when a third one is made."""
    one, two = (tw.cost(tw.eager_diloco(5000, phases=phases), MODEL, 2).memory()[0] for phases in (1, 2))
    assert two - one == 2 * COPY  # a message, and the early term that is kept with it
