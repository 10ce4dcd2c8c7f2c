"""The reference's problem as a torch model: named tensors of odd shapes, gradients set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import thinwire as tw

from . import reference as ref


class Tensors(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]] = ref.SHAPES) -> None:
        super().__init__()
        for name, value in ref.start(shapes).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float32)))


def values(model: nn.Module) -> ref.Tensors:
    return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def fleet(
    method: tw.Method,
    workers: int,
    optimizer: Callable[[Any], Any],
    shapes: dict[str, tuple[int, ...]] = ref.SHAPES,
    lose: Callable[[int, int], bool] | None = None,
) -> tw.Fleet:
    models = [Tensors(shapes) for _ in range(workers)]
    return tw.Fleet([tw.Replica(m, optimizer(m.parameters())) for m in models], method, tw.Local(lose))


def backward(model: nn.Module, step: int, worker: int) -> None:
    """Sets the gradients of this step (counted from 1) at the model's own point."""
    grads = ref.gradient(values(model), step, worker)
    for name, p in model.named_parameters():
        p.grad = torch.tensor(grads[name], dtype=p.dtype)


def step(fleet: tw.Fleet) -> None:
    for worker, replica in enumerate(fleet.replicas):
        backward(replica.model, fleet.steps + 1, worker)
    fleet.step()
    fleet.zero_grad()


def run(fleet: tw.Fleet, steps: int) -> tw.Fleet:
    for _ in range(steps):
        step(fleet)
    return fleet


def gap(one: ref.Tensors, other: ref.Tensors) -> float:
    """The largest difference, relative to the largest value of its tensor, or to one, the scale of the problem."""
    return max(
        float(np.abs(one[n] - other[n]).max() / max(np.abs(other[n]).max(), 1.0)) for n in other if other[n].size
    )


def distance(one: tw.Fleet, other: tw.Fleet) -> float:
    pairs = zip(one.replicas, other.replicas, strict=True)
    return max(gap(values(a.model), values(b.model)) for a, b in pairs)
