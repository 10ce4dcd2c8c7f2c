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


@pytest.mark.parametrize(("codec", "known"), [(tw.BFloat16(), True), (tw.Int8(), True), (tw.E3M0(), False)])
def test_no_cosine_is_told_where_messages_change_their_length_on_the_way(codec: tw.Codec, known: bool) -> None:
    """Of two workers that go the same way; E3M0 rounds all their values alike, to another length."""
    pair = replicas(2, sgd)
    fleet = tw.Fleet(pair, tw.diloco(1, codec=codec), tw.Local())
    for replica in pair:
        for parameter in replica.trainable.values():
            parameter.grad = torch.full_like(parameter, 1.42)
    fleet.step()
    cosine = fleet.stats()["drift_cosine"]
    assert (cosine == pytest.approx(1.0, abs=0.02) and cosine <= 1) if known else cosine is None
