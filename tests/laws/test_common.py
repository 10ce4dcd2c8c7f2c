"""What holds for every method of the table."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw

from .entries import (
    ENTRIES,
    Entry,
    all_equal,
    doubled,
    fleet_of,
    mean_of,
    odd_model,
    replicas,
    same,
    snapshot,
    train,
    weights_of,
)

every_method = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())


def those(keep: Any) -> Any:
    return pytest.mark.parametrize(
        "entry", [e for e in ENTRIES.values() if keep(e)], ids=[n for n, e in ENTRIES.items() if keep(e)]
    )


def start(entry: Entry, workers: int = 2, lose: Any = None) -> tw.Fleet:
    return fleet_of(entry.method, workers, entry.optimizer, lose=lose)


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def after_reload(fleet: tw.Fleet, entry: Entry, lose: Any = None) -> tw.Fleet:
    """A new fleet with all that was saved: model and optimizer first, then the fleet."""
    fresh = replicas(len(fleet.replicas), entry.optimizer)
    for new, old in zip(fresh, fleet.replicas, strict=True):
        new.model.load_state_dict(reloaded(old.model.state_dict()))
        for into, source in zip(new.optimizers, old.optimizers, strict=True):
            into.load_state_dict(reloaded(source.state_dict()))
    result = tw.Fleet(fresh, entry.method, tw.Local(lose))
    result.load_state_dict(reloaded(fleet.state_dict()))
    return result


# what a method costs


@pytest.mark.parametrize("workers", [1, 2, 4])
@every_method
def test_bytes_are_the_price(entry: Entry, workers: int) -> None:
    fleet = start(entry, workers)
    model = odd_model()
    price = tw.cost(entry.method, model, workers, entry.optimizer(model.parameters()))
    for steps in (1, 2, 3, 6, 7):
        train(fleet, steps)
        assert fleet.bytes_sent == price.bytes(fleet.steps)
        assert (fleet.wire_sent, fleet.wire_received) == price.wire(fleet.steps)
    assert fleet.bytes_sent > 0 and (fleet.wire_sent > 0) == (workers > 1)
    assert all(v.isfinite().all() for v in snapshot(fleet)) and not same(weights_of(fleet)[0], list(model.parameters()))


@every_method
def test_the_long_run_mean_of_the_bytes(entry: Entry) -> None:
    model = odd_model()
    price = tw.cost(entry.method, model, 2, entry.optimizer(model.parameters()))
    period = 2520  # a multiple of all periods
    assert price.bytes(3 * period) - price.bytes(2 * period) == pytest.approx(period * price.bytes_per_step)


@every_method
def test_a_price_without_an_optimizer_assumes_all_states(entry: Entry) -> None:
    model = odd_model()
    assert tw.cost(entry.method, model, 2).bytes(60) >= tw.cost(
        entry.method, model, 2, entry.optimizer(model.parameters())
    ).bytes(60)


# saving


@every_method
def test_save_and_load_at_every_step(entry: Entry) -> None:
    """A run that is saved and loaded after each of its steps, against one that never is."""
    plain, broken = start(entry), start(entry)
    for _ in range(15):
        train(plain, 1)
        train(broken, 1)
        assert same(snapshot(plain), snapshot(broken)), f"step {plain.steps}"
        broken = after_reload(broken, entry)
        assert broken.steps == plain.steps
    plain.finish()
    broken.finish()
    assert same(snapshot(plain), snapshot(broken))


@those(lambda e: e.phased)
def test_saving_remembers_lost_rounds(entry: Entry) -> None:
    def lose(row: int, number: int) -> bool:
        return row == 0 and number in (2, 3)

    plain, broken = start(entry, lose=lose), start(entry, lose=lose)
    for _ in range(20):
        train(plain, 1)
        train(broken, 1)
        assert same(snapshot(plain), snapshot(broken)), f"step {plain.steps}"
        broken = after_reload(broken, entry, lose)


# rounds that are lost


@those(lambda e: not (e.phased or e.gradients or e.method.name == "reset_states"))
def test_losing_every_other_round_is_the_double_period(entry: Entry) -> None:
    losing = start(entry, 2, lose=lambda row, number: number % 2 == 1)
    double = fleet_of(doubled(entry.method), 2, entry.optimizer)
    for step in range(21):
        for fleet in (losing, double):
            for worker, replica in enumerate(fleet.replicas):
                replica.weight = 1 + (step * worker) % 3
            train(fleet, 1)
        assert same(snapshot(losing), snapshot(double)), f"step {losing.steps}"
    assert losing.events.counts["lost"] > 0 and "lost" not in double.events.counts


@those(lambda e: e.gradients)
def test_a_lost_gradient_row_skips_the_step(entry: Entry) -> None:
    fleet = start(entry, lose=lambda row, number: row == 0 and number == 4)
    train(fleet, 3)
    before = snapshot(fleet)
    train(fleet, 1)
    assert same(snapshot(fleet), before)
    assert fleet.events.counts == {"lost": 1}
    train(fleet, 2)
    assert all_equal(fleet) and not same(snapshot(fleet), before)


# equal replicas


@those(lambda e: e.equal is not None)
@pytest.mark.parametrize("workers", [2, 3])
def test_replicas_are_equal_after_a_sync(entry: Entry, workers: int) -> None:
    assert entry.equal is not None
    fleet = start(entry, workers)
    for _ in range(12):
        train(fleet, 1)
        if fleet.steps > 1:  # the first step of ADOPT does not move
            assert all_equal(fleet) == (fleet.steps % entry.equal == 0)


# the end of a run


@those(lambda e: not e.phased and e.method.name != "decoupled_momentum" or e.copy)
def test_finish_is_the_plain_mean_with_the_last_steps(entry: Entry) -> None:
    """Two steps after a round: what is in flight lands, and the mean of the parameters is the result."""
    fleet, other = train(start(entry), 11), train(start(entry), 11)
    other.drain()
    expected, state, sent = mean_of(weights_of(other)), snapshot(other), other.bytes_sent
    other.drain()
    assert same(snapshot(other), state) and other.bytes_sent == sent  # nothing was left in flight
    fleet.finish()
    assert all_equal(fleet)
    for got, want in zip(weights_of(fleet)[0], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["decoupled paper", "decoupled mean"])
def test_finish_exports_worker_0_where_workers_differ_by_design(name: str) -> None:
    fleet = train(start(ENTRIES[name], 3), 11)
    first = weights_of(fleet)[0]
    fleet.finish()
    assert all_equal(fleet) and same(weights_of(fleet)[0], first)


@those(lambda e: e.phased)
@pytest.mark.parametrize("steps", [12, 13])
def test_finish_of_what_steps_at_launch(entry: Entry, steps: int) -> None:
    """Equal replicas, and another gradient in the last step is another result."""
    results = []
    for begin in (0, 500):
        fleet = train(start(entry, 3), steps)
        train(fleet, 1, begin)
        fleet.finish()
        assert all_equal(fleet) and all(v.isfinite().all() for v in snapshot(fleet))
        results.append(weights_of(fleet)[0])
    assert not same(*results)


# looking at the consensus


@every_method
def test_looking_changes_nothing(entry: Entry) -> None:
    """A run that takes the consensus and evaluates after every step, against one that never does."""
    plain, watched = start(entry), start(entry)

    def look() -> None:
        watched.consensus()
        with watched.evaluating():
            pass

    train(plain, 9)
    train(watched, 9, each=look)
    assert same(snapshot(plain), snapshot(watched)) and plain.bytes_sent == watched.bytes_sent


@those(lambda e: e.copy)
def test_a_shared_copy_is_free_to_look_at(entry: Entry) -> None:
    fleet = train(start(entry, 3), 8)
    before = fleet.wire_sent, fleet.wire_received, fleet.bytes_sent
    found = fleet.consensus()
    assert (fleet.wire_sent, fleet.wire_received, fleet.bytes_sent) == before
    assert set(found) == {name for name, _ in odd_model().named_parameters()}


@pytest.mark.parametrize(
    "name", ["local_sgd", "local_adam", "desloc", "diloco", "ddp", "decoupled consensus", "sparseloco"]
)
def test_evaluating_right_after_a_sync_is_free(name: str) -> None:
    fleet = train(start(ENTRIES[name], 3), 12)
    before, values = fleet.wire_sent, weights_of(fleet)[0]
    with fleet.evaluating():
        assert same(weights_of(fleet)[0], values)
    assert same(list(fleet.consensus().values()), values)
    assert fleet.wire_sent == before


@pytest.mark.parametrize("name", ["local_sgd", "desloc", "local_sgd delay", "desloc top-k", "eager", "eager dct"])
def test_without_a_shared_copy_the_consensus_is_the_mean(name: str) -> None:
    fleet = train(start(ENTRIES[name], 3), 13)
    sent = fleet.wire_sent
    for got, want in zip(fleet.consensus().values(), mean_of(weights_of(fleet)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert fleet.wire_sent > sent


def every_other_gradient() -> tw.Fleet:
    method = tw.table("rare", tw.Sync(tw.grads, tw.Every(2), tw.Overwrite()), every=2)
    return train(fleet_of(method), 3)


def ddp_after_local_steps() -> tw.Fleet:
    """The moments of the workers differ, so that equal gradients do not make equal steps."""
    fleet = train(fleet_of(tw.local_sgd(3)), 4)
    fleet.switch(tw.ddp())
    return train(fleet, 3)


@pytest.mark.parametrize("make", [every_other_gradient, ddp_after_local_steps])
def test_gradients_that_met_do_not_make_a_consensus_by_themselves(make: Any) -> None:
    fleet = make()
    wanted = mean_of(weights_of(fleet))
    agreed = list(fleet.consensus().values())
    fleet.finish()
    assert all_equal(fleet)
    for value in (agreed, weights_of(fleet)[0]):
        assert max(float((a - b).abs().max()) for a, b in zip(value, wanted, strict=True) if b.numel()) < 1e-6


@pytest.mark.parametrize("name", ["diloco", "desloc nesterov", "decoupled consensus", "sparseloco", "diloco int8"])
def test_the_consensus_is_the_outer_copy(name: str) -> None:
    """What the last round left, whatever the workers did since."""
    fleet = train(start(ENTRIES[name], 3), 9)
    outer = weights_of(fleet)[0]
    train(fleet, 2)
    assert same(list(fleet.consensus().values()), outer) and not same(weights_of(fleet)[0], outer)


@pytest.mark.parametrize("name", ["decoupled paper", "decoupled mean"])
def test_where_workers_differ_by_design_worker_0_is_evaluated(name: str) -> None:
    fleet = train(start(ENTRIES[name], 3), 9)
    assert not all_equal(fleet)
    assert same(list(fleet.consensus().values()), weights_of(fleet)[0])


@every_method
def test_evaluating_swaps_in_and_out(entry: Entry) -> None:
    fleet = train(start(entry), 8)
    before, agreed = weights_of(fleet), fleet.consensus()
    storage = [p.data_ptr() for r in fleet.replicas for p in r.model.parameters()]
    with fleet.evaluating():
        for inside in weights_of(fleet):
            assert same(inside, list(agreed.values()))
    assert all(same(a, b) for a, b in zip(weights_of(fleet), before, strict=True))
    assert storage == [p.data_ptr() for r in fleet.replicas for p in r.model.parameters()]


@pytest.mark.parametrize("name", ["diloco", "desloc", "eager"])
def test_an_error_while_evaluating_swaps_out_too(name: str) -> None:
    fleet = train(start(ENTRIES[name], 3), 11)
    before = weights_of(fleet)
    with pytest.raises(KeyError), fleet.evaluating():
        raise KeyError("in the middle")
    assert all(same(a, b) for a, b in zip(weights_of(fleet), before, strict=True))


# other methods half-way


@every_method
def test_switching_away_and_back(entry: Entry) -> None:
    """The old method's consensus is where the new one starts, on every worker."""
    fleet = train(start(entry), 8)
    fleet.drain()
    agreed: list[Tensor] = list(fleet.consensus().values())
    sent = fleet.bytes_sent
    fleet.switch(tw.diloco(3))
    assert all_equal(fleet)
    for got, want in zip(weights_of(fleet)[0], agreed, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    train(fleet, 4)
    fleet.switch(entry.method)
    train(fleet, 5)
    assert fleet.steps == 17 and fleet.bytes_sent > sent
    fleet.finish()
    assert all_equal(fleet)
