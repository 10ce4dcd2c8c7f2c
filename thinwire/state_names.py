"""The names of optimizer states: the usual ones, and which an optimizer keeps before it has taken a step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from .replica import Replica

FIRST = ("exp_avg", "momentum_buffer")  # means of gradients: they may be negative, and may travel coarsely
SECOND = ("exp_avg_sq",)


def created_states(replica: Replica, name: str) -> frozenset[str]:
    """The names of the tensors that the optimizer keeps, or will keep, for this parameter.

    An optimizer creates its state in its first step with a gradient, which may come late and on one worker only.
    All workers must agree on the names before that, so a trial step on a tiny stand-in parameter tells them.
    """
    found = replica.group_of(name)
    if found is None:
        return frozenset()
    optimizer, group = found
    parameter = replica.trainable[name]
    present = _named_tensors(optimizer.state.get(parameter, {}))
    return present or _trial_step(optimizer, group, parameter.ndim)


def moments_of(replica: Replica, name: str) -> list[str]:
    """Of this parameter, the states present that lie as it does: no counters, and not Adafactor's rows and columns."""
    shape, state = replica.trainable[name].shape, replica.state_of(name)
    tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor) and key != "step")
    return sorted(key for key, value in tensors if value.shape == shape and value.is_floating_point())


def first_value(state: str, group: dict[str, Any]) -> float:
    """What torch's optimizers begin this state with."""
    if state in ("mu_product", "mu"):  # NAdam's, ASGD's
        return 1.0
    if state in ("step_size", "eta"):  # Rprop's, ASGD's
        return float(group["lr"])
    return float(group.get("initial_accumulator_value", 0.0)) if state == "sum" else 0.0  # Adagrad's


def _named_tensors(state: dict[str, Any]) -> frozenset[str]:
    return frozenset(key for key, value in state.items() if isinstance(value, Tensor) and key != "step")


def _trial_step(optimizer: Optimizer, group: dict[str, Any], dimensions: int) -> frozenset[str]:
    stand_in = torch.nn.Parameter(torch.ones((2,) * dimensions, device=group["params"][0].device))
    stand_in.grad = torch.ones_like(stand_in)
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))  # copy.copy would leave out what a subclass adds
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [stand_in]}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(trial, hooks, OrderedDict())
    try:
        type(optimizer).step(trial)  # the class's own step: a scheduler may have replaced the instance's
    except Exception as error:
        raise ValueError(
            f"a trial step of {type(optimizer).__name__}, to learn which states it keeps, failed ({error}). "
            "Use a method that leaves optimizer state local: local_sgd, diloco, streaming_diloco or sparseloco"
        ) from error
    return _named_tensors(trial.state[stand_in])
