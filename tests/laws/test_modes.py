"""Calls from within torch.inference_mode, and what a rule may do with an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.live import Live
from thinwire.rule import Reduced, Rule, Scope, State

from .entries import ENTRIES, adamw, all_equal, backward, fleet_of, same, sgd, snapshot, train, weights_of


def evaluate(fleet: tw.Fleet) -> None:
    with fleet.evaluating():
        fleet.replicas[0].model(torch.ones(2, 7))


@pytest.mark.parametrize(
    "call",
    [evaluate, tw.Fleet.begin, tw.Fleet.consensus, tw.Fleet.finish, tw.Fleet.drain, tw.Fleet.state_dict],
    ids=lambda call: call.__name__,
)
@pytest.mark.parametrize("steps", [0, 3])
def test_inference_mode_is_as_good_as_no_grad(call: Callable[[tw.Fleet], Any], steps: int) -> None:
    """An anchor that was made in it could not be changed afterwards."""
    inside, outside = (train(fleet_of(tw.eager_diloco(2), 2, sgd), steps) for _ in range(2))
    with torch.inference_mode():
        call(inside)
    call(outside)
    assert same(snapshot(train(inside, 5)), snapshot(train(outside, 5)))


@dataclass(frozen=True)
class Remembering(Rule):
    """Local SGD that keeps the answer of the round before."""

    def init(self, x: Live, scope: Scope) -> State:
        return {"last": x.read()}

    def send(self, x: Live, state: State, scope: Scope) -> torch.Tensor:
        return x.read()

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        x.write(answer.mean)
        state["last"] = answer.mean


def test_a_rule_may_keep_the_answer() -> None:
    """Its memory would be the next message's."""
    fleet = fleet_of(tw.table("remembering", tw.Sync(tw.params, tw.Every(2), Remembering()), every=2), 1, sgd)
    train(fleet, 2)
    lane = fleet.rows[0].lanes[0]
    kept = lane.state["last"]
    assert kept is not None
    was = kept.clone()
    message = fleet.rows[0].sync.rule.send(lane.live, lane.state, fleet.rows[0].scope).zero_()
    assert torch.equal(kept, was) and not torch.equal(kept, message)


def test_demo_clips_the_gradients_that_go_in_not_the_signs_that_come_out() -> None:
    moved = []
    for clip in (None, 1.0):
        model = torch.nn.Linear(20, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tw.attach(model, optimizer, tw.demo(), tw.Local(), clip=clip)
        before = model.weight.detach().clone()
        model(torch.ones(2, 20)).square().sum().backward()
        optimizer.step()
        moved.append(float((model.weight.detach() - before).abs().max()))
    assert moved == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_tensor_without_a_gradient_keeps_what_it_is_owed() -> None:
    """Nobody hears the part of a message that counts for nothing."""
    fleet = fleet_of(tw.demo(chunk=4, topk=2, decay=1.0, values=tw.Float32()), 2, sgd)
    train(fleet, 1)
    row = fleet.rows[0]
    place = row.names.index("head.weight")

    def owed() -> torch.Tensor:
        residual = row.lanes[0].state["residual"]
        assert residual is not None
        return row.layout.views(residual)[place].clone()

    before = owed()
    for replica in fleet.replicas:
        for name, parameter in replica.trainable.items():
            parameter.grad = None if name == "head.weight" else torch.ones_like(parameter)
    fleet.step()
    assert before.abs().sum() > 0 and torch.equal(before, owed())


def weighed(weight: Any) -> list[torch.Tensor]:
    fleet = fleet_of(tw.local_sgd(2), 2, sgd)
    fleet.replicas[0].weight = weight
    return snapshot(train(fleet, 6))


def test_a_weight_may_be_any_number() -> None:
    """A tensor would be added to in place, and weigh nothing from the second round on."""
    assert same(weighed(3), weighed(torch.tensor(3))) and same(weighed(3), weighed(torch.tensor(3).numpy()))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="replica.weight"):
        weighed(weight)


def test_a_parameter_that_thaws_is_refused() -> None:
    fleet = fleet_of(tw.local_sgd(2), 1, sgd)
    model = fleet.replicas[0].model
    model.head.bias.requires_grad_(False)
    frozen = tw.Fleet([tw.Replica(model, sgd(model.parameters()))], tw.local_sgd(2), tw.Local())
    train(frozen, 2)
    model.head.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="head.bias was frozen"):
        train(frozen, 2)


def test_complex_parameters_are_refused() -> None:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="0 is complex"):
        tw.Replica(model, sgd(model.parameters()))


def test_two_parameters_of_one_clean_name_are_refused() -> None:
    """One of them would be left out: wrappers' parts of a name are taken off."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2), "base_model": torch.nn.ModuleDict()})
    model["base_model"]["model"] = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="same name"):
        tw.Replica(model, sgd(model.parameters()))


def test_a_switch_that_cannot_be_changes_nothing() -> None:
    fleet, straight = (fleet_of(tw.local_sgd(3), 2) for _ in range(2))
    train(fleet, 4)
    with pytest.raises(ValueError, match="demo hands plain SGD"):
        fleet.switch(tw.demo())
    with pytest.raises(ValueError, match="made by a call"):
        fleet.switch("diloco")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to synchronise"):
        fleet.switch(
            tw.table("nothing", tw.Sync(tw.params.where(lambda name: False), tw.Every(2), tw.Average()), every=2)
        )
    assert fleet.method.name == "local_sgd" and same(snapshot(train(fleet, 4)), snapshot(train(straight, 8)))


def test_after_a_switch_to_ddp_workers_stay_equal() -> None:
    """Their moments differed, so that equal gradients made unequal steps."""
    fleet = train(fleet_of(tw.local_sgd(3), 2), 4)
    fleet.switch(tw.ddp())
    train(fleet, 3)
    first, second = (list(replica.trainable.values()) for replica in fleet.replicas)
    assert same(first, second)


def test_drained_moments_are_as_if_averaged_at_launch() -> None:
    """Fewer steps have passed than the delay, so that they have forgotten less."""
    fleet = train(fleet_of(tw.local_adam(4, delay=3), 2), 4)
    fleet.drain()
    first, second = ([s["exp_avg"] for s in r.optimizers[0].state.values()] for r in fleet.replicas)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second, strict=True))


def test_what_a_lost_message_held_is_owed_once() -> None:
    """Eager owes the whole message, the residual that went into it included."""
    row = tw.Sync(tw.params, tw.Every(2, delay=2), tw.Eager(tw.Nesterov(0.4, 0.9)), tw.TopK(5, 16), feedback=1.0)
    method = tw.table("eager", row, every=2)
    residuals = []
    for lost in (0, 2):
        fleet = fleet_of(method, 2, sgd)
        fleet.transport = tw.Local(lose=lambda row, number, lost=lost: number == lost)
        train(fleet, 6)  # the second round lands at step 6
        residual = fleet.rows[0].lanes[0].state["residual"]
        assert residual is not None
        residuals.append(float(residual.abs().sum()))
    assert residuals[0] > 0 and residuals[1] == 0


@pytest.mark.parametrize("method", [tw.delayed_diloco, tw.eager_diloco])
def test_what_is_owed_by_a_worker_that_is_sick_now_stays_owed(method: Any) -> None:
    """One step of one worker is lost on the way; then that worker is sick."""
    ends = []
    for lost, sick in [(False, False), (True, False), (True, True)]:
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for model in models:
            torch.nn.init.zeros_(model.weight)
        replicas = [tw.Replica(model, sgd(model.parameters())) for model in models]
        lose = tw.Local(lambda row, number, lost=lost: lost and number == 2)
        fleet = tw.Fleet(replicas, method(1, outer_lr=1.0, outer_momentum=0.0), lose)
        for number in range(1, 9):
            for worker, model in enumerate(models):
                moves = float(number == 2 and worker == 1)
                model.weight.grad = torch.full((1, 1), float("nan") if sick and (number, worker) == (3, 1) else moves)
            fleet.step()
        fleet.finish()
        ends.append(float(models[0].weight.detach()))
    assert ends[0] < 0 and ends == pytest.approx([ends[0]] * 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
        lambda p: torch.optim.Adamax(p, lr=0.01),
    ],
    ids=["amsgrad", "rmsprop", "adagrad", "adamax"],
)
def test_every_state_is_shared_where_equal_gradients_must_make_equal_steps(make: Any) -> None:
    fleet = fleet_of(tw.local_sgd(100), 2, make)
    train(fleet, 4)
    fleet.switch(tw.ddp())
    train(fleet, 3)
    assert all_equal(fleet)


def test_ddp_that_begins_with_unequal_states_makes_them_equal() -> None:
    """Optimizers loaded from checkpoints of their own, as after a change of the number of workers."""
    apart = fleet_of(tw.local_sgd(100), 2, adamw)
    train(apart, 4)
    fleet = tw.Fleet([tw.Replica(r.model, r.optimizers) for r in apart.replicas], tw.ddp(), tw.Local())
    train(fleet, 3)
    assert all_equal(fleet)


@pytest.mark.parametrize(
    "call",
    [
        lambda fleet: fleet.finish(),
        lambda fleet: fleet.drain(),
        lambda fleet: fleet.switch(tw.local_sgd(2)),
        lambda fleet: fleet.load_state_dict(fleet.state_dict()),
        lambda fleet: train(fleet, 1),
    ],
    ids=["finish", "drain", "switch", "load", "step"],
)
def test_nothing_that_lasts_happens_inside_evaluating(call: Any) -> None:
    fleet = fleet_of(tw.local_sgd(3), 2)
    train(fleet, 4)
    before = weights_of(fleet)
    with fleet.evaluating(), fleet.evaluating(), pytest.raises(ValueError, match="after that block"):
        call(fleet)
    assert all(same(a, b) for a, b in zip(before, weights_of(fleet), strict=True))
    call(fleet)


def test_weights_count_from_the_end_of_the_last_training_on() -> None:
    """Worker 0 had no tokens since the last round when training ended; after that both have as many."""
    fleet = fleet_of(tw.local_sgd(4), 2, sgd)
    train(fleet, 4)
    fleet.replicas[0].weight = 0
    train(fleet, 2)
    fleet.finish()
    for replica in fleet.replicas:
        replica.weight = 1
    anew = fleet_of(tw.local_sgd(2), 2, sgd)
    for replica, other in zip(anew.replicas, fleet.replicas, strict=True):
        replica.model.load_state_dict(other.model.state_dict())
    train(fleet, 2)
    train(anew, 2, begin=6)
    for mine, theirs in zip(weights_of(fleet)[0], weights_of(anew)[0], strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["ddp", "desloc", "diloco int8", "eager e3m0", "decoupled mean", "sparseloco", "demo"])
def test_the_users_default_device_is_the_users(name: str) -> None:
    """What thinwire makes for itself is made on the tensors' device, or in host memory."""
    entry = ENTRIES[name]
    plain, fleet = (fleet_of(entry.method, 3, entry.optimizer) for _ in range(2))
    train(plain, 4)
    try:
        for step in range(4):
            for worker, replica in enumerate(fleet.replicas):
                backward(replica.model, step, worker)
            torch.set_default_device("meta")
            fleet.step()
            fleet.zero_grad()
            fleet.load_state_dict(fleet.state_dict())
            torch.set_default_device(None)
    finally:
        torch.set_default_device(None)
    assert same(snapshot(plain), snapshot(fleet))
