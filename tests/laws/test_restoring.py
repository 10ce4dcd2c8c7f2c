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


def moving_buffers() -> nn.Module:
    """Persistent buffers that a forward pass moves, and that are not BatchNorm's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 5)), nn.Linear(5, 3))


def test_buffers_that_training_moves_are_not_frozen_tensors() -> None:
    fleet, again = (fleet_of(tw.local_sgd(4), 2, sgd, moving_buffers()) for _ in range(2))
    train(fleet, 3)
    for old, new in zip(fleet.replicas, again.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
    again.load_state_dict(fleet.state_dict())
    assert same(snapshot(train(fleet, 3)), snapshot(train(again, 3)))


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 3)
        self.register_buffer("middle", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.middle.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.middle)


def test_a_buffer_that_the_first_batch_moves_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match="middle.*begin"):
        train(fleet_of(tw.local_sgd(4), 2, sgd, Moving()), 1)
    fleet = fleet_of(tw.local_sgd(4), 2, sgd, Moving())
    fleet.begin()
    assert train(fleet, 4).steps == 4
