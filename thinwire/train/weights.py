"""Tensors in and out of models and optimizers, for files: names as transformers has them, shards as they lie here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.dtensor import is_dtensor
from thinwire.replica import local, sharded_as
from thinwire.train.errors import UserError


def named(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name, tied ones once; this process's shard where it is sharded."""
    return _untied({name: local(tensor) for name, tensor in model.state_dict().items()})


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The same with shards put together, which all processes of a worker must do at once."""
    tensors = model.state_dict().items()
    return _untied({name: t.full_tensor() if is_dtensor(t) else t for name, t in tensors})


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            found[name] = tensor.detach().contiguous().cpu()
        seen.add(tensor.data_ptr())
    return found


@torch.no_grad()
def load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors in by name; tied ones arrive once."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name not in state or local(state[name]).shape != tensor.shape:
            raise UserError(
                f"the checkpoint's {name} {tuple(tensor.shape)} does not fit this model: resume with its own config"
            )
        local(state[name]).copy_(tensor)


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """A state that torch.load reads with weights_only: plain tensors."""
    state = optimizer.state_dict()
    plain = {
        index: {key: local(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return {"state": plain, "param_groups": state["param_groups"]}


def load_optimizers(optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """The stored moments; what the config decides (weight decay, betas) is the config's, as the learning rate is."""
    if [_options(optimizer.param_groups) for optimizer in optimizers] != [_options(s["param_groups"]) for s in states]:
        raise UserError("the checkpoint's optimizer state does not fit: resume with its own optimizer.name")
    for optimizer, state in zip(optimizers, states, strict=True):
        _load_optimizer(optimizer, state)


def _options(groups: list[dict[str, Any]]) -> list[set[str]]:
    return [set(group) for group in groups]


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {
        index: {key: _like(parameters[index], value) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    groups = [
        {**own, "params": stored["params"]}
        for own, stored in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    try:
        optimizer.load_state_dict({"state": sharded, "param_groups": groups})
    except ValueError as error:
        raise UserError(
            f"the checkpoint's optimizer state does not fit optimizer.name and this model: {error}"
        ) from error


def _like(parameter: Tensor, value: Any) -> Any:
    """What is laid out as the parameter's shard is becomes a shard; a step counter stays as it is."""
    beside = isinstance(value, Tensor) and value.shape == local(parameter).shape
    return sharded_as(parameter, value) if beside else value


def mean(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Name by name, the mean of floating-point tensors; counters come from the first."""
    return {name: _mean([state[name] for state in states]) for name in states[0]}


def mean_optimizer(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer state with the mean of the workers' moments."""
    merged = {
        index: {key: _mean([state["state"][index][key] for state in states]) for key in entry}
        for index, entry in states[0]["state"].items()
        if all(index in state["state"] for state in states)
    }
    return {"state": merged, "param_groups": states[0]["param_groups"]}


def _mean(values: list[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.ndim == 0:
        return first
    total = first.double()
    for value in values[1:]:
        total = total + value.double()
    return (total / len(values)).to(first.dtype)
