"""ADOPT against a reference in NumPy, written from the equations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.optim import ADOPT

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.0}


class Reference:
    """One tensor: step 1 sets v = g^2; then m from the old v, x from m, v last."""

    def __init__(self, x, lr, betas, eps, weight_decay):
        self.x, self.m, self.v, self.t = x.astype(np.float64), np.zeros(x.shape), np.zeros(x.shape), 0
        self.lr, (self.b1, self.b2), self.eps, self.decay = lr, betas, eps, weight_decay

    def step(self, g):
        g, self.t = g.astype(np.float64), self.t + 1
        if self.t == 1:
            self.v = g**2
            return
        self.m = self.b1 * self.m + (1 - self.b1) * g / np.maximum(np.sqrt(self.v), self.eps)
        self.x = self.x - self.lr * self.decay * self.x - self.lr * self.m
        self.v = self.b2 * self.v + (1 - self.b2) * g**2


def run_beside_reference(shapes, steps, groups, dtype=torch.float64, skip=lambda i, t: False):
    """`groups[i]` holds the options of tensor i; `skip(i, t)` leaves it without a gradient at step t."""
    rng = np.random.default_rng(0)
    params = [nn.Parameter(torch.tensor(rng.normal(size=shape), dtype=dtype)) for shape in shapes]
    references = [Reference(p.detach().numpy(), **options) for p, options in zip(params, groups, strict=True)]
    optimizer = ADOPT([{"params": [p], **options} for p, options in zip(params, groups, strict=True)])
    for t in range(1, steps + 1):
        for i, (p, reference) in enumerate(zip(params, references, strict=True)):
            g = rng.normal(size=p.shape) * 10.0 ** rng.integers(-3, 2)
            p.grad = None if skip(i, t) else torch.tensor(g, dtype=dtype)
            if p.grad is not None:
                reference.step(p.grad.numpy())
        optimizer.step()
    return params, references, optimizer


def assert_equal_to_reference(params, references, optimizer, **tolerance):
    for p, reference in zip(params, references, strict=True):
        state = optimizer.state[p]
        np.testing.assert_allclose(p.detach().numpy(), reference.x, **tolerance)
        np.testing.assert_allclose(state["exp_avg"].numpy(), reference.m, **tolerance)
        np.testing.assert_allclose(state["exp_avg_sq"].numpy(), reference.v, **tolerance)
        assert state["step"].item() == reference.t


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equations(weight_decay):
    options = {**OPTIONS, "weight_decay": weight_decay}
    run = run_beside_reference([(4, 3), (5,), ()], 20, [options] * 3)
    assert_equal_to_reference(*run, rtol=1e-12, atol=1e-12)


def test_float32():
    run = run_beside_reference([(4, 3), (5,)], 20, [OPTIONS] * 2, dtype=torch.float32)
    assert_equal_to_reference(*run, rtol=2e-5, atol=1e-6)


def test_groups_have_their_own_options():
    other = {"lr": 0.3, "betas": (0.5, 0.9999), "eps": 0.1, "weight_decay": 0.2}
    run = run_beside_reference([(3,), (3, 2), (2,)], 12, [OPTIONS, other, OPTIONS])
    assert_equal_to_reference(*run, rtol=1e-12, atol=1e-12)


def test_each_parameter_counts_its_own_gradients():
    """One whose gradient comes late sets its v then, while the others go on."""
    run = run_beside_reference([(3,), (4,)], 9, [OPTIONS] * 2, skip=lambda i, t: i == 1 and t in (1, 2, 5))
    assert_equal_to_reference(*run, rtol=1e-12, atol=1e-12)


def test_the_papers_defaults():
    (group,) = ADOPT([nn.Parameter(torch.ones(1))]).param_groups
    assert {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.0021,
        "betas": (0.95, 0.9999),
        "eps": 1e-6,
        "weight_decay": 0.0,
    }


def test_zeroed_state_starts_afresh():
    params, _, optimizer = run_beside_reference([(3,)], 5, [OPTIONS])
    (p,) = params
    for value in optimizer.state[p].values():
        value.zero_()
    before = p.detach().clone()
    p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], torch.full_like(p, 4.0))


def small_model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(32, 4), torch.randn(32, 1)


def train(model, optimizer, x, y, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_state_dict_round_trip_is_bit_identical(tmp_path):
    model, x, y = small_model_and_data()
    optimizer = ADOPT(model.parameters(), lr=0.01)
    train(model, optimizer, x, y, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = copy.deepcopy(model)
    optimizer_again = ADOPT(again.parameters(), lr=1.0)
    again.load_state_dict(saved["model"])
    optimizer_again.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, x, y, 5) == train(again, optimizer_again, x, y, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_it_trains_with_a_closure_and_a_scheduler():
    model, x, y = small_model_and_data()
    optimizer = ADOPT(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    for _ in range(100):
        last = optimizer.step(closure).item()
        scheduler.step()
    assert last < 0.7 * first


def test_storage_is_never_rebound():
    params, _, optimizer = run_beside_reference([(3,)], 2, [OPTIONS])
    (p,) = params
    held = [p, *optimizer.state[p].values()]
    addresses = [t.data_ptr() for t in held]
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert [t.data_ptr() for t in (p, *optimizer.state[p].values())] == addresses


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"eps": 0.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        ADOPT([nn.Parameter(torch.ones(1))], **wrong)
