"""Replicas that are sick, rounds that are lost: what the others and the sick one hold afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw

from . import problem
from . import reference as ref
from .entries import ENTRIES, Entry, adamw, all_equal, backward, fleet_of, same, sgd, snapshot, train, weights_of


def those(keep: Any) -> Any:
    found = {n: e for n, e in ENTRIES.items() if keep(e)}
    return pytest.mark.parametrize("entry", found.values(), ids=found.keys())


def poison(fleet: tw.Fleet, worker: int, states: bool) -> None:
    """NaN in one parameter, and in the optimizer state of another."""
    replica = fleet.replicas[worker]
    with torch.no_grad():
        replica.model.inner.weight[2, 3] = float("nan")
        for state in replica.optimizers[0].state.values() if states else []:
            for value in state.values():
                if torch.is_tensor(value) and value.ndim:
                    value.fill_(float("nan"))


def finite(fleet: tw.Fleet) -> bool:
    return all(bool(v.isfinite().all()) for v in snapshot(fleet))


@those(lambda e: not e.gradients)
@pytest.mark.parametrize("when", [4, 6])
def test_a_sick_replica_recovers(entry: Entry, when: int) -> None:
    """NaN parameters and NaN moments: the others never see them, and some rounds later all is finite."""
    fleet = fleet_of(entry.method, 3, entry.optimizer)
    train(fleet, when)
    poison(fleet, 1, states=True)
    for _ in range(20):
        train(fleet, 1)
        for other in (0, 2):
            assert all(bool(p.isfinite().all()) for p in fleet.replicas[other].model.parameters())
    assert finite(fleet)
    assert fleet.events.counts["sick"] >= 1 and "lost" not in fleet.events.counts
    assert {worker for event in fleet.events for worker in event.workers} == {1}
    fleet.finish()
    assert all_equal(fleet) and finite(fleet)


@those(lambda e: e.gradients)
def test_a_gradient_that_is_not_finite_is_left_out(entry: Entry) -> None:
    fleet = fleet_of(entry.method, 3, entry.optimizer)
    train(fleet, 2)
    for step in (2, 3):
        for worker, replica in enumerate(fleet.replicas):
            backward(replica.model, step, worker)
        fleet.replicas[1].model.head.weight.grad[0, 0] = float("inf")
        fleet.step()
        fleet.zero_grad()
    train(fleet, 3)
    assert finite(fleet) and all_equal(fleet) and fleet.events.counts == {"sick": 2}


@pytest.mark.parametrize("who", range(3))
def test_parameters_are_sent_again_from_a_healthy_worker(who: int) -> None:
    """demo moves all alike by signs, so one that differs is mended: not from the one that is not finite."""
    fleet = fleet_of(tw.demo(4, 4), 3, sgd)
    train(fleet, 2)
    poison(fleet, who, states=False)
    train(fleet, 3)
    assert finite(fleet) and all_equal(fleet) and "lost" not in fleet.events.counts
    assert [event.text for event in fleet.events if event.kind == "unequal"] == [
        f"row 0, round 3: the workers' parameters differed; worker {int(who == 0)}'s were sent again"
    ]


def test_a_broken_parameter_stays_where_it_is_though_its_message_is_finite() -> None:
    """It has no gradient this step, so the message of its worker is as good as the others'."""
    fleet = fleet_of(tw.demo(4, 4), 2, sgd)
    train(fleet, 2)
    fleet.replicas[0].model.head.bias.data.fill_(float("nan"))
    for worker, replica in enumerate(fleet.replicas):
        backward(replica.model, 2, worker)
        for parameter in replica.trainable.values():
            parameter.grad = torch.ones_like(parameter)
    fleet.replicas[0].model.head.bias.grad = None
    fleet.step()
    assert finite(fleet) and all_equal(fleet) and fleet.events.counts == {"sick": 1, "unequal": 1}


@pytest.mark.parametrize("phases", [1, 2])
def test_what_moves_at_launch_is_mended_at_launch(phases: int) -> None:
    """One gradient that is not finite costs one round: the state that it spoilt is cleared before the next step."""
    fleet = fleet_of(tw.eager_diloco(6, outer_lr=0.2, phases=phases), 2, adamw)
    train(fleet, 6)
    for worker, replica in enumerate(fleet.replicas):
        backward(replica.model, fleet.steps, worker)
    for parameter in fleet.replicas[1].trainable.values():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))
    fleet.step()
    fleet.zero_grad()
    train(fleet, 24)
    assert finite(fleet) and fleet.events.counts["sick"] == 1


def test_nobody_starts_from_what_is_not_finite() -> None:
    fleet = fleet_of(tw.diloco(2), 2, sgd)
    poison(fleet, 0, states=False)
    with pytest.raises(ValueError, match="inner.weight is not finite on worker 0"):
        train(fleet, 1)


def test_the_healthy_ones_take_their_own_mean() -> None:
    """With one healthy worker of two its mean is what it holds; the sick one takes it outright."""
    fleet, alone = fleet_of(tw.local_sgd(4), 2, sgd), fleet_of(tw.local_sgd(100), 1, sgd)
    train(fleet, 2)
    poison(fleet, 1, states=False)
    train(fleet, 2)
    train(alone, 4)
    assert same(weights_of(fleet)[0], weights_of(alone)[0])
    assert all_equal(fleet)


def test_moments_of_the_sick_take_the_mean_of_the_row() -> None:
    fleet = fleet_of(tw.local_adam(4), 3)
    train(fleet, 3)
    poison(fleet, 1, states=True)
    train(fleet, 1)
    exp_avg = [r.optimizers[0].state[r.model.head.weight]["exp_avg"] for r in fleet.replicas]
    assert torch.equal(exp_avg[0], exp_avg[1]) and bool(exp_avg[1].isfinite().all()) and bool(exp_avg[1].any())
    assert all_equal(fleet)


def test_moments_that_no_row_carries_are_cleared() -> None:
    fleet = fleet_of(tw.diloco(4), 2)
    train(fleet, 3)
    poison(fleet, 1, states=True)
    train(fleet, 1)
    assert not bool(fleet.replicas[1].optimizers[0].state[fleet.replicas[1].model.head.weight]["exp_avg"].any())
    healthy = fleet.replicas[0]
    assert bool(healthy.optimizers[0].state[healthy.model.head.weight]["exp_avg"].any())


@pytest.mark.parametrize("name", ["diloco", "diloco int8", "sparseloco", "decoupled consensus", "carry"])
def test_all_sick_is_a_lost_round(name: str) -> None:
    entry = ENTRIES[name]
    fleet = fleet_of(entry.method, 2, entry.optimizer)
    train(fleet, 3)
    copy = list(fleet.consensus().values())
    for worker in (0, 1):
        poison(fleet, worker, states=False)
    train(fleet, 6 if name == "carry" else 3)
    assert fleet.events.counts["lost"] >= 1
    if name != "carry":  # whose first round was healthy, and landed since
        assert same(list(fleet.consensus().values()), copy)
    assert all(bool(v.isfinite().all()) for v in fleet.consensus().values())


def test_all_gradients_sick_skips_the_step() -> None:
    fleet = fleet_of(tw.ddp(), 2)
    train(fleet, 2)
    before = snapshot(fleet)
    for replica in fleet.replicas:
        for p in replica.model.parameters():
            p.grad = torch.full_like(p, float("nan"))
    fleet.step()
    assert same(snapshot(fleet), before) and fleet.events.counts["lost"] == 1


def test_losing_all_rounds_is_training_alone() -> None:
    for name in ("diloco", "desloc", "streaming", "carry", "sparseloco", "desloc top-k", "decoupled paper"):
        entry = ENTRIES[name]
        fleet = fleet_of(entry.method, 2, entry.optimizer, lose=lambda row, number: True)
        alone = fleet_of(tw.local_sgd(1000), 2, entry.optimizer)
        assert same(snapshot(train(fleet, 9)), snapshot(train(alone, 9))), name


@pytest.mark.parametrize("lost", [(1,), (2, 3), (2, 5)])
@pytest.mark.parametrize(("eager", "phases"), [(True, 1), (True, 2), (False, 1)])
def test_eager_and_delayed_make_up_for_a_lost_round(eager: bool, lost: tuple[int, ...], phases: int) -> None:
    """A lost round is a zero mean: its early part is taken back and its message added to the next, from the equations.

    Losing is known when the answer is due, `phases` periods after the launch, before that phase's own launch.
    """
    every, lr, momentum, workers = 3, 0.2, 0.8, 3
    method = (
        tw.eager_diloco(every, None, lr, momentum, None, phases)
        if eager
        else tw.delayed_diloco(every, None, lr, momentum)
    )
    fleet = problem.fleet(method, workers, sgd, lose=lambda row, number: number in lost)
    x, points = [ref.start() for _ in range(workers)], [ref.start() for _ in range(workers)]
    outer = [ref.Nesterov(lr, momentum) for _ in range(workers)]
    rounds: list[tuple[list[ref.Tensors], list[ref.Tensors]]] = []  # messages, early parts
    zero = ref.combine(np.zeros_like, ref.start())
    for t in range(1, 8 * every + 1):
        for m in range(workers):
            x[m] = ref.combine(lambda a, g: a - 0.05 * g, x[m], ref.gradient(x[m], t, m))
        problem.step(fleet)
        if t % every == 0:
            number = t // every - phases  # whose answer is due
            mean, owed, early_then = zero, [zero] * workers, [zero] * workers
            if number >= 1:
                messages, early_then = rounds[number - 1]
                if number in lost:
                    owed = messages
                else:
                    mean = ref.average(messages)
            messages = [ref.combine(lambda p, a, o: p - a + o, points[m], x[m], owed[m]) for m in range(workers)]
            early = [ref.combine(lambda d: d / workers if eager else d * 0, message) for message in messages]
            for m in range(workers):
                term = ref.combine(lambda a, e, b: a + e - b, mean, early[m], early_then[m])
                x[m] = points[m] = outer[m](points[m], term)
            rounds.append((messages, early))
        for m, replica in enumerate(fleet.replicas):
            assert problem.gap(problem.values(replica.model), x[m]) < 1e-5, f"step {t}"


@pytest.mark.parametrize("eager", [True, False])
def test_finish_takes_one_outer_step_with_the_answer_in_hand(eager: bool) -> None:
    """No fresh term; the steps since the last launch stay in, and then the plain mean."""
    make = tw.eager_diloco if eager else tw.delayed_diloco
    fleet = problem.fleet(make(4, None, 0.2, 0.8), 3, sgd)
    world, method = ref.World(3, lambda: ref.SGD(0.05)), ref.Phased(eager, 0.2, 0.8, every=4)
    for _ in range(14):
        problem.step(fleet)
        world.step(method)
    sent, early = method.sent[-1]
    ends = []
    for m, x in enumerate(world.x):
        term = ref.average(sent) if not eager else ref.combine(np.subtract, ref.average(sent), early[m])
        new = method.outer[m](method.point[m], term)
        ends.append(ref.combine(lambda a, n, p: a + n - p, x, new, method.point[m]))
    fleet.finish()
    for replica in fleet.replicas:
        assert problem.gap(problem.values(replica.model), ref.average(ends)) < 1e-5


def test_a_lost_round_names_its_row_round_and_step() -> None:
    fleet = fleet_of(tw.desloc(2), 2, adamw, lose=lambda row, number: row == 1 and number == 2)
    train(fleet, 13)
    (event,) = fleet.events
    assert (event.kind, event.row, event.round, event.step) == ("lost", 1, 2, 12)


def test_a_fragment_that_was_mended_takes_its_answer_outright() -> None:
    """Its progress since the launch was cleared, so that adding it again would move it away from the others."""
    soon, late = (tw.params.where(lambda name, part=part: name.startswith(part)) for part in ("inner", "head"))
    rule = tw.Carry(tw.Nesterov(0.7, 0.6))
    rows = tw.Sync(soon, tw.Every(6, delay=1), rule), tw.Sync(late, tw.Every(6, offset=3, delay=6), rule)
    fleet = train(fleet_of(tw.table("parts", *rows, every=6), 2, sgd), 11)
    poison(fleet, 1, states=False)
    with torch.no_grad():
        fleet.replicas[1].model.head.weight.fill_(float("nan"))
    train(fleet, 2)  # the first row's round lands, so that the second is mended, whose own is under way
    sick = fleet.rows[1].lanes[1]
    assert len(fleet.rows[1].flights) == 1 and bool(sick.live.read().isfinite().all())
    train(fleet, 1)
    before = sick.live.read()
    anchor = sick.state["anchor"]
    assert anchor is not None and not torch.equal(before, anchor)  # it has trained on
    train(fleet, 1)
    assert torch.equal(sick.live.read(), anchor)


def test_a_lost_round_leaves_who_was_mended_out_of_the_next_one() -> None:
    """Its moments were cleared: losing the first round must be as if the period had been twice as long."""

    def moments(period: int, lose: Any = None) -> list[torch.Tensor]:
        rows = (
            tw.Sync(tw.params, tw.Every(2), tw.Average()),
            tw.Sync(tw.moment("exp_avg"), tw.Every(period), tw.Overwrite()),
        )
        fleet = fleet_of(tw.Method("rows", rows), 2, adamw, lose=lose)
        train(fleet, 1)
        poison(fleet, 0, states=False)
        train(fleet, 7, begin=1)
        assert fleet.events.counts["sick"] > 1
        return [value for replica in fleet.replicas for value in states_of(replica)]

    def states_of(replica: tw.Replica) -> list[torch.Tensor]:
        return [state["exp_avg"] for name in replica.trainable if (state := replica.state_of(name))]

    lost = moments(4, lambda row, number: row == 1 and number == 1)
    for one, other in zip(lost, moments(8), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_worker_without_weight_neither_spoils_a_second_moment_nor_wipes_a_first(delay: int) -> None:
    """Rounding took the second below zero, whose root is NaN; a tensor that only the weightless has is its own."""
    models = [torch.nn.ModuleDict({k: torch.nn.Linear(4, 2) for k in "ab"}) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    replicas = [tw.Replica(m, torch.optim.Adam(m.parameters(), 0.0), weight=w) for w, m in enumerate(models)]
    fleet = tw.Fleet(replicas, tw.local_adam(every=4, delay=delay), tw.Local())
    for step in range(9):
        for worker, replica in enumerate(replicas):
            scale = 30.0 if worker == 0 and step < 2 else 0.0
            for name, parameter in replica.trainable.items():
                if name.startswith("a") or worker == 0:
                    parameter.grad = torch.full_like(parameter, scale if name.startswith("a") else 1.0)
        fleet.step()
    first = replicas[0].state_of("b.weight")["exp_avg"]
    torch.testing.assert_close(first, torch.full_like(first, 1 - 0.9**9))
    assert all(
        float(r.state_of(name)["exp_avg_sq"].min()) >= 0 for r in replicas for name in r.trainable if r.state_of(name)
    )
    assert finite(fleet)


def test_what_a_later_row_moves_apart_is_no_longer_taken_as_equal() -> None:
    heads = tw.params.where(lambda name: "head" in name)
    rows = tw.Sync(tw.params, tw.Every(4), tw.Average()), tw.Sync(heads, tw.Every(4, offset=2, delay=2), tw.Average())
    fleet = fleet_of(tw.Method("overlapping", rows), 2, sgd)
    train(fleet, 8)
    assert not all_equal(fleet)
    mean = torch.stack([replica.module.head.weight.detach() for replica in fleet.replicas]).mean(0)
    torch.testing.assert_close(fleet.consensus()["head.weight"], mean)
