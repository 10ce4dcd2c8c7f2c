"""Checkpoints in the middle of rounds: one that is lost meanwhile, one that a return to an earlier state gives up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster
from tests.toy import parameters, replicas, same_bits, sgd, small_model, train

pytestmark = pytest.mark.xdist_group("processes")


def all_sick_in_flight(rank: int) -> tuple[list[Any], list[Any], dict[str, int]]:
    fleet = tw.Fleet(replicas(1, sgd), tw.eager_diloco(4), tw.Group())
    model = fleet.replicas[0].model
    train(fleet, 3, first_worker=rank)
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    train(fleet, 1, first_worker=rank)
    model.load_state_dict(small_model().state_dict())
    train(fleet, 2, first_worker=rank)
    saved = copy.deepcopy((fleet.state_dict(), model.state_dict()))
    again = tw.Fleet(replicas(1, sgd), tw.eager_diloco(4), tw.Group())
    again.replicas[0].model.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    for one in (fleet, again):
        train(one, 6, first_worker=rank)
    return parameters(fleet), parameters(again), again.events.counts


def test_a_round_without_a_finite_message_is_lost_after_a_resume_too(cluster: Cluster) -> None:
    for straight, resumed, counts in cluster.run(all_sick_in_flight, 2):
        assert same_bits(straight, resumed) and counts == {"lost": 1}
        assert all(bool(torch.isfinite(tensor).all()) for tensor in straight[0])


def going_back(rank: int) -> tuple[list[Any], list[Any]]:
    """Loads an earlier state with a round under way, whose number comes again with other weights."""
    fleet = tw.Fleet(replicas(1, sgd), tw.local_sgd(4, delay=2), tw.Group())
    model = fleet.replicas[0].model
    train(fleet, 3, first_worker=rank)
    saved = copy.deepcopy((fleet.state_dict(), model.state_dict()))
    train(fleet, 2, first_worker=rank)
    again = tw.Fleet(replicas(1, sgd), tw.local_sgd(4, delay=2), tw.Group())
    for one in (fleet, again):
        one.replicas[0].model.load_state_dict(saved[1])
        one.load_state_dict(saved[0])
        one.replicas[0].weight = 1 + 2 * rank
        train(one, 8, first_worker=rank)
    return parameters(fleet), parameters(again)


def test_a_fleet_may_go_back_in_the_middle_of_a_round(cluster: Cluster) -> None:
    for back, anew in cluster.run(going_back, 2):
        assert same_bits(back, anew)
