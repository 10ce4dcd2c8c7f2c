"""Work in strips that fit a cache: cut anywhere, a round gives the same bits, and what is summed in passing is true."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.codec import base, twobit
from thinwire.header import checksum
from thinwire.live import Live
from thinwire.rule import reduced, state

from .entries import ENTRIES, fleet_of, same, snapshot, train

CUTS = (2, 6, 64)  # values; even, since a checksum is of words of two


def cut_at(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, reduced, state, twobit):
        monkeypatch.setattr(module, "STRIP", values)


@pytest.mark.parametrize("values", CUTS)
@pytest.mark.parametrize("name", ["diloco", "streaming", "carry", "eager", "desloc nesterov", "sparseloco", "two_bit"])
def test_a_run_is_the_same_to_the_bit_however_it_is_cut(
    name: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ENTRIES[name]
    whole = snapshot(train(fleet_of(entry.method, 2, entry.optimizer), 9))
    cut_at(values, monkeypatch)
    assert same(whole, snapshot(train(fleet_of(entry.method, 2, entry.optimizer), 9)))


class Mixed(nn.Module):
    """Of both precisions, nothing at all, one value, and one that does not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.short = nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.randn(()))
        self.matrix = nn.Parameter(torch.randn(5, 11))


def live_of(model: nn.Module) -> Live:
    return Live(tw.params, tw.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)), align=1)


@pytest.mark.parametrize("turned", [False, True], ids=["in one piece", "turned"])
@pytest.mark.parametrize("values", CUTS)
@torch.no_grad()
def test_drift_and_the_sums_in_passing(values: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(values, monkeypatch)
    model = Mixed()
    if turned:
        model.matrix = nn.Parameter(torch.randn(11, 5).t())
    live = live_of(model)
    anchor = live.read().mul_(1.01)
    message = live.drift(anchor)
    wanted = [a.to(p.dtype) - p for p, a in zip(model.parameters(), live.layout.views(anchor), strict=True)]
    assert all(torch.equal(m, w.float()) for m, w in zip(live.layout.views(message), wanted, strict=True))
    assert live.norm(message) == pytest.approx(float(message.double().norm()), rel=1e-6)
    assert live.checksum(anchor) == checksum(anchor)


@torch.no_grad()
def test_what_was_summed_in_passing_is_forgotten_when_the_buffer_changes() -> None:
    live = live_of(Mixed())
    anchor = live.read().mul_(2)
    message = live.drift(anchor)
    message[3] = 100.0
    anchor[3] += 1
    assert live.norm(message) == pytest.approx(float(message.norm()))
    assert live.checksum(anchor) == checksum(anchor)


@pytest.mark.parametrize("values", CUTS)
@torch.no_grad()
def test_writing_along_is_writing(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(values, monkeypatch)
    model, seen = Mixed(), []
    live = live_of(model)
    buffer = torch.zeros(live.layout.total)
    wanted = torch.randn(live.layout.total)

    def compute(which: slice) -> None:
        seen.append(which)
        buffer[which] = wanted[which]

    live.write_along(buffer, compute)
    assert len(seen) == -(-live.layout.total // values)
    pairs = zip(model.parameters(), live.layout.views(wanted), strict=True)
    assert all(torch.equal(p, w.to(p.dtype)) for p, w in pairs)


@pytest.mark.parametrize("divisor", [2.0, 3.0, 0.7])
def test_a_mean_taken_in_parts_is_the_mean(divisor: float) -> None:
    total = torch.randn(1000)
    parts = tw.Reduced(total.clone(), None, 0.5, divisor=divisor, measured=True)
    whole = tw.Reduced(total.clone(), None, 0.5, divisor=divisor, measured=True)
    taken = torch.cat([parts.part(slice(at, at + 300)).clone() for at in range(0, 1000, 300)])
    assert torch.equal(taken, total / divisor) and torch.equal(whole.mean, total / divisor)
    assert torch.equal(whole.mean, total / divisor)  # divided once, however often it is asked for
    assert parts.square == pytest.approx(float((total / divisor).square().sum()), rel=1e-5)
    assert whole.square == pytest.approx(parts.square, rel=1e-5)
