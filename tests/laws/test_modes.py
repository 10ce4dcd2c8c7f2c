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

from .entries import fleet_of, same, sgd, snapshot, train


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
