"""What must not grow, over hundreds of rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw

from . import problem
from . import reference as ref

SMALL: dict[str, tuple[int, ...]] = {"w": (5, 3), "b": (4,)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def spread(fleet: tw.Fleet) -> float:
    """How far the workers are apart."""
    found = [problem.values(replica.model) for replica in fleet.replicas]
    return max(float(np.abs(a[n] - found[0][n]).max()) for a in found for n in a)


@pytest.mark.parametrize("lost", [0, 5])
@pytest.mark.parametrize(
    ("codec", "phases"), [(None, 1), (None, 2), (tw.E3M0(), 1), (tw.E3M0(), 2), (tw.TopK(4, 8), 1)], ids=str
)
def test_eager_workers_stay_together(codec: Any, phases: int, lost: int) -> None:
    """As far apart as they are early on is as far as they ever are, over 300 rounds."""
    lose = (lambda row, number: number % lost == 0) if lost else None
    fleet = problem.fleet(tw.eager_diloco(1, None, 0.2, 0.8, codec, phases), 3, sgd, SMALL, lose)
    widths = []
    for _ in range(300):
        problem.step(fleet)
        widths.append(spread(fleet))
    assert max(widths[100:]) < 1.5 * max(widths[:100])
    assert max(widths) < 5
    assert bool(fleet.events.counts.get("lost", 0)) == bool(lost)


@pytest.mark.parametrize("make", [tw.local_sgd, tw.local_adam, tw.desloc])
def test_a_delay_beyond_the_period_is_refused_or_bounded(make: Any) -> None:
    """Each landing must leave workers closer; three rounds in flight must not pull each other over."""
    try:
        method = make(2, delay=7)
    except ValueError:
        return
    optimizer = sgd if make is tw.local_sgd else torch.optim.Adam
    fleet = problem.run(problem.fleet(method, 3, optimizer, SMALL), 200)
    assert spread(fleet) < 5


def test_second_moments_never_become_negative() -> None:
    """A negative one is a NaN parameter at the next step of Adam."""
    try:
        row = tw.Sync(tw.moment("exp_avg_sq"), tw.Every(1, delay=3), tw.Overwrite())
    except ValueError:
        return
    method = tw.Method("second moments", (row,))
    fleet = problem.fleet(method, 3, lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)), SMALL)
    for _ in range(20):
        problem.step(fleet)
        for replica in fleet.replicas:
            for state in replica.optimizers[0].state.values():
                assert bool((state["exp_avg_sq"] >= 0).all()), f"step {fleet.steps}"


@pytest.mark.parametrize("codec", [tw.TopK(2, 8, merge="mean"), tw.DCT(tw.TopK(3, merge="mean"), 4)], ids=str)
def test_mean_conserves_the_mean_momentum(codec: tw.Codec) -> None:
    """m - own + mean, with mean = sum / M: the sum over the workers stays b * (the sum before) + the sum of drifts.

    The momentum is read off the parameters: anchor before - anchor after = lr (g + b m).
    """
    workers, every, lr, decay = 4, 2, 0.3, 0.8
    row = tw.Sync(tw.params, tw.Every(every), tw.SharedMomentum(lr, decay), codec)
    fleet = problem.fleet(tw.Method("mean", (row,)), workers, sgd, SMALL)
    anchors = [ref.start(SMALL) for _ in range(workers)]
    total = ref.combine(np.zeros_like, anchors[0])
    for _ in range(100):
        problem.run(fleet, every - 1)
        for m, replica in enumerate(fleet.replicas):
            problem.backward(replica.model, fleet.steps + 1, m)
        drifts = []
        for anchor, replica in zip(anchors, fleet.replicas, strict=True):
            named = dict(replica.model.named_parameters())
            drifts.append({n: anchor[n] - (p.detach() - 0.05 * p.grad).double().numpy() for n, p in named.items()})
        fleet.step()
        total = ref.combine(lambda v, *d: decay * v + sum(d), total, *drifts)
        found = []
        for anchor, replica, drift in zip(anchors, fleet.replicas, drifts, strict=True):
            after = problem.values(replica.model)
            found.append(ref.combine(lambda a, b, d: ((a - b) / lr - d) / decay, anchor, after, drift))
        assert problem.gap(ref.combine(lambda *v: sum(v), *found), total) < 1e-4
        anchors = [problem.values(replica.model) for replica in fleet.replicas]
    assert spread(fleet) < 5


@pytest.mark.parametrize("name", ["consensus", "sparseloco", "carry"])
def test_feedback_does_not_pile_up(name: str) -> None:
    """Coarse messages for 100 rounds: every worker ends near the middle, and the carried rest stays small."""
    method = {
        "consensus": tw.decoupled_momentum(3, 4, 3, variant="consensus"),
        "sparseloco": tw.sparseloco(3, 8, 3),
        "carry": tw.carry_diloco(3, codec=tw.E3M0(), outer_lr=0.4),
    }[name]
    fleet = problem.run(problem.fleet(method, 3, sgd, SMALL), 300)
    for replica in fleet.replicas:
        assert max(float(np.abs(v).max()) for v in problem.values(replica.model).values()) < 5
