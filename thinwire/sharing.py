"""Equal optimizer states on all workers: equal gradients make equal steps only from these, and no row carries them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from .calls import led
from .live import Live
from .replica import Replica, local, moment, params
from .start import fingerprint
from .state_names import moments_of

if TYPE_CHECKING:
    from .fleet import Fleet

Facts = dict[str, list[Any]]  # by parameter: its moments' names, the rest of its state in digests, its steps, sums


@led
def share_states(fleet: Fleet) -> None:
    """All take the mean of each moment, over the workers that took most steps with that parameter, and their count.

    A state that is not finite begins anew first, and so counts only where all are. What has no mean, or is not there on
    all workers, begins anew on all if it differs.
    """
    for replica in fleet.replicas:
        fleet.island.cure(replica)
    mine = [_facts(replica) for replica in fleet.replicas]
    heard = [json.loads(blob) for blob in fleet.transport.talk([json.dumps(facts).encode() for facts in mine])]
    if fleet.island.all(all(facts == heard[0] for facts in heard)):
        return
    unlike = _anywhere(fleet, [name for name in heard[0] if len({str(facts[name][:2]) for facts in heard}) > 1])
    for replica in fleet.replicas if unlike else ():
        Live(params.where(unlike.__contains__), replica, align=1).restart_states()
    if unlike:
        what = f"{len(unlike)} parameters' optimizer states differ between workers in what has no mean: they begin anew"
        fleet.events.add("start", fleet.steps, what)
    kept = {name: moments for name, (moments, *_) in heard[0].items() if name not in unlike}
    steps = {name: [facts[name][2] for facts in heard] for name in kept}
    for state in sorted({state for moments in kept.values() for state in moments}):
        _share(fleet, state, {name: steps[name] for name, moments in kept.items() if state in moments})
    for replica in fleet.replicas:
        live = Live(params.where(steps.__contains__), replica, align=1)
        live.set_steps([max(steps[name]) for name in live.names])


def _share(fleet: Fleet, state: str, steps: dict[str, list[float]]) -> None:
    """The mean of one moment over the workers that are farthest; `steps` are all workers', by parameter."""
    lives = [Live(moment(state).where(steps.__contains__), replica, align=1) for replica in fleet.replicas]
    buffers = [live.read() for live in lives]
    for lane, (live, buffer) in enumerate(zip(lives, buffers, strict=True)):
        for name, view in zip(live.names, live.layout.views(buffer), strict=True):
            if steps[name][fleet.worker + lane] < max(steps[name]):
                view.zero_()
    total = fleet.transport.add(buffers)
    for name, view in zip(lives[0].names, lives[0].layout.views(total), strict=True):
        view.div_(steps[name].count(max(steps[name])))
    for live in lives:
        live.write(total)


def _facts(replica: Replica) -> Facts:
    return {name: _facts_of(replica, name) for name in replica.trainable}


def _facts_of(replica: Replica, name: str) -> list[Any]:
    state, moments = replica.state_of(name), moments_of(replica, name)
    rest = {key: _digest(value) for key, value in state.items() if key not in moments and key != "step"}
    return [moments, rest, float(state.get("step", 0)), [_digest(state[key]) for key in moments]]


def _digest(value: Any) -> str:
    return str(fingerprint(local(value))) if isinstance(value, Tensor) else repr(value)


def _anywhere(fleet: Fleet, names: list[str]) -> set[str]:
    """Those of any rank of this worker: each compares its own part with its twins'."""
    line, every = fleet.island.line, list(fleet.replicas[0].trainable)
    if line is None or fleet.island.led:
        return set(names)
    found = line.reduce([name in names for name in every], dist.ReduceOp.MAX)
    return {name for name, there in zip(every, found, strict=True) if there}
