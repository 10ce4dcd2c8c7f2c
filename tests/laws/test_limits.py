"""Where two methods must be one: the limit laws, parameter by parameter, after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw

from . import problem
from . import reference as ref

FRAGMENTS = ref.FRAGMENTS


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.05)


def adamw(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)


def same(
    one: tw.Method, other: tw.Method, workers: int = 3, optimizer: Callable[[Any], Any] = adamw, steps: int = 24
) -> None:
    """Both methods on the same problem; what is the same to rounding stays within 1e-5."""
    left, right = problem.fleet(one, workers, optimizer), problem.fleet(other, workers, optimizer)
    for _ in range(steps):
        problem.step(left)
        problem.step(right)
        gap = problem.distance(left, right)
        assert gap < 1e-5, f"step {left.steps}: {gap:.1e}"


def one_row(codec: tw.Codec, rule: tw.Rule, every: int = 4, feedback: float | None = None, delay: int = 0) -> tw.Method:
    return tw.Method("one row", (tw.Sync(tw.params, tw.Every(every, delay=delay), rule, codec, feedback),))


ALL = tw.TopK(16, 16)
ALL_DCT = tw.DCT(tw.TopK(16), 4)


def test_the_laws_can_fail() -> None:
    with pytest.raises(AssertionError, match="step 4"):
        same(tw.diloco(4, 1.0, 0.1), tw.local_sgd(4))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_diloco_without_an_outer_step_is_local_sgd(workers: int) -> None:
    same(tw.diloco(4, 1.0, 0.0), tw.local_sgd(4), workers)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_local_sgd_of_period_one_is_ddp(workers: int) -> None:
    same(tw.local_sgd(1), tw.ddp(), workers, sgd)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_streaming_with_one_fragment_is_diloco(workers: int) -> None:
    whole = [list(ref.SHAPES)]
    same(tw.streaming_diloco(4, whole, 0, 0.0, 0.7, 0.9, None), tw.diloco(4), workers)
    same(tw.streaming_diloco(4, [["*"]], 0, 0.0, 0.7, 0.9, tw.Int8()), tw.diloco(4, codec=tw.Int8()), workers)


def test_desloc_with_equal_periods_is_local_adam() -> None:
    same(tw.desloc(4, {"exp_avg": 4, "exp_avg_sq": 4}), tw.local_adam(4))
    same(tw.desloc(4, {"exp_avg": 4, "exp_avg_sq": 4}, delay=2), tw.local_adam(4, delay=2))


def test_desloc_with_no_moments_is_local_sgd() -> None:
    same(tw.desloc(4, {}), tw.local_sgd(4))
    same(tw.local_states(4), tw.local_sgd(4))


def test_desloc_with_a_plain_outer_step_is_desloc() -> None:
    same(tw.desloc(4, outer=tw.Nesterov(1.0, 0.0)), tw.desloc(4))


@pytest.mark.parametrize("phases", [1, 2, 3])
@pytest.mark.parametrize("fragments", [None, FRAGMENTS])
def test_eager_with_one_worker_is_diloco(phases: int, fragments: Any) -> None:
    diloco = tw.streaming_diloco(6, fragments or [["*"]], 0, 0.0, 0.4, 0.9, None)
    same(tw.eager_diloco(6, fragments, phases=phases), diloco, workers=1, steps=40)


def test_carry_without_a_delay_is_diloco() -> None:
    same(tw.carry_diloco(4, delay=0), tw.diloco(4, 0.7, 0.6))


def test_relay_of_one_fragment_is_carry() -> None:
    same(tw.relay_diloco(6, [["*"]]), tw.carry_diloco(6))


def test_relay_with_one_worker_and_no_outer_step_is_plain_training() -> None:
    same(tw.relay_diloco(6, FRAGMENTS, 1.0, 0.0), tw.local_sgd(100), workers=1)


def test_relay_is_the_table_that_was_measured() -> None:
    rows = tw.relay_diloco(32, [[f"{i}.*"] for i in range(7)]).rows
    assert [row.every for row in rows[:7]] == [tw.Every(32, offset, 5) for offset in (0, 4, 9, 13, 18, 22, 27)]
    assert {row.rule for row in rows[:7]} == {tw.Carry(tw.Nesterov(0.7, 0.6))}


@pytest.mark.parametrize("variant", ["paper", "mean"])
def test_decoupled_momentum_with_one_worker_is_diloco(variant: Any) -> None:
    same(tw.decoupled_momentum(4, 4, 3, 0.8, 0.5, variant), tw.diloco(4, 0.5, 0.8), workers=1)


@pytest.mark.parametrize("variant", ["paper", "mean"])
def test_decoupled_momentum_with_identical_workers_is_diloco(variant: Any) -> None:
    left = problem.fleet(tw.decoupled_momentum(4, 4, 3, 0.8, 0.5, variant, tw.Float32()), 3, adamw)
    right = problem.fleet(tw.diloco(4, 0.5, 0.8), 3, adamw)
    for _ in range(24):
        for fleet in (left, right):
            for replica in fleet.replicas:
                problem.backward(replica.model, fleet.steps + 1, worker=0)
            fleet.step()
        assert problem.distance(left, right) < 1e-5


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_consensus_with_everything_is_diloco_without_momentum(workers: int) -> None:
    ours = tw.decoupled_momentum(4, 4, 16, 0.9, 0.7, "consensus", tw.Float32())
    same(ours, tw.diloco(4, 0.7, 0.0), workers)


DENSE: dict[str, tuple[tw.Method, tw.Method]] = {
    "diloco": (tw.diloco(4, codec=ALL), tw.diloco(4)),
    "diloco dct": (tw.diloco(4, codec=ALL_DCT), tw.diloco(4)),
    "diloco mean": (tw.diloco(4, codec=tw.TopK(16, 16, merge="mean")), tw.diloco(4)),
    "diloco with feedback": (one_row(ALL, tw.Outer(tw.Nesterov(0.7, 0.9)), feedback=0.9), tw.diloco(4)),
    "local_sgd": (one_row(ALL, tw.Average()), tw.local_sgd(4)),
    "local_sgd dct": (one_row(ALL_DCT, tw.Average()), tw.local_sgd(4)),
    "local_sgd delay": (one_row(ALL, tw.Average(), delay=3), tw.local_sgd(4, delay=3)),
    "streaming": (
        tw.streaming_diloco(6, FRAGMENTS, 2, 0.4, codec=ALL_DCT),
        tw.streaming_diloco(6, FRAGMENTS, 2, 0.4, codec=None),
    ),
    "delayed": (tw.delayed_diloco(4, codec=ALL, outer_lr=0.2), tw.delayed_diloco(4, outer_lr=0.2)),
    "eager": (tw.eager_diloco(4, codec=ALL), tw.eager_diloco(4)),
    "eager fragments": (
        tw.eager_diloco(6, FRAGMENTS, codec=ALL_DCT, phases=2),
        tw.eager_diloco(6, FRAGMENTS, phases=2),
    ),
    "carry": (tw.carry_diloco(4, codec=ALL_DCT), tw.carry_diloco(4)),
    "ddp": (tw.Method("sparse", (tw.Sync(tw.grads, tw.Every(1), tw.Overwrite(), ALL, feedback=0.9),)), tw.ddp()),
    "first moments": (
        tw.Method(
            "sparse",
            (
                tw.Sync(tw.params, tw.Every(4), tw.Average(), ALL),
                tw.Sync(tw.moment("exp_avg"), tw.Every(4), tw.Overwrite(), ALL_DCT),
                tw.Sync(tw.moment("exp_avg_sq"), tw.Every(4), tw.Overwrite()),
            ),
        ),
        tw.local_adam(4),
    ),
    "first moments, delayed": (
        tw.Method("sparse", (tw.Sync(tw.moment("exp_avg"), tw.Every(4, delay=2), tw.Overwrite(), ALL),)),
        tw.Method("dense", (tw.Sync(tw.moment("exp_avg"), tw.Every(4, delay=2), tw.Overwrite()),)),
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_top_k_of_everything_is_the_dense_method(name: str) -> None:
    same(*DENSE[name])


def test_first_moments_may_be_averaged_from_an_anchor() -> None:
    sparse = tw.Method("sparse", (tw.Sync(tw.moment("exp_avg"), tw.Every(4), tw.Average(), ALL),))
    dense = tw.Method("dense", (tw.Sync(tw.moment("exp_avg"), tw.Every(4), tw.Average()),))
    same(sparse, dense)


@pytest.mark.parametrize(("phases", "codec"), [(1, None), (2, None), (1, tw.E3M0())])
def test_the_mean_of_the_eager_terms(phases: int, codec: Any) -> None:
    """E[g] = (1/M) fresh + (1 - 1/M) stale. With outer lr 1 and no momentum, g is what the point moves by.

    The codec only touches what has travelled: stale is then E[Q(drift)] - E[drift]/M.
    """
    workers, every = 4, 3
    fleet = problem.fleet(tw.eager_diloco(every, None, 1.0, 0.0, codec, phases), workers, sgd)
    points = [ref.start() for _ in range(workers)]
    fresh: list[ref.Tensors] = []
    stale: list[ref.Tensors] = []
    encode = ref.Dense(ref.e3m0_block) if codec else ref.Exact()
    for t in range(1, 19):
        for m, replica in enumerate(fleet.replicas):
            problem.backward(replica.model, t, m)
        if t % every:
            fleet.step()
            continue
        drifts = stepped_alone(fleet, points)
        fleet.step()
        moved = [
            ref.combine(np.subtract, p, problem.values(r.model)) for p, r in zip(points, fleet.replicas, strict=True)
        ]
        points = [problem.values(r.model) for r in fleet.replicas]
        fresh.append(ref.average(drifts))
        stale.append(encode.mean([encode.encode(d) for d in drifts]))
        old = len(fresh) - 1 - phases
        want = ref.combine(lambda d: d / workers, fresh[-1])
        if old >= 0:
            want = ref.combine(lambda a, b, c: a + b - c / workers, want, stale[old], fresh[old])
        assert problem.gap(ref.average(moved), want) < 1e-5, f"step {t}"


def stepped_alone(fleet: tw.Fleet, points: Sequence[ref.Tensors]) -> list[ref.Tensors]:
    """The drift of each worker once its plain SGD step will have been taken."""
    out = []
    for point, replica in zip(points, fleet.replicas, strict=True):
        after = {n: (p.detach().double() - 0.05 * p.grad.double()).numpy() for n, p in replica.model.named_parameters()}
        out.append(ref.combine(np.subtract, point, after))
    return out


def blind_step(fleet: tw.Fleet, gradient: Callable[[int, int, torch.Tensor], torch.Tensor]) -> None:
    """A step whose gradients, `gradient(step, worker, parameter)`, do not depend on the point."""
    for worker, replica in enumerate(fleet.replicas):
        for p in replica.model.parameters():
            p.grad = gradient(fleet.steps, worker, p)
    fleet.step()


def noise(step: int, worker: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(10 * step + worker))


def two_values(step: int, worker: int, like: torch.Tensor) -> torch.Tensor:
    return (1 + step % 3) * noise(0, worker, like).sign()


@pytest.mark.parametrize("workers", [1, 2])
def test_two_bits_are_enough_for_two_values(workers: int) -> None:
    left, right = (problem.fleet(method, workers, sgd) for method in (tw.two_bit_averaging(4, 1.0), tw.local_sgd(4)))
    for _ in range(24):
        blind_step(left, two_values)
        blind_step(right, two_values)
        assert problem.distance(left, right) < 1e-5


def test_sparse_averaging_is_a_setting_of_sparseloco() -> None:
    ours, theirs = tw.sparse_averaging(5, 32, 0.7, 0.9), tw.sparseloco(5, 32, topk=1, decay=0.7, outer_lr=0.9)
    assert str(ours).splitlines()[1:] == str(theirs).splitlines()[1:]


@pytest.mark.parametrize("workers", [1, 2])
def test_sparse_averaging_of_all_values_in_two_bits_is_averaging(workers: int) -> None:
    methods = tw.sparse_averaging(4, chunk=1, decay=1.0), tw.local_sgd(4)
    left, right = (problem.fleet(method, workers, sgd) for method in methods)
    for _ in range(24):
        blind_step(left, two_values)
        blind_step(right, two_values)
        assert problem.distance(left, right) < 1e-5


@pytest.mark.parametrize("workers", [1, 2])
def test_what_two_bits_drop_is_in_the_residuals(workers: int) -> None:
    """All that was sent and the mean residual are, together, the mean drift since the start: nothing is lost."""
    left, right = (problem.fleet(method, workers, sgd) for method in (tw.two_bit_averaging(4, 1.0), tw.local_sgd(4)))
    for _ in range(24):
        blind_step(left, noise)
        blind_step(right, noise)
    row = left.rows[0]
    rest = row.layout.views(torch.stack([lane.state["residual"] for lane in row.lanes]).mean(0))
    pairs = zip(left.replicas[0].model.parameters(), rest, right.replicas[0].model.parameters(), strict=True)
    for ours, dropped, exact in pairs:
        torch.testing.assert_close(ours - dropped, exact, atol=1e-5, rtol=0)
    assert problem.distance(left, right) > 1e-2  # without the residuals they differ
