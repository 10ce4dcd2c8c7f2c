"""What a loop may do to a fleet: it is taken along, or refused in one line, and never wrong in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw

from .entries import adamw, backward, fleet_of, odd_model, sgd, train


def attached(method: tw.Method, optimizer: Any = sgd, **options: Any) -> tuple[nn.Module, Any]:
    model = odd_model()
    made = optimizer(model.parameters())
    tw.attach(model, made, method, tw.Local(), **options)
    return model, made


@pytest.mark.parametrize(("method", "options"), [(tw.ddp(), {}), (tw.local_sgd(2), {"clip": 1.0})])
def test_a_fused_optimizer_under_a_grad_scaler_is_refused_where_gradients_are_touched(
    method: tw.Method, options: dict[str, Any]
) -> None:
    """It unscales within its step, and skips there: after the gradients have met, and each worker by itself."""
    model, optimizer = attached(method, lambda given: torch.optim.AdamW(given, fused=True), **options)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 7)).square().mean()).backward()
    with pytest.raises(ValueError, match="fused=False"):
        scaler.step(optimizer)


def test_a_fused_optimizer_under_a_grad_scaler_goes_with_methods_that_exchange_parameters() -> None:
    model, optimizer = attached(tw.local_sgd(2), lambda given: torch.optim.AdamW(given, fused=True))
    scaler = torch.amp.GradScaler("cpu")
    before = model.head.weight.detach().clone()
    scaler.scale(model(torch.ones(4, 7)).square().mean()).backward()
    scaler.step(optimizer)
    assert not torch.equal(before, model.head.weight)


class Pair(nn.Module):
    """As in a GAN: each half has its optimizer, and its backward pass after the other's step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)


def take_turns(method: tw.Method) -> None:
    model = Pair()
    optimizers = [sgd(model.one.parameters()), sgd(model.other.parameters())]
    tw.attach(model, optimizers, method, tw.Local())
    for half, optimizer in zip((model.one, model.other), optimizers, strict=True):
        optimizer.zero_grad()
        half(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_gradients_that_come_after_the_others_have_met_are_refused() -> None:
    with pytest.raises(ValueError, match="all backward passes before the first optimizer"):
        take_turns(tw.ddp())
    take_turns(tw.local_sgd(2))


def step_with_closure(method: tw.Method) -> None:
    model, optimizer = attached(method, lambda given: torch.optim.LBFGS(given, max_iter=3))

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, 0, 0)

    optimizer.step(closure)


def test_a_closure_that_is_called_again_is_refused_where_gradients_meet() -> None:
    with pytest.raises(ValueError, match="LBFGS calls its closure several times a step"):
        step_with_closure(tw.ddp())
    step_with_closure(tw.local_sgd(2))


def test_a_parameter_that_comes_later_is_refused_at_the_next_launch() -> None:
    fleet = fleet_of(tw.local_sgd(2), 1, adamw)
    replica = fleet.replicas[0]
    train(fleet, 1)
    replica.module.late = nn.Linear(2, 2)
    replica.optimizers[0].add_param_group({"params": list(replica.module.late.parameters())})
    with pytest.raises(ValueError, match="late.weight came after the fleet was made"):
        train(fleet, 1, begin=1)


def test_statistics_that_are_put_in_anew_are_refused_at_the_next_launch() -> None:
    """Casting and some ways of loading keep a parameter and replace a buffer."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    optimizer = sgd(model.parameters())
    tw.attach(model, optimizer, tw.local_sgd(1), tw.Local())
    model.double()
    model(torch.ones(4, 7, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match="1.running_mean is another tensor than when the fleet was made"):
        optimizer.step()


def test_replicas_share_neither_an_optimizer_nor_a_parameter() -> None:
    one, other = odd_model(), odd_model()
    both = sgd([*one.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match="share a model"):
        tw.Fleet([tw.Replica(one, both), tw.Replica(other, both)], tw.local_sgd(2), tw.Local())
    other.head.weight = one.head.weight
    pair = [tw.Replica(model, sgd(model.parameters())) for model in (one, other)]
    with pytest.raises(ValueError, match="share a model"):
        tw.Fleet(pair, tw.local_sgd(2), tw.Local())


def test_several_processes_without_a_group_do_not_train_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some launchers set WORLD_SIZE and leave the group to the program."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = odd_model()
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group"):
        tw.attach(model, sgd(model.parameters()), tw.local_sgd(2))
    assert tw.attach(model, sgd(model.parameters()), tw.local_sgd(2), tw.Local()).workers == 1


def test_gradients_of_any_size_that_a_float_holds_are_finite() -> None:
    fleet = fleet_of(tw.ddp(), 2, sgd)
    for replica in fleet.replicas:
        for parameter in replica.trainable.values():
            parameter.grad = torch.full_like(parameter, 1e19)
    fleet.step()
    assert fleet.events.counts == {}


@pytest.mark.parametrize("variant", ["paper", "mean"])
@pytest.mark.parametrize("sick", [0, 1])
def test_finish_takes_the_first_worker_that_is_finite(variant: Any, sick: int) -> None:
    """These methods do not make workers equal, and the first one's model is the result."""
    fleet = fleet_of(tw.decoupled_momentum(4, chunk=8, topk=6, variant=variant), 3, sgd)
    train(fleet, 6)
    healthy = [parameter.detach().clone() for parameter in fleet.replicas[1 if sick == 0 else 0].trainable.values()]
    with torch.no_grad():
        next(iter(fleet.replicas[sick].trainable.values())).fill_(torch.nan)
    fleet.finish()
    for replica in fleet.replicas:
        for parameter, expected in zip(replica.trainable.values(), healthy, strict=True):
            assert torch.equal(parameter, expected)
    assert fleet.events.counts == ({"sick": 1} if sick == 0 else {})
