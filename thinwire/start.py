"""Before the first step: do the workers run the same method on the same model, from the same values?"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .codec.base import STRIP
from .header import checksum, wrapped
from .live import Live
from .replica import Replica, View, buffers, fixed, params

if TYPE_CHECKING:
    from .fleet import Fleet

SHOWN = 4  # differences listed in an error


def compare_settings(fleet: Fleet) -> None:
    """Raise on every worker when two of them disagree on the method or on the tensors of a row."""
    facts = [_facts(fleet, i) for i in range(len(fleet.replicas))]
    digests = fleet.transport.talk([hashlib.sha256(json.dumps(fact).encode()).digest() for fact in facts])
    if len(set(digests)) == 1:
        return
    everybody = [json.loads(blob) for blob in fleet.transport.talk([json.dumps(fact).encode() for fact in facts])]
    other = next(worker for worker, digest in enumerate(digests) if digest != digests[0])
    raise ValueError(
        f"workers disagree: {_difference(everybody[0], everybody[other], other)}. Start all with the same settings"
    )


def _facts(fleet: Fleet, lane: int) -> dict[str, Any]:
    tensors = {}
    for row in fleet.rows:
        live = row.lanes[lane].live
        for name, shape, dtype in zip(live.names, live.layout.shapes, live.dtypes(), strict=True):
            state = f" {live.view.state_of(live.replica, name)}" if live.view.kind == "moment" else ""
            tensors[f"row {row.index}, {row.sync.view.kind} {name}"] = f"{tuple(shape)} {dtype}{state}"
    return {"method": str(fleet.method), "tensors": tensors}


def facts(fleet: Fleet) -> dict[str, Any]:
    """What one who joins must have in common with those who train, in few words."""
    mine = _facts(fleet, 0)
    frozen = _digest(_sums(fleet.replicas[0], fixed))
    tensors = hashlib.sha256(json.dumps(mine["tensors"]).encode()).hexdigest()[:12]
    return {"method": mine["method"], "number of tensors": len(mine["tensors"]), "tensors": tensors,
            "frozen tensors": frozen[:12]}  # fmt: skip


def _difference(first: dict[str, Any], other: dict[str, Any], worker: int) -> str:
    if first["method"] != other["method"]:
        pairs = zip(first["method"].split("\n"), other["method"].split("\n"), strict=False)
        mine, theirs = next((pair for pair in pairs if pair[0] != pair[1]), (first["method"], other["method"]))
        return f"worker 0 has the method [{mine}], worker {worker} has [{theirs}]"
    mine, theirs = first["tensors"], other["tensors"]
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not names:
        here, there = next(pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1])
        return f"the model has its tensors in another order: {here} on worker 0, {there} on worker {worker}"
    lines = [f"{n}: {mine.get(n, 'absent')} on worker 0, {theirs.get(n, 'absent')} on worker {worker}" for n in names]
    return "; ".join(lines[:SHOWN]) + (f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def equalise(fleet: Fleet) -> None:
    """Give every worker worker 0's trainable tensors where they differ; a fixed tensor that differs is an error.

    After loading, buffers may differ: a forward pass that moves them has been at work on each worker.
    """
    sums = [_value_sums(replica, frozen_only=fleet.loaded) for replica in fleet.replicas]
    blobs = [json.dumps([_digest(fixed), _digest(moving), _place(fleet)]).encode() for fixed, moving in sums]
    fleet.island.compare_copies(blobs)
    heard = [json.loads(blob) for blob in fleet.transport.talk(blobs)]
    if not fleet.transport.elastic:  # there one that is behind takes over another's state
        _refuse_other_places(fleet, [place for _, _, place in heard])
    if len({fixed for fixed, _, _ in heard}) > 1:
        _refuse_fixed(fleet, [fixed for fixed, _ in sums])
    if len({moving for _, moving, _ in heard}) == 1 or fleet.loaded:
        return
    for view in (params, buffers):
        _spread(fleet, view)
    fleet.events.add("start", 0, "workers started from different values; worker 0's were sent to all")


def _place(fleet: Fleet) -> list[int]:
    """The step of the state that was loaded, or -1, and how many rounds each row has launched."""
    return [fleet.steps if fleet.loaded else -1, *(row.launched for row in fleet.rows)]


def _refuse_other_places(fleet: Fleet, places: list[list[int]]) -> None:
    """Rounds are matched by number. With a delay, a skipped step may put a worker behind by what is in flight."""
    said = [f"of step {step}" if step >= 0 else "of no step" for step, *_ in places]
    for worker, (step, *rounds) in enumerate(places):
        apart = [
            row
            for row, mine, theirs in zip(fleet.rows, places[0][1:], rounds, strict=True)
            if row.names and not row.sync.rule.silent and abs(mine - theirs) > row.sync.every.in_flight
        ]
        if apart or (step < 0) != (places[0][0] < 0):
            raise ValueError(
                f"worker 0 has loaded a fleet's state {said[0]}, worker {worker} {said[worker]}: "
                "load the same step's on all, or none"
            )


def _value_sums(replica: Replica, frozen_only: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """BatchNorm's statistics are not compared: the first batches have moved them already.

    Nor are frozen tensors that are as they were saved: of a teacher that follows its model each worker has its own.
    """
    still = frozen_sums(replica) if frozen_only else _sums(replica, fixed)
    still = {name: total for name, total in still.items() if replica.frozen_then.get(name) != total}
    return still, _sums(replica, params)


def frozen_sums(replica: Replica) -> dict[str, int]:
    return _sums(replica, fixed.where(replica.frozen.__contains__))


def _sums(replica: Replica, view: View) -> dict[str, int]:
    live = Live(view, replica, align=1)
    pairs = zip(live.names, live.each(), strict=True)
    return {name: fingerprint(tensor) for name, tensor in pairs if tensor is not None}


def fingerprint(tensor: Tensor) -> int:
    """Unlike a checksum, which only adds up, it knows the order of the values: each word counts by its place."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    places = 2 * torch.arange(min(STRIP, -(-raw.numel() // 8)), device=tensor.device) + 1
    total = 0
    for strip in raw.split(8 * STRIP):
        words = torch.nn.functional.pad(strip, (0, -strip.numel() % 8)).view(torch.int64)
        total = 31 * total + int((words * places[: words.numel()]).sum())
    return wrapped(total)


def _digest(sums: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def _refuse_fixed(fleet: Fleet, fixed: list[dict[str, int]]) -> None:
    heard = [json.loads(blob) for blob in fleet.transport.talk([json.dumps(sums).encode() for sums in fixed])]
    for worker, sums in enumerate(heard):
        names = [name for name in {**heard[0], **sums} if heard[0].get(name) != sums.get(name)]
        if names:
            is_buffer = names[0] not in fleet.replicas[0].frozen
            raise ValueError(
                f"the frozen tensor {names[0]} differs between worker 0 and worker {worker}"
                + (f", and {len(names) - 1} more" if len(names) > 1 else "")
                + ": frozen tensors are never sent, so load the same base weights on every worker"
                + (", or call fleet.begin() before the first batch if that moves this buffer" if is_buffer else "")
            )


def _spread(fleet: Fleet, view: View) -> None:
    """Worker 0's values, on every worker."""
    lives = [Live(view, replica, align=1) for replica in fleet.replicas]
    if not lives[0].names:
        return
    first = fleet.transport.broadcast([live.read() for live in lives], 0)
    named = zip(lives[0].names, lives[0].layout.views(first), strict=True)
    broken = next((name for name, values in named if not bool(torch.isfinite(values.sum()))), None)
    if broken is not None:
        raise ValueError(f"{broken} is not finite on worker 0, whose values all would start from: load others there")
    for live in lives:
        live.write(first)


def compare_shared_copies(fleet: Fleet) -> None:
    """After loading: the outer copies must be the same bits on every worker."""
    for row in fleet.rows:
        sums = []
        for lane in row.lanes:
            copy = row.sync.rule.shared_copy(lane.state)
            sums.append(b"" if copy is None else str(checksum(copy)).encode())
        if len(set(fleet.transport.talk(sums))) > 1:
            row.send_copy_again(row.launched, source=0)
