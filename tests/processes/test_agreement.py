"""Workers that differ: in settings, in start values, in the steps they take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.cluster import Cluster
from tests.toy import adamw, backward, batch, parameters, replicas, same_bits, sgd, small_model, train

pytestmark = pytest.mark.xdist_group("processes")


def outcome_of(fleet: tw.Fleet) -> str:
    """What the first step says; the comparison comes before it."""
    for parameter in fleet.replicas[0].model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        fleet.step()
    except ValueError as error:
        return str(error)
    return "no error"


def other_period(rank: int) -> str:
    return outcome_of(tw.Fleet(replicas(1), tw.diloco(4 + rank), tw.Group()))


def other_shape(rank: int) -> str:
    model = small_model() if rank == 0 else nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    return outcome_of(tw.Fleet(replicas(1, model=model), tw.diloco(4), tw.Group()))


def other_dtype(rank: int) -> str:
    model = small_model() if rank == 0 else small_model().bfloat16()
    return outcome_of(tw.Fleet(replicas(1, model=model), tw.diloco(4), tw.Group()))


def test_another_period_is_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(other_period, 2):
        assert "every 4" in text and "every 5" in text and "worker 0" in text and "worker 1" in text


def test_another_shape_is_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(other_shape, 2):
        assert "2.weight" in text and "(5, 33)" in text and "(3, 33)" in text


def test_another_dtype_is_told_to_both(cluster: Cluster) -> None:
    for text in cluster.run(other_dtype, 2):
        assert "float32" in text and "bfloat16" in text


def two_seeds(rank: int) -> tuple[list, dict[str, int]]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    fleet = tw.Fleet(replicas(1, sgd, model), tw.diloco(2), tw.Group())
    train(fleet, 2, first_worker=rank)
    return parameters(fleet), fleet.events.counts


def test_two_seeds_start_from_worker_0(cluster: Cluster) -> None:
    (first, counts), (second, _) = cluster.run(two_seeds, 2)
    assert same_bits(first, second) and counts == {"start": 1}


def frozen(rank: int, value: float) -> str:
    model = small_model()
    model[2].weight.requires_grad_(False)[0, 0] = value * rank
    return outcome_of(tw.Fleet(replicas(1, model=model), tw.diloco(2), tw.Group()))


def test_a_frozen_tensor_that_differs_is_named(cluster: Cluster) -> None:
    for text in cluster.run(frozen, 2, 1.0):
        assert "2.weight" in text and "worker 1" in text


def skipping_scaler(rank: int) -> tuple[list, int, dict[str, torch.Tensor]]:
    """Worker 1's third step overflows, so its GradScaler skips it; it then evaluates while worker 0 is a step ahead."""
    replica = replicas(1, sgd)[0]
    fleet = tw.attach(replica.model, replica.optimizers[0], tw.local_sgd(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    agreed = {}
    for step in range(9):
        inputs, targets = batch(step, rank)
        loss = (replica.model(inputs) - targets).square().mean()
        scaler.scale(loss * (float("inf") if rank == 1 and step == 2 else 1.0)).backward()
        scaler.step(replica.optimizers[0])
        scaler.update()
        replica.optimizers[0].zero_grad()
        if step == 5:
            agreed = fleet.consensus()
    fleet.finish()
    return parameters(fleet), fleet.steps, agreed


def test_a_skipped_step_mixes_no_rounds(cluster: Cluster) -> None:
    (first, steps, agreed), (second, fewer, agreed_there) = cluster.run(skipping_scaler, 2)
    assert (steps, fewer) == (9, 8)
    assert same_bits(first, second)
    assert all(torch.equal(agreed[name], agreed_there[name]) for name in agreed)


def unequal_steps(rank: int) -> str:
    fleet = tw.Fleet(replicas(1), tw.local_sgd(2), tw.Group())
    try:
        train(fleet, 4 if rank == 0 else 10)
        fleet.finish()
    except tw.PeerLost as error:
        return str(error)
    return "no error"


def test_a_peer_that_finished_early_is_named(cluster: Cluster) -> None:
    early, late = cluster.run(unequal_steps, 2)
    assert "gone on" in early
    assert "worker 0 finished" in late and "step 4" in late


def late_but_there(rank: int) -> list:
    """Worker 1 ends between two rounds: its partial period still counts in the round that worker 0 launches."""
    fleet = tw.Fleet(replicas(1, sgd), tw.local_sgd(3), tw.Group())
    train(fleet, 6 - rank)
    fleet.finish()
    return parameters(fleet)


def test_a_worker_one_step_behind_joins_the_last_round(cluster: Cluster) -> None:
    first, second = cluster.run(late_but_there, 2)
    assert same_bits(first, second)


def compiled_and_plain(rank: int) -> tuple[list, list[str]]:
    model = small_model()
    wrapped = torch.compile(model, backend="eager") if rank == 1 else model
    optimizer = adamw(wrapped.parameters())
    fleet = tw.attach(wrapped, optimizer, tw.desloc(2))
    for step in range(4):
        backward(wrapped, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(fleet), list(fleet.consensus())


def test_a_compiled_and_a_plain_worker_train_together(cluster: Cluster) -> None:
    (first, names), (second, others) = cluster.run(compiled_and_plain, 2, timeout=180)
    assert same_bits(first, second)
    assert names == others == [name for name, _ in small_model().named_parameters()]


def asked_after_every_batch(rank: int, method: tw.Method) -> list[dict[str, torch.Tensor]]:
    """Worker 1 skips a batch, as a GradScaler does, and is a step behind from then on."""
    fleet = tw.Fleet(replicas(1, sgd), method, tw.Group())
    agreed = []
    for number in range(9):
        if rank == 0 or number != 2:
            train(fleet, 1, first_worker=rank)
        agreed.append(fleet.consensus())
    return agreed


@pytest.mark.parametrize(
    "method", [tw.diloco(3), tw.carry_diloco(3), tw.sparseloco(3), tw.eager_diloco(3)], ids=lambda m: m.name
)
def test_workers_a_step_apart_hear_the_same_consensus(cluster: Cluster, method: tw.Method) -> None:
    first, second = cluster.run(asked_after_every_batch, 2, method)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def perturbed_copy(rank: int) -> tuple[list, dict[str, int]]:
    """As if one worker's GPU decoded to other bits: its shared copy is off by one unit in the last place."""
    fleet = tw.Fleet(replicas(1), tw.sparseloco(2), tw.Group())
    train(fleet, 2, first_worker=rank)
    if rank == 1:
        anchor = fleet.rows[0].lanes[0].state["anchor"]
        anchor[3] = torch.nextafter(anchor[3], torch.tensor(float("inf")))
    train(fleet, 4, first_worker=rank)
    return parameters(fleet), fleet.events.counts


def test_shared_copies_that_differ_are_sent_again(cluster: Cluster) -> None:
    (first, counts), (second, _) = cluster.run(perturbed_copy, 2)
    assert same_bits(first, second)
    assert counts == {"unequal": 1}


def perturbed_decoding(rank: int) -> tuple[list, dict[str, int]]:
    """Gathered signs: there is no shared copy, and a decode that differs would part the parameters in silence."""
    fleet = tw.Fleet(replicas(1, sgd), tw.demo(), tw.Group())
    train(fleet, 2, first_worker=rank)
    if rank == 1:
        with torch.no_grad():
            fleet.replicas[0].trainable["0.weight"][1, 1] += 0.01
    train(fleet, 3, first_worker=rank)
    return parameters(fleet), fleet.events.counts


def test_parameters_moved_by_gathered_signs_are_sent_again(cluster: Cluster) -> None:
    (first, counts), (second, _) = cluster.run(perturbed_decoding, 2)
    assert same_bits(first, second)
    assert counts == {"unequal": 1}


def paced(rank: int) -> tuple[list, float]:
    fleet = tw.Fleet(replicas(1), tw.eager_diloco(2, codec=tw.E3M0()), tw.Group(max_rate="2Mbit"))
    train(fleet, 6, first_worker=rank)
    fleet.finish()
    return parameters(fleet), fleet.transport.rate


def test_a_paced_group_gives_the_same_result(cluster: Cluster) -> None:
    fleet = tw.Fleet(replicas(2), tw.eager_diloco(2, codec=tw.E3M0()), tw.Local())
    train(fleet, 6)
    fleet.finish()
    for (values, rate), expected in zip(cluster.run(paced, 2), parameters(fleet), strict=True):
        assert rate == 250_000
        torch.testing.assert_close(values[0], expected)
