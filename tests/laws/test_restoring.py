"""What is loaded: states of other tensors are refused, and a state from before the first step is a fresh start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw

from .entries import adamw, fleet_of, momentum, odd_model, same, sgd, snapshot, train


def layers(width: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.Linear(7, width), nn.Linear(width, 7), nn.Linear(7, 3))


def streaming(pattern: str = "strided", width: int = 7) -> tw.Fleet:
    model = layers(width)
    return fleet_of(tw.streaming_diloco(4, tw.by_layer(model, 2, pattern)), 2, adamw, model)


@pytest.mark.parametrize(
    ("make", "named"),
    [(lambda: streaming("sequential"), "1.weight"), (lambda: streaming(width=9), r"\(7, 9\)")],
    ids=["other fragments", "another model"],
)
def test_a_state_of_other_tensors_is_refused(make: Any, named: str) -> None:
    """The other fragments are as large, so that every buffer would fit."""
    state = train(streaming(), 5).state_dict()
    with pytest.raises(ValueError, match=named):
        make().load_state_dict(state)


def test_a_state_with_moments_that_the_optimizer_lacks_is_refused() -> None:
    state = train(fleet_of(tw.desloc(2), 2, momentum), 3).state_dict()
    with pytest.raises(ValueError, match="optimizer"):
        fleet_of(tw.desloc(2), 2, sgd).load_state_dict(state)


@pytest.mark.parametrize("method", [tw.local_sgd(3), tw.diloco(3), tw.eager_diloco(3)], ids=lambda m: m.name)
def test_a_state_from_before_the_first_step_is_a_fresh_start(method: tw.Method) -> None:
    """Of workers with two seeds, which are made equal at the first step."""

    def two_seeds() -> tw.Fleet:
        models = [odd_model(), copy.deepcopy(odd_model())]
        with torch.no_grad():
            models[1].inner.weight.add_(1.0)
        return tw.Fleet([tw.Replica(m, adamw(m.parameters())) for m in models], method, tw.Local())

    straight, restored = two_seeds(), two_seeds()
    restored.load_state_dict(straight.state_dict())
    assert same(snapshot(train(straight, 4)), snapshot(train(restored, 4)))
    assert straight.events.counts == restored.events.counts == {"start": 1}
