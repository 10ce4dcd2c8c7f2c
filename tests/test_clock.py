"""What `fleet.stats()` says of the workers' drifts, from the norms in the headers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import thinwire as tw
from tests.toy import replicas, sgd


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2)])
@pytest.mark.parametrize(("other", "cosine"), [((1.0, 0.0), 1.0), ((0.0, 2.0), 0.0), ((-2.0, 0.0), -1.0)])
def test_the_cosine_between_two_drifts(weights: Sequence[float], other: Sequence[float], cosine: float) -> None:
    pair = replicas(2, sgd)
    fleet = tw.Fleet(pair, tw.diloco(1), tw.Local())
    for replica, weight, (along, across) in zip(pair, weights, ((1.0, 0.0), other), strict=True):
        replica.weight = weight
        parameters = list(replica.trainable.values())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        parameters[0].grad[0, 0], parameters[0].grad[0, 1] = along, across
    fleet.step()
    assert fleet.stats()["drift_cosine"] == pytest.approx(cosine, abs=1e-4)
    assert fleet.stats()["drift_norm"] == pytest.approx(0.05 * (1 + abs(sum(other))) / 2, rel=1e-4)
