"""Steps that fail or are interrupted, and what is saved after them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw

from .entries import adamw, all_equal, backward, fleet_of, sgd, train


def moved(parameters: Any, before: list[Tensor]) -> float:
    now = [parameter.detach() for parameter in parameters]
    return float(torch.cat([(a - b).flatten() for a, b in zip(now, before, strict=True)]).norm())


def values(parameters: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def test_a_step_after_one_that_failed_is_clipped() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tw.attach(model, optimizer, tw.diloco(8), tw.Local(), clip=1.0)
    failing = iter([False, True])

    def fail(*_: Any) -> None:
        if next(failing, False):
            raise RuntimeError("on purpose")

    optimizer.register_step_pre_hook(fail)
    for step in range(3):
        before = values(model.parameters())
        model(torch.full((2, 4), 100.0)).sum().backward()
        if step == 1:
            with pytest.raises(RuntimeError, match="on purpose"):
                optimizer.step()
        else:
            optimizer.step()
            assert moved(model.parameters(), before) == pytest.approx(1.0, rel=1e-4)
        optimizer.zero_grad()


@pytest.mark.parametrize("to_none", [True, False])
def test_each_backward_pass_of_a_step_is_clipped(to_none: bool) -> None:
    """As in a GAN: the second half's gradients come after the first half has stepped."""
    halves = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 4)])
    optimizers = [torch.optim.SGD(half.parameters(), lr=1.0) for half in halves]
    tw.attach(halves, optimizers, tw.diloco(8), tw.Local(), clip=1.0)
    for _ in range(3):
        for half, optimizer, loss in zip(
            halves,
            optimizers,
            (lambda: halves[0](torch.full((2, 4), 10.0)), lambda: halves[0](halves[1](torch.full((2, 4), 10.0))) * 50),
            strict=True,
        ):
            for each in optimizers:
                each.zero_grad(set_to_none=to_none)
            loss().sum().backward()
            before = values(half.parameters())
            optimizer.step()
            assert 0.01 < moved(half.parameters(), before) < 1.001


def test_every_call_of_a_closure_is_clipped() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    tw.attach(model, optimizer, tw.local_sgd(2), tw.Local(), clip=1.0)
    norms = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 100.0)).square().sum()
        loss.backward()
        return loss

    gather = optimizer._gather_flat_grad
    optimizer._gather_flat_grad = lambda: norms.append(float((flat := gather()).norm())) or flat  # type: ignore[method-assign]
    optimizer.step(closure)
    assert len(norms) > 1 and max(norms) < 1.001


def test_an_optimizer_that_was_skipped_after_its_gradients_met_is_said() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model]
    fleet = tw.attach(model, optimizers, tw.ddp(), tw.Local())
    for step in range(3):
        torch.stack([p.sum() for p in model]).sum().backward()
        for optimizer in optimizers[step == 1 :]:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert fleet.events.counts == {"unfinished": 1} and "optimizer 0 did not step" in fleet.events[0].text


def test_a_state_saved_after_a_step_that_failed_goes_on_together() -> None:
    """The gradients of that step had met; who resumes makes it again."""
    fleet = train(fleet_of(tw.ddp(), 2, sgd), 3)
    hook = fleet.replicas[0].optimizers[0].register_step_pre_hook(fail_with_memory)
    with pytest.raises(torch.OutOfMemoryError):
        train(fleet, 1)
    hook.remove()
    again = fleet_of(tw.ddp(), 2, sgd)
    for new, old in zip(again.replicas, fleet.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
    again.load_state_dict(fleet.state_dict())
    train(again, 3)
    assert again.steps == 6 and all_equal(again)


def fail_with_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


class Interrupted(tw.Local):
    """Ctrl-C in the first wait for an answer."""

    struck = False

    def exchange(self, order: Any) -> Any:
        made, result = super().exchange(order), None
        result = made.headers

        def headers() -> list[bytes]:
            if not self.struck:
                self.struck = True
                raise KeyboardInterrupt
            return result()

        made.headers = headers  # type: ignore[method-assign]
        return made


def test_a_round_that_was_interrupted_is_landed_before_it_is_saved() -> None:
    fleet = tw.Fleet(fleet_of(tw.diloco(2), 2, sgd).replicas, tw.diloco(2), Interrupted())
    with pytest.raises(KeyboardInterrupt):
        train(fleet, 2)
    with pytest.raises(ValueError, match="call fleet.drain"):
        fleet.state_dict()
    fleet.drain()
    assert all_equal(fleet) and fleet.state_dict()["worker0"]["row0"]["landed"] == 1


class Taught(nn.Module):
    """A model with a teacher that follows it: frozen, and each worker's own."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(7, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def follow(self) -> None:
        for mine, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.lerp_(new.data, 0.1)


def teach(fleet: tw.Fleet, steps: int) -> tw.Fleet:
    return train(fleet, steps, each=lambda: [replica.model.follow() for replica in fleet.replicas])


def resumed(fleet: tw.Fleet) -> tw.Fleet:
    again = fleet_of(tw.diloco(4), 2, sgd, Taught())
    for new, old in zip(again.replicas, fleet.replicas, strict=True):
        new.model.load_state_dict(old.model.state_dict())
    again.load_state_dict(fleet.state_dict())
    return again


def test_a_teacher_that_follows_each_workers_model_is_resumed() -> None:
    fleet = teach(fleet_of(tw.diloco(4), 2, sgd, Taught()), 6)
    again = resumed(fleet)
    teach(again, 6)
    teach(fleet, 6)
    for new, old in zip(again.replicas, fleet.replicas, strict=True):
        for mine, theirs in zip(new.model.parameters(), old.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_another_frozen_tensor_than_was_saved_is_named() -> None:
    again = resumed(teach(fleet_of(tw.diloco(4), 2, sgd, Taught()), 6))
    again.replicas[1].model.teacher.weight.data.add_(1.0)
    with pytest.raises(ValueError, match="frozen tensor teacher.weight differs between worker 0 and worker 1"):
        train(again, 1)


def test_a_parameter_that_gets_an_optimizer_later_is_refused_where_moments_meet() -> None:
    for method, refused in ((tw.local_adam(2), True), (tw.diloco(2), False)):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        fleet = tw.Fleet([tw.Replica(model, adamw(model[0].parameters()))], method, tw.Local())
        train(fleet, 1)
        fleet.replicas[0].optimizers[0].add_param_group({"params": list(model[1].parameters())})
        if refused:
            with pytest.raises(ValueError, match="1.weight had no optimizer when the fleet was made"):
                train(fleet, 1)
        else:
            train(fleet, 3)


def test_what_goes_with_an_outer_copy_is_sent_again_with_it() -> None:
    fleet = train(fleet_of(tw.diloco(2), 2, sgd), 4)
    fleet.rows[0].lanes[1].state["velocity"].add_(0.01)
    train(fleet, 8)
    velocities = [lane.state["velocity"] for lane in fleet.rows[0].lanes]
    assert torch.equal(*velocities) and fleet.events.counts == {"unequal": 1}


def test_a_schedule_that_brings_momentum_is_refused_by_demo() -> None:
    fleet = train(fleet_of(tw.demo(4, 4), 2, sgd), 1)
    fleet.replicas[1].optimizers[0].param_groups[0]["momentum"] = 0.9
    for worker, replica in enumerate(fleet.replicas):
        backward(replica.model, 1, worker)
    with pytest.raises(ValueError, match="momentum=0"):
        fleet.step()


@pytest.mark.parametrize(("method", "optimizer"), [(tw.demo(4, 4), sgd), (tw.diloco(2), adamw)])
def test_torchs_checkpoints_take_no_step_of_the_fleet(method: tw.Method, optimizer: Any) -> None:
    """They step an optimizer that has no state yet, at a rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(7, 3)
    made = optimizer(model.parameters())
    fleet = tw.attach(model, made, method, tw.Local())
    get_optimizer_state_dict(model, made)
    assert fleet.steps == 0 and fleet.bytes_sent == 0
    for step in range(2):
        backward(model, step, 0)
        made.step()
        made.zero_grad()
        sent, before = fleet.bytes_sent, copy.deepcopy(fleet.state_dict())
        get_optimizer_state_dict(model, made)
        assert fleet.steps == step + 1 and fleet.bytes_sent == sent
        assert identical(fleet.state_dict(), before)


def identical(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_a_transport_does_not_keep_its_last_fleet_alive() -> None:
    import gc
    import weakref

    transport = tw.Local()
    fleet = train(tw.Fleet(fleet_of(tw.diloco(2), 2, sgd).replicas, tw.diloco(2), transport), 2)
    seen = weakref.ref(fleet)
    del fleet
    gc.collect()
    assert seen() is None
