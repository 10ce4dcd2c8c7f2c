"""Our Muon, for torch before 2.9, against torch's own."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import thinwire.optim
from thinwire.optim.muon import Muon

SHAPES = [(8, 8), (6, 17), (17, 6), (1, 5), (64, 3)]

needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def step(optimizer, params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


@needs_torchs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.9},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
    ],
)
def test_same_numbers_as_torchs(options, dtype):
    ours, theirs = matrices(dtype), matrices(dtype)
    optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for seed in range(5):
        step(optimizers[0], ours, seed)
        step(optimizers[1], theirs, seed)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(optimizers[0].state[a], optimizers[1].state[b])


@needs_torchs
def test_same_numbers_as_torchs_without_nesterov():
    ours, theirs = matrices(), matrices()
    optimizers = Muon(ours, nesterov=False), torch.optim.Muon(theirs, nesterov=False)
    for seed in range(5):
        step(optimizers[0], ours, seed)
        step(optimizers[1], theirs, seed)
    torch.testing.assert_close(ours, theirs)


@needs_torchs
def test_same_arguments_groups_and_state_names_as_torchs():
    ours, theirs = (list(inspect.signature(cls.__init__).parameters.values()) for cls in (Muon, torch.optim.Muon))
    assert [(a.name, a.default) for a in ours] == [(a.name, a.default) for a in theirs]
    params = matrices()
    a, b = Muon(params), torch.optim.Muon(params)
    step(a, params, 0)
    step(b, params, 0)
    assert a.state_dict().keys() == b.state_dict().keys()
    assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]
    assert list(a.state[params[0]]) == list(b.state[params[0]]) == ["momentum_buffer"]


@needs_torchs
def test_state_moves_between_ours_and_torchs():
    ours, theirs = matrices(), matrices()
    a, b = Muon(ours, lr=0.1), torch.optim.Muon(theirs)
    step(a, ours, 0)
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # else they would share the buffers
    step(a, ours, 1)
    step(b, theirs, 1)
    torch.testing.assert_close(ours, theirs)


def test_torchs_own_is_used_where_it_exists():
    assert thinwire.optim.Muon is getattr(torch.optim, "Muon", Muon)


def test_groups_have_their_own_options():
    together, apart = matrices(), matrices()
    grouped = Muon([{"params": together[:2], "lr": 0.1}, {"params": together[2:], "momentum": 0.5}])
    separate = [Muon(apart[:2], lr=0.1), Muon(apart[2:], momentum=0.5)]
    for p, q in zip(together, apart, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    grouped.step()
    for optimizer in separate:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(together, apart, strict=True))


def test_a_bf16_buffer_is_not_changed_by_making_it_orthogonal():
    (p, *_) = params = matrices(torch.bfloat16)
    optimizer = Muon(params, nesterov=False)
    step(optimizer, params, 0)
    expected = torch.zeros_like(p).lerp_(p.grad, 1 - 0.95)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], expected)


def test_update_is_nearly_orthogonal():
    p = nn.Parameter(torch.zeros(6, 17))
    optimizer = Muon([p], lr=1.0, weight_decay=0.0)
    p.grad = torch.randn(6, 17, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(p.detach())
    assert values.min() > 0.5 and values.max() < 1.5


def test_state_dict_round_trip_is_bit_identical():
    ours, again = matrices(), matrices()
    a, b = Muon(ours), Muon(again, lr=1.0)
    step(a, ours, 0)
    for p, q in zip(ours, again, strict=True):
        q.data.copy_(p.data)
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # else they would share the buffers
    step(a, ours, 1)
    step(b, again, 1)
    assert all(torch.equal(p, q) for p, q in zip(ours, again, strict=True))


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="AdamW"):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="must be"):
        Muon(matrices(), lr=-1.0)
    with pytest.raises(ValueError, match="match_rms_adamw"):
        Muon(matrices(), adjust_lr_fn="other")
