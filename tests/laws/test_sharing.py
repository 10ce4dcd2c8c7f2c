"""Methods that only exchange gradients need equal optimizer states: taken together when such a method begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw


class Two(nn.Module):
    """Parts that a batch may use or leave, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, parts: str) -> torch.Tensor:
        return sum((getattr(self, part)(x) for part in parts), torch.zeros(())) * self.gain


def made(method: tw.Method, optimizer: Callable[[Any], Any], workers: int = 2, **options: Any) -> tw.Fleet:
    torch.manual_seed(0)
    models = [Two() for _ in range(workers)]
    return tw.Fleet([tw.Replica(m, optimizer(m.parameters())) for m in models], method, tw.Local(), **options)


def step(fleet: tw.Fleet, parts: Sequence[str] = ("ab", "ab", "ab"), factors: Sequence[float] = (1, 1, 1)) -> None:
    for replica, part, factor in zip(fleet.replicas, parts, factors, strict=False):
        (replica.model(torch.randn(5, 3), part).square().mean() * factor).backward()
    fleet.step()
    for parameter in (p for replica in fleet.replicas for p in replica.model.parameters()):
        parameter.grad = None


def equal(fleet: tw.Fleet) -> bool:
    """And finite."""
    first, *others = [list(replica.model.parameters()) for replica in fleet.replicas]
    finite = all(bool(torch.isfinite(p).all()) for p in first)
    return finite and all(torch.equal(p, q) for other in others for p, q in zip(first, other, strict=True))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


OPTIMIZERS = [adamw, momentum, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.Rprop, tw.ADOPT]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_after_a_switch_to_ddp_workers_stay_equal_with_any_optimizer(optimizer: Callable[[Any], Any]) -> None:
    fleet = made(tw.diloco(2), optimizer)
    for _ in range(3):
        step(fleet)
    fleet.switch(tw.ddp())
    for _ in range(3):
        step(fleet)
        assert equal(fleet)


def test_one_sick_worker_does_not_spoil_the_states_of_all() -> None:
    fleet = made(tw.diloco(4), adamw, workers=3)
    for _ in range(5):
        step(fleet)
    step(fleet, factors=(1, float("nan"), 1))
    healthy = [fleet.replicas[i].optimizers[0].state[fleet.replicas[i].model.a.weight]["exp_avg"] for i in (0, 2)]
    wanted = torch.stack(healthy).mean(0)
    fleet.switch(tw.ddp())
    for replica in fleet.replicas:
        state = replica.optimizers[0].state[replica.model.a.weight]
        torch.testing.assert_close(state["exp_avg"], wanted)
        assert float(state["step"]) == 6
    step(fleet)
    assert equal(fleet)


def test_counts_that_differ_become_those_of_who_is_farthest() -> None:
    """A worker that was sick begins its state anew, and counts from zero."""
    fleet = made(tw.diloco(4), adamw)
    for number in range(8):
        step(fleet, factors=(1, float("nan") if number == 5 else 1))
    steps = [float(r.optimizers[0].state[r.model.a.weight]["step"]) for r in fleet.replicas]
    assert steps == [8, 0]
    wanted = fleet.replicas[0].optimizers[0].state[fleet.replicas[0].model.a.weight]["exp_avg"].clone()
    fleet.switch(tw.ddp())
    states = [r.optimizers[0].state[r.model.a.weight] for r in fleet.replicas]
    assert all(torch.equal(state["exp_avg"], wanted) and float(state["step"]) == 8 for state in states)
    for _ in range(4):
        step(fleet)
    assert equal(fleet)


def test_a_state_that_one_worker_lacks_begins_anew_and_is_said() -> None:
    fleet = made(tw.diloco(2), adamw)
    for _ in range(4):
        step(fleet, parts=("a", "ab"))
    fleet.switch(tw.ddp())
    assert any("begin anew" in event.text for event in fleet.events)
    for _ in range(3):
        step(fleet)
        assert equal(fleet)


def test_states_loaded_on_one_worker_only_do_not_part_them() -> None:
    fleet = made(tw.ddp(), adamw)
    first = fleet.replicas[0]
    first.model(torch.randn(5, 3), "ab").square().mean().backward()
    first.optimizers[0].step()
    first.optimizers[0].zero_grad()
    for _ in range(3):
        step(fleet)
        assert equal(fleet)


@pytest.mark.parametrize("method", [tw.ddp, tw.demo])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_only_a_sick_worker_has_is_dropped(method: Callable[[], tw.Method], clip: float | None) -> None:
    fleet = made(method(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), clip=clip)
    step(fleet)
    step(fleet, parts=("a", "ab"), factors=(1, float("nan")))
    for _ in range(2):
        step(fleet)
        assert equal(fleet)
    assert fleet.events.counts["sick"] == 1


def test_a_gradient_that_only_a_worker_without_weight_has_is_dropped() -> None:
    fleet = made(tw.ddp(), adamw)
    step(fleet)
    fleet.replicas[1].weight = 0
    step(fleet, parts=("a", "ab"))
    step(fleet, parts=("a", "ab"), factors=(1, 0))
    assert equal(fleet)


def test_a_state_begins_anew_with_what_its_optimizer_begins_it() -> None:
    for optimizer in (torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adam):
        fresh, again = (torch.nn.Linear(3, 2) for _ in range(2))
        replica = tw.Replica(again, optimizer(again.parameters(), lr=0.01))
        again(torch.randn(4, 3)).square().mean().backward()
        replica.optimizers[0].step()
        replica.restart_states(["weight", "bias"])
        fresh.load_state_dict(again.state_dict())
        other = optimizer(fresh.parameters(), lr=0.01)
        inputs = torch.randn(4, 3)
        for model, inner in ((again, replica.optimizers[0]), (fresh, other)):
            inner.zero_grad()
            model(inputs).square().mean().backward()
            inner.step()
        torch.testing.assert_close(again.weight, fresh.weight, rtol=0, atol=1e-7)
