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


def test_a_parameter_that_is_replaced_is_refused_at_the_next_launch() -> None:
    fleet = fleet_of(tw.local_sgd(2), 1, adamw)
    replica = fleet.replicas[0]
    train(fleet, 1)
    name, old = next((name, p) for name, p in replica.module.named_parameters() if name == "head.weight")
    new = replica.module.head.weight = nn.Parameter(old.detach().clone())
    parameters = replica.optimizers[0].param_groups[0]["params"]
    parameters[next(i for i, each in enumerate(parameters) if each is old)] = new
    with pytest.raises(ValueError, match="head.weight"):
        train(fleet, 1, begin=1)


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    """Of a loss, say: under ddp it would part the workers, and nothing would say so."""
    model = odd_model()
    with pytest.raises(ValueError, match="not the model's"):
        tw.Replica(model, sgd([*model.parameters(), nn.Parameter(torch.ones(()))]))


def test_a_transport_in_memory_serves_one_fleet_after_another() -> None:
    """It knows how many workers there are: two fleets at once would take each other's number."""
    transport = tw.Local()
    first = train(tw.Fleet(fleet_of(tw.diloco(2), 2, sgd).replicas, tw.eager_diloco(2), transport), 3)
    second = train(tw.Fleet(fleet_of(tw.diloco(2), 4, sgd).replicas, tw.eager_diloco(2), transport), 3)
    assert second.workers == 4
    with pytest.raises(ValueError, match="serves another fleet by now"):
        train(first, 1)


def test_groups_may_be_merged() -> None:
    fleet = fleet_of(tw.desloc(2), 2, lambda parameters: torch.optim.AdamW([{"params": [p]} for p in parameters]))
    train(fleet, 2)
    for replica in fleet.replicas:
        first, *others = replica.optimizers[0].param_groups
        first["params"] += [p for group in others for p in group["params"]]
        del replica.optimizers[0].param_groups[1:]
    train(fleet, 4, begin=2)
    assert fleet.steps == 6 and not fleet.events


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
    with pytest.raises(ValueError, match="not the model's"):
        tw.Replica(one, both)
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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_optimizers_may_step_in_any_order_each_after_a_backward_pass_of_its_own(order: tuple[int, ...]) -> None:
    parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizers = [sgd(part.parameters()) for part in parts]
    fleet = tw.attach(parts, optimizers, tw.local_sgd(2), tw.Local())
    for _ in range(6):
        for i in order:
            optimizers[i].zero_grad()
            parts[i](torch.ones(2, 4)).square().mean().backward()
            optimizers[i].step()
    assert fleet.steps == 6 and fleet.bytes_sent == tw.cost(tw.local_sgd(2), parts, 1).bytes(6)


def test_optimizers_may_step_within_the_backward_pass() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    each = {parameter: sgd([parameter]) for parameter in model.parameters()}
    fleet = tw.attach(model, list(each.values()), tw.local_sgd(2), tw.Local())

    def step(parameter: nn.Parameter) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(6):
        model(torch.ones(2, 4)).square().mean().backward()
    assert fleet.steps == 6 and fleet.bytes_sent == tw.cost(tw.local_sgd(2), model, 1).bytes(6)


def test_a_step_that_raised_after_the_gradients_had_met_parts_nobody() -> None:
    """A loop that catches it and drops the batch goes on; the rounds of that step are over."""
    fleet = fleet_of(tw.ddp(), 2, sgd)
    failing = iter([False, True])

    def out_of_memory(*_: Any) -> None:
        if next(failing, False):
            raise torch.OutOfMemoryError

    fleet.replicas[0].optimizers[0].register_step_pre_hook(out_of_memory)
    train(fleet, 1)
    with pytest.raises(torch.OutOfMemoryError):
        train(fleet, 1, begin=1)
    train(fleet, 3, begin=2)
    one, other = (replica.module.state_dict() for replica in fleet.replicas)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert fleet.steps == 5 and fleet.events.counts == {"unfinished": 1}


def test_workers_with_other_optimizers_do_not_mix_their_states() -> None:
    kinds = [lambda given: torch.optim.Adamax(given), lambda given: torch.optim.SGD(given, momentum=0.9)]
    models = [odd_model(), odd_model()]
    replicas = [tw.Replica(model, kind(model.parameters())) for model, kind in zip(models, kinds, strict=True)]
    fleet = tw.Fleet(replicas, tw.desloc(1), tw.Local())
    with pytest.raises(ValueError, match="exp_avg on worker 0.* momentum_buffer on worker 1"):
        fleet.begin()
