"""What a worker hands to one who joins: parameters, every moment, outer state and the step. Plain tensors and numbers.

What a worker still owes the others (error feedback, lost messages) is its own: a newcomer starts with none of it, or
it would be sent twice. A newcomer's weight is zero until it has taken steps of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import start
from .calls import apart
from .replica import Replica
from .row import Row
from .transport import Newcomers

if TYPE_CHECKING:
    from .fleet import Fleet


class Joining(Newcomers):
    """The engine's side of a change of membership."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def drain(self) -> None:
        self.fleet.drain()

    @apart
    def save(self) -> dict[str, Any]:
        return save(self.fleet)

    @apart
    def load(self, state: dict[str, Any]) -> None:
        load(self.fleet, state)

    def facts(self) -> dict[str, Any]:
        return start.facts(self.fleet)


def save(fleet: Fleet) -> dict[str, Any]:
    """The state of a fleet with nothing in flight."""
    replica = fleet.replicas[0]
    return {
        "steps": fleet.steps,
        "steps_begun": fleet.steps_begun,
        "tensors": {name: tensor.detach() for name, tensor in _moving(replica).items()},
        "optimizer": {name: _optimizer_state(replica, name) for name in replica.trainable},
        "groups": [[_numbers(group) for group in optimizer.param_groups] for optimizer in replica.optimizers],
        "rows": [_save_row(row) for row in fleet.rows],
    }


def load(fleet: Fleet, saved: dict[str, Any]) -> None:
    """Take over what `save` gave on another worker."""
    replica = fleet.replicas[0]
    moving = _moving(replica)
    with torch.no_grad():
        for name, tensor in saved["tensors"].items():
            moving[name].copy_(tensor)
    for name, state in saved["optimizer"].items():
        _load_optimizer(replica, name, state)
    for optimizer, numbers in zip(replica.optimizers, saved["groups"], strict=True):
        for group, there in zip(optimizer.param_groups, numbers, strict=True):
            _load_numbers(group, there)
    for row, kept in zip(fleet.rows, saved["rows"], strict=True):
        _load_row(row, kept)
    fleet.steps, fleet.steps_begun = saved["steps"], saved["steps_begun"]
    fleet.loaded = True


def _moving(replica: Replica) -> dict[str, Tensor]:
    return {**replica.trainable, **replica.statistics}


def _optimizer_state(replica: Replica, name: str) -> dict[str, Any]:
    """Each value with whether it lies beside the parameter: optimizers keep some counters on the host."""
    found, parameter = replica.group_of(name), replica.trainable[name]
    state = found[0].state.get(parameter, {}) if found else {}
    return {
        key: [value, isinstance(value, Tensor) and value.device == parameter.device] for key, value in state.items()
    }


def _load_optimizer(replica: Replica, name: str, state: dict[str, Any]) -> None:
    found, parameter = replica.group_of(name), replica.trainable[name]
    if found is None:
        return
    mine = found[0].state[parameter]
    for key in set(mine) - set(state):
        del mine[key]
    for key, (value, beside) in state.items():
        old = mine.get(key)
        if isinstance(value, Tensor) and isinstance(old, Tensor) and old.shape == value.shape:
            old.copy_(value)  # captured graphs know its place
        else:
            mine[key] = (
                value.to(parameter.device if beside else "cpu", copy=True) if isinstance(value, Tensor) else value
            )


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """What a schedule moves: the learning rate, betas, and what it keeps beside them."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if isinstance(value, (int, float, Tensor))
        or (isinstance(value, tuple) and all(isinstance(each, (int, float)) for each in value))
    }


def _load_numbers(group: dict[str, Any], numbers: dict[str, Any]) -> None:
    for key, value in numbers.items():
        old = group.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor):
            old.copy_(value)  # captured graphs know its place
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _save_row(row: Row) -> dict[str, Any]:
    counters = {name: getattr(row, name) for name in ("launched", "landed", "equal_at", "weighed_from")}
    state = {name: None if name == "backlog" else value for name, value in row.lanes[0].state.items()}
    return {**counters, "state": state}


def _load_row(row: Row, saved: dict[str, Any]) -> None:
    for name in ("launched", "landed", "equal_at", "weighed_from"):
        setattr(row, name, saved[name])
    row.flights.clear()
    lane = row.lanes[0]
    state: dict[str, Tensor | None] = {
        name: value if value is None else value.to(lane.live.device, copy=True)
        for name, value in saved["state"].items()
    }
    if "residual" in state:
        state["residual"] = row.layout.zeros(lane.live.device)
    lane.keep(state)
    lane.counted, lane.unwell = lane.weighed, False
