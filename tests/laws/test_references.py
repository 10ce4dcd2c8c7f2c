"""Each method against its equations in NumPy, parameter by parameter, after every step, at 1, 2 and 4 workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire as tw

from . import problem
from . import reference as ref

Inner = tuple[Callable[[Any], torch.optim.Optimizer], Callable[[], Any]]

SGD: Inner = (lambda p: torch.optim.SGD(p, lr=0.05), lambda: ref.SGD(0.05))
DECAYED: Inner = (lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1), lambda: ref.SGD(0.01, weight_decay=0.1))
MOMENTUM: Inner = (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), lambda: ref.SGD(0.02, 0.9))
ADAMW: Inner = (
    lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
    lambda: ref.AdamW(0.02, (0.8, 0.9), 0.1),
)
ADOPT: Inner = (lambda p: tw.ADOPT(p, lr=0.02, betas=(0.8, 0.95)), lambda: ref.ADOPT(0.02, (0.8, 0.95)))

# the DCT of a block whose sides are powers of two has no structural zeros, which sign() would make arbitrary
EVEN: dict[str, tuple[int, ...]] = {"emb": (10, 4), "w": (4, 19), "b": (2,), "conv": (4, 2, 1, 2), "gain": ()}


def moments(kx: int, ku: int, kv: int, delay: int = 0) -> ref.All:
    return ref.All(ref.Params(kx, delay=delay), ref.Moment("exp_avg", ku, delay), ref.Moment("exp_avg_sq", kv, delay))


def streaming(codec: Any, every: int = 9, delay: int = 2, mix: float = 0.4) -> ref.All:
    return ref.All(
        *(
            ref.Outer(ref.Nesterov(0.4, 0.9), mix, codec, every=every, offset=p * every // 3, delay=delay, names=names)
            for p, names in enumerate(ref.FRAGMENTS)
        )
    )


def phased(eager: bool, codec: Any = None, phases: int = 1) -> ref.All:
    return ref.All(
        *(
            ref.Phased(eager, 0.2, 0.8, codec, phases, every=6, offset=p * 2, names=names)
            for p, names in enumerate(ref.FRAGMENTS)
        )
    )


def dct(merge: str = "senders", values: Any = None) -> ref.DCT:
    return ref.DCT(4, 4, values or (lambda v: v), merge)


E3M0, INT8, TWO_BIT = ref.Dense(ref.e3m0_block), ref.Dense(ref.int8_block), ref.Dense(ref.two_bit)
EXACT = tw.Float32()
LOSSLESS, COARSE = 1e-5, 2e-5

# name: (ours, the reference, inner optimizer, tolerance)
CASES: dict[str, tuple[Callable[[], tw.Method], Callable[[], Any], Inner, float]] = {
    "ddp sgd": (tw.ddp, ref.DDP, SGD, LOSSLESS),
    "ddp adamw": (tw.ddp, ref.DDP, ADAMW, LOSSLESS),
    "local_sgd": (lambda: tw.local_sgd(5), lambda: ref.Params(5), SGD, LOSSLESS),
    "local_sgd momentum": (lambda: tw.local_sgd(5), lambda: ref.Params(5), MOMENTUM, LOSSLESS),
    "local_sgd delay": (lambda: tw.local_sgd(5, delay=3), lambda: ref.Params(5, delay=3), ADAMW, LOSSLESS),
    "local_sgd delay of a period": (lambda: tw.local_sgd(4, delay=4), lambda: ref.Params(4, delay=4), SGD, LOSSLESS),
    "local_adam": (lambda: tw.local_adam(4), lambda: moments(4, 4, 4), ADAMW, LOSSLESS),
    "local_adam delay": (lambda: tw.local_adam(5, delay=2), lambda: moments(5, 5, 5, 2), ADAMW, LOSSLESS),
    "local_adam momentum": (
        lambda: tw.local_adam(4, delay=1),
        lambda: ref.All(ref.Params(4, delay=1), ref.Moment("momentum_buffer", 4, 1)),
        MOMENTUM,
        LOSSLESS,
    ),
    "desloc": (lambda: tw.desloc(3), lambda: moments(3, 9, 18), ADAMW, LOSSLESS),
    "desloc momentum": (
        lambda: tw.desloc(3),
        lambda: ref.All(ref.Params(3), ref.Moment("momentum_buffer", 9)),
        MOMENTUM,
        LOSSLESS,
    ),
    "desloc periods": (
        lambda: tw.desloc(4, moments={"exp_avg": 5, "exp_avg_sq": 7}),
        lambda: moments(4, 5, 7),
        ADAMW,
        LOSSLESS,
    ),
    # ln .5 / ln .8 = 3.1, ln .5 / ln .9 = 6.6
    "desloc half-life": (lambda: tw.desloc(2, moments="half-life"), lambda: moments(2, 3, 7), ADAMW, LOSSLESS),
    "desloc adopt": (lambda: tw.desloc(3), lambda: moments(3, 9, 18), ADOPT, LOSSLESS),
    "desloc delay": (
        lambda: tw.desloc(4, moments={"exp_avg": 6, "exp_avg_sq": 8}, delay=3),
        lambda: moments(4, 6, 8, 3),
        ADAMW,
        LOSSLESS,
    ),
    "desloc nesterov": (
        lambda: tw.desloc(4, outer=tw.Nesterov(1.0, 0.9)),
        lambda: ref.All(
            ref.Outer(ref.Nesterov(1.0, 0.9), every=4), ref.Moment("exp_avg", 12), ref.Moment("exp_avg_sq", 24)
        ),
        ADAMW,
        LOSSLESS,
    ),
    "diloco": (lambda: tw.diloco(5), lambda: ref.Outer(ref.Nesterov(0.7, 0.9), every=5), ADAMW, LOSSLESS),
    "diloco int8": (
        lambda: tw.diloco(5, codec=tw.Int8()),
        lambda: ref.Outer(ref.Nesterov(0.7, 0.9), 0.0, INT8, every=5),
        MOMENTUM,
        COARSE,
    ),
    "streaming": (
        lambda: tw.streaming_diloco(9, ref.FRAGMENTS, delay=2, mix=0.4, codec=None),
        lambda: streaming(None),
        ADAMW,
        LOSSLESS,
    ),
    "streaming e3m0": (
        lambda: tw.streaming_diloco(9, ref.FRAGMENTS, delay=2, mix=0.4),
        lambda: streaming(E3M0),
        ADAMW,
        COARSE,
    ),
    "streaming int8": (
        lambda: tw.streaming_diloco(6, ref.FRAGMENTS, delay=0, mix=0.0, codec=tw.Int8()),
        lambda: streaming(INT8, 6, 0, 0.0),
        SGD,
        COARSE,
    ),
    "streaming, three in flight": (
        lambda: tw.streaming_diloco(3, ref.FRAGMENTS, delay=8, mix=0.9, outer_lr=0.1, codec=None),
        lambda: ref.All(
            *(
                ref.Outer(ref.Nesterov(0.1, 0.9), 0.9, every=3, offset=p, delay=8, names=names)
                for p, names in enumerate(ref.FRAGMENTS)
            )
        ),
        SGD,
        LOSSLESS,
    ),
    "delayed": (
        lambda: tw.delayed_diloco(4, outer_lr=0.2),
        lambda: ref.Phased(False, 0.2, 0.9, every=4),
        ADAMW,
        LOSSLESS,
    ),
    "delayed fragments": (
        lambda: tw.delayed_diloco(6, ref.FRAGMENTS, outer_lr=0.2, outer_momentum=0.8),
        lambda: phased(False),
        SGD,
        LOSSLESS,
    ),
    "delayed e3m0": (
        lambda: tw.delayed_diloco(4, outer_lr=0.2, codec=tw.E3M0()),
        lambda: ref.Phased(False, 0.2, 0.9, E3M0, every=4),
        ADAMW,
        COARSE,
    ),
    "eager": (lambda: tw.eager_diloco(4), lambda: ref.Phased(True, 0.4, 0.9, every=4), ADAMW, LOSSLESS),
    "eager fragments": (
        lambda: tw.eager_diloco(6, ref.FRAGMENTS, outer_lr=0.2, outer_momentum=0.8),
        lambda: phased(True),
        ADAMW,
        LOSSLESS,
    ),
    "eager two phases": (
        lambda: tw.eager_diloco(3, outer_lr=0.2, outer_momentum=0.8, phases=2),
        lambda: ref.Phased(True, 0.2, 0.8, phases=2, every=3),
        ADAMW,
        LOSSLESS,
    ),
    "eager two phases, fragments": (
        lambda: tw.eager_diloco(6, ref.FRAGMENTS, outer_lr=0.2, outer_momentum=0.8, phases=2),
        lambda: phased(True, phases=2),
        SGD,
        LOSSLESS,
    ),
    "eager e3m0": (
        lambda: tw.eager_diloco(4, codec=tw.E3M0()),
        lambda: ref.Phased(True, 0.4, 0.9, E3M0, every=4),
        ADAMW,
        COARSE,
    ),
    "eager e3m0, two phases": (
        lambda: tw.eager_diloco(4, outer_lr=0.2, codec=tw.E3M0(), phases=2),
        lambda: ref.Phased(True, 0.2, 0.9, E3M0, 2, every=4),
        ADAMW,
        COARSE,
    ),
    "carry": (lambda: tw.carry_diloco(4), lambda: ref.Carry(ref.Nesterov(0.7, 0.6), every=4, delay=4), ADAMW, LOSSLESS),
    "carry, shorter delay": (
        lambda: tw.carry_diloco(5, delay=2, outer_momentum=0.9),
        lambda: ref.Carry(ref.Nesterov(0.7, 0.9), every=5, delay=2),
        ADAMW,
        LOSSLESS,
    ),
    "carry, no delay": (
        lambda: tw.carry_diloco(5, delay=0),
        lambda: ref.Outer(ref.Nesterov(0.7, 0.6), every=5),
        ADAMW,
        LOSSLESS,
    ),
    "carry e3m0": (
        lambda: tw.carry_diloco(4, codec=tw.E3M0()),
        lambda: ref.Carry(ref.Nesterov(0.7, 0.6), E3M0, every=4, delay=4),
        ADAMW,
        COARSE,
    ),
    "relay": (
        lambda: tw.relay_diloco(9, ref.FRAGMENTS),
        lambda: ref.All(
            *(
                ref.Carry(ref.Nesterov(0.7, 0.6), every=9, offset=p * 9 // n, delay=-(-9 // n), names=names)
                for n in [len(ref.FRAGMENTS)]
                for p, names in enumerate(ref.FRAGMENTS)
            )
        ),
        ADAMW,
        LOSSLESS,
    ),
    "decoupled paper": (
        lambda: tw.decoupled_momentum(4, 4, 4, 0.5, 0.3, "paper", EXACT),
        lambda: ref.SharedMomentum(dct(), 0.5, 0.3, every=4),
        ADAMW,
        COARSE,
    ),
    "decoupled mean": (
        lambda: tw.decoupled_momentum(4, 4, 4, 0.9, 0.3, "mean", EXACT),
        lambda: ref.SharedMomentum(dct("mean"), 0.9, 0.3, every=4),
        ADAMW,
        COARSE,
    ),
    "decoupled consensus": (
        lambda: tw.decoupled_momentum(4, 4, 4, 0.9, 0.7, "consensus", EXACT),
        lambda: ref.Outer(ref.Nesterov(0.7, 0.0), 0.0, dct(), 0.9, every=4),
        ADAMW,
        COARSE,
    ),
    "decoupled consensus bf16": (
        lambda: tw.decoupled_momentum(4, 4, 4, 0.9, 0.7, "consensus"),
        lambda: ref.Outer(ref.Nesterov(0.7, 0.0), 0.0, dct(values=ref.bfloat16), 0.9, every=4),
        SGD,
        COARSE,
    ),
    "decoupled mean bf16": (
        lambda: tw.decoupled_momentum(4, 4, 4, 0.9, 0.3, "mean"),
        lambda: ref.SharedMomentum(dct("mean", ref.bfloat16), 0.9, 0.3, every=4),
        SGD,
        COARSE,
    ),
    "sparseloco": (
        lambda: tw.sparseloco(4, chunk=16, topk=4),
        lambda: ref.Outer(ref.Nesterov(1.0, 0.0), 0.0, ref.TopK(4, 16, ref.two_bit), 0.95, every=4),
        ADAMW,
        COARSE,
    ),
    "sparseloco, chunks longer than the tensors": (
        lambda: tw.sparseloco(4, chunk=4096, topk=300, decay=0.9, outer_lr=0.8),
        lambda: ref.Outer(ref.Nesterov(0.8, 0.0), 0.0, ref.TopK(300, 4096, ref.two_bit), 0.9, every=4),
        SGD,
        COARSE,
    ),
    "sparse averaging": (
        lambda: tw.sparse_averaging(4, chunk=8, outer_lr=0.9),
        lambda: ref.Outer(ref.Nesterov(0.9, 0.0), 0.0, ref.TopK(1, 8, ref.two_bit), 0.9, every=4),
        ADAMW,
        COARSE,
    ),
    "two-bit averaging": (
        lambda: tw.two_bit_averaging(4),
        lambda: ref.Outer(ref.Nesterov(1.5, 0.0), 0.0, TWO_BIT, 1.0, every=4),
        ADAMW,
        COARSE,
    ),
    "top-k on the parameters of desloc": (
        lambda: tw.Method("sparse", (tw.Sync(tw.params, tw.Every(3), tw.Average(), tw.TopK(5, 16)),)),
        lambda: ref.AnchoredParams(3, ref.TopK(5, 16)),
        ADAMW,
        COARSE,
    ),
    "e3m0 on delayed parameters of desloc": (
        lambda: tw.Method("coarse", (tw.Sync(tw.params, tw.Every(4, delay=2), tw.Average(), tw.E3M0()),)),
        lambda: ref.AnchoredParams(4, E3M0, delay=2),
        ADAMW,
        COARSE,
    ),
    "top-k on eager": (
        lambda: tw.eager_diloco(4, outer_lr=0.2, codec=tw.DCT(tw.TopK(6), 4)),
        lambda: ref.Phased(True, 0.2, 0.9, ref.DCT(6, 4), every=4),
        ADAMW,
        COARSE,
    ),
    "top-k on streaming": (
        lambda: tw.streaming_diloco(9, ref.FRAGMENTS, delay=2, mix=0.4, codec=tw.TopK(5, 16, merge="mean")),
        lambda: streaming(ref.TopK(5, 16, merge="mean")),
        ADAMW,
        COARSE,
    ),
}


def compare(fleet: tw.Fleet, world: ref.World, method: Any, tolerance: float, steps: int = 30) -> None:
    for _ in range(steps):
        problem.step(fleet)
        world.step(method)
        for m, replica in enumerate(fleet.replicas):
            gap = problem.gap(problem.values(replica.model), world.x[m])
            assert gap <= tolerance, f"step {world.t}, worker {m}: {gap:.1e}"


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equations(name: str, workers: int) -> None:
    ours, reference, (optimizer, inner), tolerance = CASES[name]
    compare(problem.fleet(ours(), workers, optimizer), ref.World(workers, inner), reference(), tolerance)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_demo(workers: int) -> None:
    fleet = problem.fleet(tw.demo(4, 4, 0.9, EXACT), workers, DECAYED[0], EVEN)
    compare(fleet, ref.World(workers, DECAYED[1], EVEN), ref.DeMo(dct(), 0.9), COARSE)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_local_and_reset_states(workers: int) -> None:
    """The two baselines of DES-LOC's paper: states stay where they are, or are zero after each sync."""

    class Reset(ref.Params):
        def land(self, world: ref.World, flight: Any) -> None:
            super().land(world, flight)
            for inner in world.inner:
                for state in inner.state.values():
                    state.clear()

    optimizer, inner = MOMENTUM
    compare(problem.fleet(tw.local_states(4), workers, optimizer), ref.World(workers, inner), ref.Params(4), LOSSLESS)
    compare(problem.fleet(tw.reset_states(4), workers, optimizer), ref.World(workers, inner), Reset(4), LOSSLESS)


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_moments_follow_the_equations(state: str) -> None:
    """The states themselves, not only the parameters they lead to."""
    fleet = problem.fleet(tw.desloc(4, moments={"exp_avg": 6, "exp_avg_sq": 8}, delay=3), 3, ADAMW[0])
    world, method = ref.World(3, ADAMW[1]), moments(4, 6, 8, 3)
    for _ in range(25):
        problem.step(fleet)
        world.step(method)
        for m, replica in enumerate(fleet.replicas):
            names = {p: name for name, p in replica.model.named_parameters()}
            live = {names[p]: s[state].double().numpy() for p, s in replica.optimizers[0].state.items()}
            assert problem.gap(live, world.inner[m].state[state]) <= LOSSLESS


def test_density() -> None:
    """A chunk with n real values keeps n k / N of them: one more row and column must not cost three more blocks."""
    codec = tw.DCT(tw.TopK(32, values=tw.Float32()), 64)
    method = tw.Method("dct", (tw.Sync(tw.params, tw.Every(1), tw.Outer(tw.SGD(1.0)), codec),))
    sizes = [tw.cost(method, torch.nn.Linear(n, n, bias=False), 2).bytes(1) for n in (64, 65)]
    assert sizes[1] < 1.5 * sizes[0]
