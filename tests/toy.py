"""A small model, its batches, and a fleet in one process: what most tests run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw

OptimizerOf = Callable[[Any], torch.optim.Optimizer]
FRAGMENTS = [["0.*"], ["2.*", "4.*"]]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(8, 7, generator=generator), torch.randn(8, 3, generator=generator)


def backward(model: nn.Module, step: int, worker: int) -> Tensor:
    inputs, targets = batch(step, worker)
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    return loss.detach()


def replicas(count: int, optimizer: OptimizerOf = adamw, model: nn.Module | None = None) -> list[tw.Replica]:
    base = model or small_model()
    models = [copy.deepcopy(base) for _ in range(count)]
    return [tw.Replica(m, optimizer(m.parameters())) for m in models]


def fleet_of(
    method: tw.Method, workers: int, optimizer: OptimizerOf = adamw, lose: Callable[[int, int], bool] | None = None
) -> tw.Fleet:
    return tw.Fleet(replicas(workers, optimizer), method, tw.Local(lose))


def train(fleet: tw.Fleet, steps: int, first_worker: int = 0) -> None:
    """`steps` more steps; each replica sees the batches of its own number."""
    for _ in range(steps):
        for i, replica in enumerate(fleet.replicas):
            backward(replica.model, fleet.steps, first_worker + i)
        fleet.step()
        fleet.zero_grad()


def parameters(fleet: tw.Fleet) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in replica.model.parameters()] for replica in fleet.replicas]


def same_bits(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def all_equal(fleet: tw.Fleet) -> bool:
    """Whether the hosted replicas hold the same parameters, to the bit."""
    values = parameters(fleet)
    return all(same_bits([values[0]], [other]) for other in values[1:])
