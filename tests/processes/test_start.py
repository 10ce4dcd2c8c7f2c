"""What the workers compare before the first step, where it is easy to overlook: order, cuts, places, states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.cluster import Cluster
from tests.processes.test_agreement import outcome_of
from tests.toy import FRAGMENTS, parameters, replicas, same_bits, sgd, small_model, train
from thinwire.start import fingerprint

pytestmark = pytest.mark.xdist_group("processes")


class Pair(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def other_cuts(rank: int) -> str:
    fragments = [FRAGMENTS, [["0.*", "2.*"], ["4.*"]]][rank]
    return outcome_of(tw.Fleet(replicas(1, sgd), tw.streaming_diloco(4, fragments, codec=None), tw.Group()))


def swapped_fragments(rank: int) -> str:
    fragments = FRAGMENTS[::-1] if rank else FRAGMENTS
    return outcome_of(tw.Fleet(replicas(1, sgd), tw.eager_diloco(4, fragments), tw.Group()))


def other_order(rank: int) -> str:
    return outcome_of(tw.Fleet(replicas(1, sgd, Pair("ba" if rank else "ab")), tw.diloco(4), tw.Group()))


def test_fragments_that_are_cut_elsewhere_are_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(other_cuts, 2):
        assert "row 0, params 2.weight: absent on worker 0, (5, 33) float32 on worker 1" in text


def test_fragments_in_another_order_are_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(swapped_fragments, 2):
        assert "row 0, params 0.weight: (33, 7) float32 on worker 0, absent on worker 1" in text


def test_parameters_in_another_order_are_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(other_order, 2):
        assert "another order: row 0, params a.weight on worker 0, row 0, params b.weight on worker 1" in text


def swapped_rows(rank: int, frozen: bool) -> tuple[str, list]:
    """The same values in another order: two rows of a table of 32-byte rows."""
    model = small_model()
    model.table = nn.Parameter(torch.randn(4, 8), requires_grad=not frozen)
    if rank:
        model.table.data = model.table.data.flip(0)
    fleet = tw.Fleet(replicas(1, sgd, model), tw.ddp(), tw.Group())
    return outcome_of(fleet), parameters(fleet)


def test_a_frozen_tensor_with_the_same_values_elsewhere_is_named(cluster: Cluster) -> None:
    for text, _ in cluster.run(swapped_rows, 2, True):
        assert "table differs between worker 0 and worker 1" in text


def test_a_trainable_tensor_with_the_same_values_elsewhere_is_made_equal(cluster: Cluster) -> None:
    (_, first), (_, second) = cluster.run(swapped_rows, 2, False)
    assert same_bits(first, second)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (1 << 20,), ((1 << 20) + 3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fingerprint_is_of_values_in_their_places(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).remainder(251).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    if tensor.numel() > 1:
        assert fingerprint(tensor) != fingerprint(tensor.flip(0))


def loaded(rank: int, steps: tuple[int | None, int | None]) -> str:
    fleet = tw.Fleet(replicas(1), tw.diloco(4), tw.Group())
    states = {}
    for step in (3, 9):
        train(fleet, step - fleet.steps)
        states[step] = copy.deepcopy(fleet.state_dict())
    again, mine = tw.Fleet(replicas(1), tw.diloco(4), tw.Group()), steps[rank]
    if mine is not None:
        again.load_state_dict(states[mine])
    return outcome_of(again)


def test_states_of_different_steps_are_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(loaded, 2, (9, 3)):
        assert "worker 0 has loaded a fleet's state of step 9, worker 1 of step 3" in text


def test_a_state_on_one_worker_only_is_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(loaded, 2, (9, None)):
        assert "worker 0 has loaded a fleet's state of step 9, worker 1 of no step" in text
