"""Models, optimizers and loops as users have them: weights, frozen and tied tensors, BatchNorm, bf16, hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw

from .entries import (
    ENTRIES,
    Entry,
    adamw,
    adopt,
    all_equal,
    backward,
    doubled,
    fleet_of,
    momentum,
    odd_model,
    replicas,
    same,
    sgd,
    snapshot,
    train,
    weights_of,
)

every_method = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())


def close(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# weights


def test_weights_are_summed_since_the_last_round() -> None:
    """Worker 0 saw 1 + 2 + 3 + 4 tokens, worker 1 four times one."""
    fleet, alone = fleet_of(tw.local_sgd(4), 2), fleet_of(tw.local_sgd(100), 2)
    for step in range(4):
        fleet.replicas[0].weight = step + 1
        train(fleet, 1)
        train(alone, 1)
    first, second = weights_of(alone)
    close(weights_of(fleet)[0], [(10 * a + 4 * b) / 14 for a, b in zip(first, second, strict=True)])
    assert all_equal(fleet)
    for replica in fleet.replicas:
        replica.weight = 1
    again = copy.deepcopy(weights_of(fleet)[0])
    train(fleet, 4)
    assert all_equal(fleet) and not same(weights_of(fleet)[0], again)


def test_gradients_are_weighted_too() -> None:
    fleet = fleet_of(tw.ddp(), 2, sgd)
    fleet.replicas[0].weight = 3
    model = odd_model()
    grads = []
    for worker in (0, 1):
        one = copy.deepcopy(model)
        backward(one, 0, worker)
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in one.parameters()])
    train(fleet, 1)
    pairs = zip(model.parameters(), *grads, strict=True)
    close(weights_of(fleet)[0], [p.detach() - 0.05 * (3 * a + b) / 4 for p, a, b in pairs])


@every_method
def test_equal_weights_are_the_plain_mean(entry: Entry) -> None:
    plain, heavy = fleet_of(entry.method, 3, entry.optimizer), fleet_of(entry.method, 3, entry.optimizer)
    for replica in heavy.replicas:
        replica.weight = 4
    train(plain, 7)
    train(heavy, 7)
    assert same(snapshot(plain), snapshot(heavy))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "streaming dense", "carry", "desloc"])
def test_equal_weights_of_any_size_are_the_plain_mean(name: str) -> None:
    """37 tokens each: no power of two, so that scaling by the weight rounds."""
    entry = ENTRIES[name]
    plain, heavy = fleet_of(entry.method, 3, entry.optimizer), fleet_of(entry.method, 3, entry.optimizer)
    for replica in heavy.replicas:
        replica.weight = 37
    train(plain, 9)
    train(heavy, 9)
    for one, other in zip(weights_of(plain), weights_of(heavy), strict=True):
        close(one, other)


def test_an_offset_scales_nothing() -> None:
    """All weights are 1, so the plain mean is taken: without training no bit may change."""
    method = tw.Method("offset", (tw.Sync(tw.params, tw.Every(3, offset=1), tw.Average()),))
    fleet = fleet_of(method, 2, lambda p: torch.optim.SGD(p, lr=0.0))
    train(fleet, 4)
    assert same(weights_of(fleet)[0], list(odd_model().parameters()))


def test_a_worker_of_weight_zero_only_listens() -> None:
    fleet, alone = fleet_of(tw.local_sgd(3), 2), fleet_of(tw.local_sgd(100), 1)
    fleet.replicas[1].weight = 0
    train(fleet, 3)
    train(alone, 3)
    assert all_equal(fleet) and same(weights_of(fleet)[0], weights_of(alone)[0])


# what is sent


@every_method
def test_frozen_parameters_are_never_sent(entry: Entry) -> None:
    model, small = odd_model(), odd_model()
    model.inner.bias.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    before = [model.inner.bias.clone(), model.head.weight.clone()]
    fleet = fleet_of(entry.method, 2, lambda p: entry.optimizer([q for q in p if q.requires_grad]), model)
    trainable = entry.optimizer([q for q in model.parameters() if q.requires_grad])
    train(fleet, 7)
    assert fleet.bytes_sent == tw.cost(entry.method, model, 2, trainable).bytes(7)
    assert fleet.bytes_sent < tw.cost(entry.method, small, 2, entry.optimizer(small.parameters())).bytes(7)
    for replica in fleet.replicas:
        assert same([replica.model.inner.bias, replica.model.head.weight], before)
    assert not {"inner.bias", "head.weight"} & set(fleet.consensus())


def test_bytes_from_first_principles() -> None:
    """4 bytes a value and round; desloc's moments at a third and a sixth; a ring moves 2 (M-1)/M of a message."""
    model, n = odd_model(), count(odd_model())
    optimizer = adamw(model.parameters())
    assert tw.cost(tw.ddp(), model, 2, optimizer).bytes(24) == 24 * 4 * n
    assert tw.cost(tw.local_sgd(4), model, 2, optimizer).bytes(27) == 6 * 4 * n
    assert tw.cost(tw.local_adam(4), model, 2, optimizer).bytes(24) == 3 * 6 * 4 * n
    assert tw.cost(tw.desloc(4), model, 2, optimizer).bytes(24) == (6 + 2 + 1) * 4 * n
    assert tw.cost(tw.diloco(4, codec=tw.BFloat16()), model, 2).bytes(24) == 6 * 2 * n
    assert tw.cost(tw.streaming_diloco(8, [["*"]], codec=None), model, 2).bytes(7) == 0


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_what_crosses_the_wire(workers: int) -> None:
    """To 2%: headers are small beside a large message."""
    model = nn.Linear(512, 512)
    n = count(model)
    part = (workers - 1) / workers
    expected = {
        tw.local_sgd(1): 2 * part * 4 * n,
        tw.diloco(1, codec=tw.TopK(64, 4096)): (workers - 1) * n / 64 * (4 + 1.5),
        tw.diloco(1, codec=tw.Int8()): n * 1.03 * (2 * part if workers > 2 else 1),
        tw.diloco(1, codec=tw.E3M0()): n * ((0.5078 + 1.03) * part if workers > 2 else 0.5078),
    }
    for method, want in expected.items():
        sent, received = tw.cost(method, model, workers).wire(1)
        assert sent == pytest.approx(want, rel=0.02) and received == pytest.approx(want, rel=0.02), method.rows[0].codec


def test_what_is_handed_out_from_one_worker_crosses_the_wire_too() -> None:
    """ "mean" is evaluated as worker 0 has it: three of four workers receive it, and as much is sent."""
    fleet = train(fleet_of(tw.decoupled_momentum(2, variant="mean"), 4, sgd), 4)
    moved = 3 * sum(p.numel() for p in fleet.replicas[0].trainable.values())  # of 4 bytes, a mean of 4 workers
    before = fleet.wire_sent, fleet.wire_received
    fleet.consensus()
    assert (fleet.wire_sent - before[0], fleet.wire_received - before[1]) == (moved, moved)


def test_published_sizes() -> None:
    """A payload of 12-bit indices and bf16 values, 32 of 64 x 64, and SparseLoCo's default: both 140x under fp32."""
    model = nn.Linear(1024, 1024, bias=False)
    dense = tw.cost(tw.diloco(1), model, 2).bytes(1)
    for method in (tw.decoupled_momentum(1), tw.sparseloco(1)):
        assert dense >= 140 * tw.cost(method, model, 2).bytes(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(7, 11, bias=False)
        self.middle = nn.Linear(11, 11)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.table(x))) @ self.head.weight)


@pytest.mark.parametrize("name", ["ddp", "desloc", "diloco", "eager", "carry", "decoupled mean", "sparseloco"])
def test_tied_weights_are_one_tensor(name: str) -> None:
    entry = ENTRIES[name]
    torch.manual_seed(0)
    model = Tied()
    fleet = fleet_of(entry.method, 2, entry.optimizer, model)
    train(fleet, 6)
    assert fleet.bytes_sent == tw.cost(entry.method, model, 2, entry.optimizer(model.parameters())).bytes(6)
    for replica in fleet.replicas:
        assert replica.model.head.weight is replica.model.table.weight
    assert tw.cost(tw.ddp(), model, 2).bytes(1) == 4 * count(model)


# numbers


def still(entry: Entry) -> Any:
    """The optimizer of an entry at learning rate 0."""

    def make(parameters: Any) -> Any:
        optimizer = entry.optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer

    return make


@every_method
def test_bf16_without_training_does_not_drift(entry: Entry) -> None:
    """Learning rate 0: three workers' parameters keep their bits, round after round."""
    model = odd_model().bfloat16()
    fleet = fleet_of(entry.method, 3, still(entry), model)
    train(fleet, 10)
    for values in weights_of(fleet):
        assert same(values, list(model.parameters()))


@every_method
def test_bf16_parameters_train(entry: Entry) -> None:
    model = odd_model().bfloat16()
    fleet = fleet_of(entry.method, 2, entry.optimizer, model)
    train(fleet, 7)
    assert fleet.bytes_sent == tw.cost(entry.method, model, 2, entry.optimizer(model.parameters())).bytes(7)
    assert all(p.dtype is torch.bfloat16 and bool(p.isfinite().all()) for p in weights_of(fleet)[0])
    if entry.equal:
        train(fleet, -7 % entry.equal)
        assert all_equal(fleet)
    fleet.finish()
    assert all_equal(fleet)


# tensors that some lack


@pytest.mark.parametrize(
    "lacking",
    [
        pytest.param(["head.bias"], id="one"),
        pytest.param(
            [name for name, _ in odd_model().named_parameters()],
            id="all",
        ),
    ],
)
def test_a_missing_gradient_is_not_a_zero(lacking: list[str]) -> None:
    """The mean is over those that have one: worker 0's gradient counts in full."""
    fleet, alone = fleet_of(tw.ddp(), 2, sgd), fleet_of(tw.ddp(), 1, sgd)
    for replica in [*fleet.replicas, *alone.replicas]:
        backward(replica.model, 0, 0)
    for name, p in fleet.replicas[1].model.named_parameters():
        if name in lacking:
            p.grad = None
    fleet.step()
    alone.step()
    close(weights_of(fleet)[0], weights_of(alone)[0])
    assert all_equal(fleet)


def without_head_on_worker_1(fleet: tw.Fleet, steps: int) -> None:
    """Worker 1 never has a gradient, and so no state, for head.bias."""
    for _ in range(steps):
        for worker, replica in enumerate(fleet.replicas):
            backward(replica.model, fleet.steps, worker)
        fleet.replicas[1].model.head.bias.grad = None
        fleet.step()
        fleet.zero_grad()


@pytest.mark.parametrize("delay", [0, 1])
def test_a_missing_state_is_not_a_zero(delay: int) -> None:
    fleet, alone = fleet_of(tw.local_adam(3, delay=delay), 2), fleet_of(tw.local_adam(100), 2)
    without_head_on_worker_1(fleet, 3 + delay)
    without_head_on_worker_1(alone, 3 + delay)
    states = [f.replicas[0].optimizers[0].state[f.replicas[0].model.head.bias]["exp_avg"] for f in (fleet, alone)]
    close(states[:1], states[1:])


@pytest.mark.parametrize(
    "name",
    [
        "desloc top-k",
        "desloc dct",
        "desloc overlapped int8",
        "desloc delay",
        "local_adam",
    ],
)
def test_anchors_stay_shared_where_a_state_is_missing(name: str) -> None:
    fleet = fleet_of(ENTRIES[name].method, 2)
    without_head_on_worker_1(fleet, 20)
    assert fleet.events.counts == {}
    train(fleet, 10)  # now worker 1 has it too
    assert fleet.events.counts == {} and all(bool(v.isfinite().all()) for v in snapshot(fleet))


# optimizers


def grouped(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = list(parameters)
    groups = [{"params": [first], "betas": (0.5, 0.6), "lr": 0.02}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    every = list(parameters)
    matrices = [p for p in every if p.ndim == 2 and p.numel()]
    others = [p for p in every if not (p.ndim == 2 and p.numel())]
    return [tw.Muon(matrices, lr=0.02), adamw(others)]


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(grouped, ["exp_avg", "exp_avg_sq"]), (momentum, ["momentum_buffer"]), (adopt, ["exp_avg_sq"])],
)
def test_a_delayed_moment_is_what_averaging_at_launch_gives(optimizer: Any, states: list[str]) -> None:
    """With gradients that do not depend on the parameters; the decay is that of each parameter's group."""
    rows = [[tw.Sync(tw.moment(s), tw.Every(4, delay=d), tw.Overwrite()) for s in states] for d in (0, 3)]
    fleets = [fleet_of(tw.Method("moments", tuple(row)), 3, optimizer) for row in rows]
    for step in range(15):
        for fleet in fleets:
            for worker, replica in enumerate(fleet.replicas):
                generator = torch.Generator().manual_seed(100 * step + worker)
                for p in replica.model.parameters():
                    p.grad = torch.randn(p.shape, generator=generator)
            fleet.step()
        if step + 1 >= 7 and (step + 1) % 4 == 3:
            found = [[s[k] for r in f.replicas for s in r.optimizers[0].state.values() for k in states] for f in fleets]
            close(*found)


@pytest.mark.parametrize("name", ["ddp", "desloc", "local_adam delay", "diloco", "eager", "carry", "desloc nesterov"])
@pytest.mark.parametrize("optimizer", [grouped, muon_and_adamw])
def test_groups_and_lists_of_optimizers(name: str, optimizer: Any) -> None:
    method = ENTRIES[name].method
    fleet, model = fleet_of(method, 2, optimizer), odd_model()
    train(fleet, 12)
    assert fleet.bytes_sent == tw.cost(method, model, 2, optimizer(model.parameters())).bytes(12)
    if name in ("desloc", "desloc nesterov"):  # all moments have met: desloc(2) at 12, desloc(3) at 9
        assert all_equal(fleet)
    if name == "desloc":
        states = [
            [v for o in r.optimizers for s in o.state.values() for k, v in s.items() if k != "step"]
            for r in fleet.replicas
        ]
        assert same(*states) and len(states[0]) >= 5


def test_desloc_of_muon_averages_its_buffer_and_adams_two() -> None:
    model, n = odd_model(), count(odd_model())
    matrices = 19 * 7 + 3 * 19
    price = tw.cost(tw.desloc(1), model, 2, muon_and_adamw(model.parameters()))
    assert price.bytes(6) == 4 * (6 * n + 2 * n + (n - matrices))


class Codes(torch.optim.SGD):
    """As 8-bit optimizers: a moment of integers."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = torch.zeros(p.shape, dtype=torch.uint8)
        return out


class Sign(torch.optim.Optimizer):
    """As published optimizers are: with attributes of its own, which its step reads."""

    def __init__(self, parameters: Any, lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (decay, decay)})
        self.update = torch.sign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(self.update(mean.lerp_(p.grad, 1 - group["betas"][0])), alpha=group["lr"])


def test_optimizers_with_attributes_of_their_own() -> None:
    fleet = train(fleet_of(tw.local_adam(2), 2, lambda p: Sign(p, 0.01, 0.9)), 4)
    (first, second) = ([state["exp_avg"] for state in r.optimizers[0].state.values()] for r in fleet.replicas)
    assert len(first) == 6 and same(first, second)


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    assert fleet_of(tw.diloco(2), 2, torch.optim.LBFGS).rows
    with pytest.raises(ValueError, match="LBFGS.*local_sgd"):
        fleet_of(tw.desloc(2), 2, torch.optim.LBFGS)


def test_integer_moments_are_refused_by_name() -> None:
    fleet = fleet_of(tw.local_adam(2), 2, lambda p: Codes(p, lr=0.1))
    with pytest.raises(ValueError, match="exp_avg.*(local_sgd|diloco)"):
        train(fleet, 4)
    train(fleet_of(tw.diloco(2), 2, lambda p: Codes(p, lr=0.1)), 4)


# BatchNorm


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("name", ["ddp", "local_sgd", "desloc", "diloco", "eager", "carry", "demo", "sparseloco"])
def test_batch_norm_statistics_meet(name: str) -> None:
    entry = ENTRIES[name]
    torch.manual_seed(0)
    model = Normed()
    fleet = fleet_of(entry.method, 2, entry.optimizer, model)
    every = entry.method.rows[-1].every.period
    train(fleet, every - 1)
    fleet.replicas[1].model(torch.randn(4, 7))  # one more batch than the other
    before = [{n: b.clone() for n, b in r.model.named_buffers()} for r in fleet.replicas]
    for worker, replica in enumerate(fleet.replicas):
        backward(replica.model, fleet.steps, worker)
    live = [{n: b.clone() for n, b in r.model.named_buffers()} for r in fleet.replicas]
    fleet.step()
    for replica in fleet.replicas:
        for key, buffer in replica.model.named_buffers():
            one, other = live[0][key], live[1][key]
            if buffer.is_floating_point():
                torch.testing.assert_close(buffer, (one + other) / 2)
                assert not torch.equal(one, other) and not torch.equal(buffer, before[0][key])
            else:
                assert buffer == max(one, other) == every + 1
    train(fleet, 3)
    price = tw.cost(entry.method, model, 2, entry.optimizer(model.parameters()))
    assert fleet.bytes_sent == price.bytes(fleet.steps)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    assert price.rows[-1].bytes > 0 and tw.cost(entry.method, plain, 2).bytes(9) < price.bytes(9)
    fleet.finish()
    states = [list(r.model.state_dict().values()) for r in fleet.replicas]
    assert same(*states)


def test_the_model_that_is_exported_has_seen_the_most_batches() -> None:
    torch.manual_seed(0)
    fleet = fleet_of(tw.local_sgd(4), 3, sgd, Normed())
    train(fleet, 6)
    for extra, replica in enumerate(fleet.replicas):
        for _ in range(extra):
            replica.model(torch.randn(4, 7))
    means = torch.stack([r.model.norm.running_mean for r in fleet.replicas]).mean(0)
    agreed = fleet.consensus()
    assert agreed["norm.num_batches_tracked"] == 8
    torch.testing.assert_close(agreed["norm.running_mean"], means)
    fleet.finish()
    assert all(replica.model.norm.num_batches_tracked == 8 for replica in fleet.replicas)


# starting equal


@every_method
def test_two_seeds_start_equal(entry: Entry) -> None:
    """Worker 0's values, anchors included: at learning rate 0 they stay, round after round."""
    given = replicas(2, still(entry))
    with torch.no_grad():
        given[1].model.inner.weight.add_(1.0)
        given[1].model.gain.mul_(2.0)
    fleet = tw.Fleet(given, entry.method, tw.Local())
    train(fleet, 7)
    for values in weights_of(fleet):
        assert same(values, list(odd_model().parameters()))
    assert fleet.events.counts == {"start": 1}


def test_a_frozen_tensor_that_differs_is_named() -> None:
    models = [odd_model(), odd_model()]
    for model in models:
        model.unused.requires_grad_(False)
    with torch.no_grad():
        models[1].unused[1] = 7.0
    fleet = tw.Fleet([tw.Replica(m, sgd([m.gain])) for m in models], tw.diloco(2), tw.Local())
    with pytest.raises(ValueError, match="unused"):
        train(fleet, 1)


@pytest.mark.parametrize("what", ["shape", "dtype", "name"])
def test_replicas_that_are_not_alike_are_told(what: str) -> None:
    one: nn.Module = nn.Sequential(nn.Linear(7, 3))
    other: nn.Module = {
        "shape": nn.Sequential(nn.Linear(7, 3, bias=False)),
        "dtype": nn.Sequential(nn.Linear(7, 3)).bfloat16(),
        "name": nn.Sequential(nn.Identity(), nn.Linear(7, 3)),
    }[what]
    both = {"shape": "0.bias", "dtype": "float32(.|\n)*bfloat16|bfloat16(.|\n)*float32", "name": "0.(.|\n)*1."}[what]
    with pytest.raises(ValueError, match=both):
        fleet = tw.Fleet([tw.Replica(m, sgd(m.parameters())) for m in (one, other)], tw.diloco(2), tw.Local())
        train(fleet, 1)


def test_another_order_of_the_same_tensors_is_told() -> None:
    models = [nn.ModuleDict({name: nn.Linear(7, 3) for name in names}) for names in ("ab", "ba")]
    fleet = tw.Fleet([tw.Replica(m, sgd(m.parameters())) for m in models], tw.diloco(2), tw.Local())
    with pytest.raises(ValueError, match="order.*a.weight.*b.weight"):
        fleet.begin()


# loops


def loop(model: nn.Module, optimizer: Any, steps: int, closure: bool = False) -> None:
    for step in range(steps):
        if closure:

            def again(step: int = step) -> Tensor:
                optimizer.zero_grad()
                return backward(model, step, 0)

            assert optimizer.step(again) is not None
        else:
            backward(model, step, 0)
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["ddp", "desloc", "diloco", "streaming", "eager", "carry", "demo", "decoupled mean"])
@pytest.mark.parametrize("closure", [False, True])
def test_attached_is_driven_by_hand(name: str, closure: bool) -> None:
    entry = ENTRIES[name]
    model = odd_model()
    optimizer = entry.optimizer(model.parameters())
    attached = tw.attach(model, optimizer, entry.method, tw.Local(), clip=0.5)
    loop(model, optimizer, 10, closure)
    by_hand = fleet_of(entry.method, 1, entry.optimizer, clip=0.5)
    train(by_hand, 10)
    assert attached.steps == 10 and attached.bytes_sent == by_hand.bytes_sent
    assert same(snapshot(attached), snapshot(by_hand))


def test_detached_steps_alone() -> None:
    model, other = odd_model(), odd_model()
    optimizer, alone = adamw(model.parameters()), adamw(other.parameters())
    fleet = tw.attach(model, optimizer, tw.diloco(3), tw.Local())
    loop(model, optimizer, 4)
    sent = fleet.bytes_sent
    fleet.detach()
    other.load_state_dict(model.state_dict())
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loop(model, optimizer, 6)
    loop(other, alone, 6)
    assert fleet.steps == 4 and fleet.bytes_sent == sent > 0
    assert same(list(model.parameters()), list(other.parameters()))


def test_a_skipped_step_does_not_count() -> None:
    """As a GradScaler does it: the optimizer is not called, and the period counts the steps really taken."""
    model = odd_model()
    optimizer = sgd(model.parameters())
    fleet = tw.attach(model, optimizer, tw.diloco(3), tw.Local())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(6):
        loss = model(torch.ones(4, 7)).square().mean() * (float("inf") if step in (1, 4) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert fleet.steps == 4
    assert fleet.bytes_sent == tw.cost(tw.diloco(3), model, 1).bytes(4)


@pytest.mark.parametrize(
    ("order", "skipped"), [((0, 1), 0), ((0, 1), 1), ((1, 0), None)], ids=["first skipped", "last skipped", "turned"]
)
def test_a_list_of_which_one_is_skipped(order: tuple[int, int], skipped: int | None) -> None:
    """A GradScaler looks at each optimizer's gradients alone; in the next step all meet, and are clipped, again."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(2)])
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model]
    fleet = tw.attach(model, optimizers, tw.ddp(), tw.Local(), clip=1e-3)
    for step in range(4):
        torch.stack([p.sum() for p in model]).sum().backward()
        for optimizer in [optimizers[i] for i in order if step != 1 or i != skipped]:
            optimizer.step()
            optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert fleet.steps == 4 and fleet.bytes_sent == 4 * 24
    assert all(float(p.detach().abs().max()) < 4e-3 for p in model)


def test_a_list_of_optimizers_is_one_step() -> None:
    model = odd_model()
    optimizers = muon_and_adamw(model.parameters())
    fleet = tw.attach(model, optimizers, tw.desloc(2), tw.Local())
    for step in range(6):
        backward(model, step, 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    by_hand = fleet_of(tw.desloc(2), 1, muon_and_adamw)
    train(by_hand, 6)
    assert fleet.steps == 6 and fleet.bytes_sent == by_hand.bytes_sent
    assert same(weights_of(fleet)[0], weights_of(by_hand)[0])


def test_gradients_are_clipped_after_they_met() -> None:
    fleet = fleet_of(tw.ddp(), 2, sgd, clip=0.1)
    model = odd_model()
    ones = [copy.deepcopy(model) for _ in range(2)]
    for worker, one in enumerate(ones):
        backward(one, 0, worker)
    for p, a, b in zip(model.parameters(), *(one.parameters() for one in ones), strict=True):
        p.grad = None if a.grad is None else (a.grad + b.grad) / 2
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    train(fleet, 1)
    close(weights_of(fleet)[0], [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("methods", [(tw.desloc(3), tw.diloco(3)), (tw.diloco(3), tw.eager_diloco(3))])
def test_switching_is_starting_anew_from_the_consensus(methods: tuple[tw.Method, tw.Method]) -> None:
    """The optimizers go on as they are."""
    fleet = train(fleet_of(methods[0], 2), 12)
    fresh = replicas(2, adamw)
    for new, old in zip(fresh, fleet.replicas, strict=True):
        new.model.load_state_dict(fleet.consensus(), strict=False)
        new.optimizers[0].load_state_dict(copy.deepcopy(old.optimizers[0].state_dict()))
    anew = tw.Fleet(fresh, methods[1], tw.Local())
    fleet.switch(methods[1])
    train(fleet, 9)
    train(anew, 9, begin=12)
    assert fleet.steps == 21
    assert same(snapshot(fleet), snapshot(anew))


def test_doubling_is_what_it_says() -> None:
    assert [row.every for row in doubled(tw.local_sgd(3, delay=2)).rows] == [tw.Every(6, 0, 2), tw.Every(6, 0, 0)]
