"""A fleet as plain tensors and numbers, and back.

The keys are the same at every step (a round that is not under way is saved as zeros) and carry the worker's number,
so that `torch.distributed.checkpoint` can fill them in and does not take two workers' state for one.
"""

from __future__ import annotations

import json
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import start
from .calls import led
from .flight import Answer, Flight, Lane, Sent
from .row import Row
from .transport import AllSick

if TYPE_CHECKING:
    from .fleet import Fleet

FORMAT = 2
_COUNTERS = ("steps", "bytes_sent", "wire_sent", "wire_received")


def save(fleet: Fleet) -> dict[str, Any]:
    """Waits for the rounds under way, without landing them. A lead saves for all ranks of its worker."""
    workers = _save_workers(fleet)
    return {"format": FORMAT, "method": str(fleet.method), "workers": fleet.workers, **workers}


@led
def _save_workers(fleet: Fleet) -> dict[str, Any]:
    _prepare(fleet)
    if any(len(row.flights) > row.sync.every.in_flight for row in fleet.rows):
        raise ValueError(
            "a round was interrupted before it landed, and cannot be saved under way: call fleet.drain() first, "
            "then save model, optimizer and fleet"
        )
    for row, flight in _in_order_of_landing(fleet):
        row.complete(flight)
    return {_key(fleet, lane): _save_worker(fleet, lane) for lane in range(len(fleet.replicas))}


def _in_order_of_landing(fleet: Fleet) -> list[tuple[Row, Flight]]:
    """Another worker may be landing these, and each waits for the other's vote: so all go by the same order."""
    flights = [(row, flight) for row in fleet.rows for flight in row.flights]
    return sorted(flights, key=lambda pair: pair[0].sync.every.landing_step(pair[1].number))


def _prepare(fleet: Fleet) -> None:
    """A fleet that has not begun has its state taken from the model, which is not compared with the others' yet."""
    fleet._open()
    if not fleet._begun and not fleet.loaded:
        for row in fleet.rows:
            row.begin()


def _key(fleet: Fleet, lane: int) -> str:
    shard = f".shard{fleet.island.shard}" if fleet.island.shard is not None else ""
    number = 0 if fleet.transport.elastic else fleet.worker + lane  # there numbers change with those who take part
    return f"worker{number}{shard}"


def _save_worker(fleet: Fleet, lane: int) -> dict[str, Any]:
    counters = {name: getattr(fleet, name) for name in _COUNTERS}
    frozen = json.dumps(start.frozen_sums(fleet.replicas[lane]))
    return {
        **counters,
        "frozen": frozen,
        **{f"row{row.index}": _save_row(row, row.lanes[lane], lane) for row in fleet.rows if row.names},
    }


def _save_row(row: Row, lane: Lane, index: int) -> dict[str, Any]:
    zeros = torch.zeros(row.layout.total, dtype=torch.float32, device="cpu")
    state = {name: zeros.clone() if value is None else value.clone() for name, value in lane.state.items()}
    empty = [name for name, value in lane.state.items() if value is None]
    return {
        "tensors": _tensors(row),
        "launched": row.launched,
        "landed": row.landed,
        "equal_at": row.equal_at,
        "weighed_from": row.weighed_from,
        "weighed": lane.weighed,
        "weight_landed": lane.counted,
        "unwell": lane.unwell,
        "state": state,
        "empty": ",".join(empty),
        **{f"flight{i}": _save_flight(row, index, i) for i in range(row.sync.every.in_flight)},
    }


def _tensors(row: Row) -> str:
    """What the row's buffers are made of: the same method may be of other fragments, or of another model."""
    return "; ".join(f"{name} {tuple(shape)}" for name, shape in zip(row.names, row.layout.shapes, strict=True))


def _save_flight(row: Row, lane: int, slot: int) -> dict[str, Any]:
    flight = row.flights[slot] if slot < len(row.flights) else None
    sent = flight.sent[lane] if flight else Sent(None, None, None, False, 0.0, [True] * len(row.names))
    answer = flight.answer if flight else None
    zeros = torch.zeros(row.layout.total, dtype=torch.float32, device="cpu")
    buffers = {"mean": answer.mean() if answer else None, "own": sent.own, "rest": sent.rest, "kept": sent.kept}
    held = answer.held if answer and answer.held is not None else [True] * len(row.names)
    return {
        "number": flight.number if flight else 0,
        "lost": str(flight.lost) if flight and flight.lost else "",
        "sick": sent.sick,
        "unwell": sent.unwell,
        "weighed": sent.weighed,
        "source": -1 if answer is None or answer.source is None else answer.source,
        "present": torch.tensor(sent.present, device="cpu"),
        "held": torch.tensor(held, device="cpu"),
        "share": answer.shares[lane] if answer else 0.0,
        "has": ",".join(name for name, value in buffers.items() if value is not None),
        **{name: zeros.clone() if value is None else value.clone() for name, value in buffers.items()},
    }


@led
def load(fleet: Fleet, saved: dict[str, Any]) -> None:
    _prepare(fleet)
    _check(fleet, saved)
    for row, flight in _in_order_of_landing(fleet):
        row.complete(flight)  # heard and let go: its number comes again
    for lane in range(len(fleet.replicas)):
        state = saved[_key(fleet, lane)]
        for name in _COUNTERS:
            setattr(fleet, name, int(state[name]))
        fleet.replicas[lane].frozen_then = json.loads(state.get("frozen", "{}"))  # states of earlier versions lack it
        for row in fleet.rows:
            if row.names:
                _load_row(row, row.lanes[lane], lane, state[f"row{row.index}"])
    fleet.steps_begun = fleet.steps
    fleet.loaded, fleet._begun = fleet.steps > 0, False  # before the first step nothing was agreed on yet


def _check(fleet: Fleet, saved: dict[str, Any]) -> None:
    if not isinstance(saved, dict) or "format" not in saved:
        kind = f"a dictionary of {', '.join(map(str, saved))[:100]}" if isinstance(saved, dict) else repr(saved)
        raise ValueError(f"a state is what fleet.state_dict() gives, not {kind}")
    if saved.get("format") != FORMAT:
        raise ValueError(f"this state has format {saved.get('format')}, thinwire reads format {FORMAT}")
    if saved["method"] != str(fleet.method):
        raise ValueError(
            f"the state was saved with another method:\n{saved['method']}\nnot\n{fleet.method}\n"
            "Build the fleet with that method, load, then fleet.switch(new method)"
        )
    missing = [key for key in (_key(fleet, i) for i in range(len(fleet.replicas))) if key not in saved]
    if (saved["workers"] != fleet.workers and not fleet.transport.elastic) or missing:
        lacking = f" and holds no {missing[0]}" if missing else ""
        raise ValueError(
            f"the state was saved by {saved['workers']} workers{lacking}; this fleet has {fleet.workers}. "
            "Start the same number, or load only model and optimizer and begin with new outer state"
        )
    for row in fleet.rows:
        _check_row(row, saved[_key(fleet, 0)].get(f"row{row.index}", {}).get("tensors", ""))


def _check_row(row: Row, saved: str) -> None:
    if saved != _tensors(row):
        theirs, mine = saved.split("; "), _tensors(row).split("; ")
        found = next(((a, b) for a, b in zip_longest(theirs, mine, fillvalue="") if a != b))
        raise ValueError(
            f"row {row.index} of the state holds {found[0] or 'nothing more'} where this fleet has "
            f"{found[1] or 'nothing more'}. Build model, optimizer and fragments as they were, "
            "or load only model and optimizer and begin with new outer state"
        )


def _load_row(row: Row, lane: Lane, index: int, saved: dict[str, Any]) -> None:
    row.launched, row.landed, row.equal_at = int(saved["launched"]), int(saved["landed"]), int(saved["equal_at"])
    row.weighed_from = int(saved["weighed_from"])
    lane.weighed, lane.counted = float(saved["weighed"]), float(saved["weight_landed"])
    if row.sync.view.kind == "grads":  # a step that failed after its gradients had met is made again
        row.launched = row.landed = row.sync.every.rounds_due(row.fleet.steps)
        row.weighed_from, lane.counted = row.sync.every.launch_step(row.launched), lane.weighed
    lane.unwell = bool(saved["unwell"])
    empty = saved["empty"].split(",")
    device = lane.live.device
    kept = {name: None if name in empty else value.to(device, copy=True) for name, value in saved["state"].items()}
    lane.keep(kept)
    slots = [saved[f"flight{i}"] for i in range(row.sync.every.in_flight)]
    flying = [slot for slot in slots if slot["number"]]
    if index == 0:
        row.flights.clear()
        row.flights.extend(Flight(int(slot["number"]), [], None, time.monotonic()) for slot in flying)
    for flight, slot in zip(row.flights, flying, strict=True):
        _load_flight(row, flight, slot)


def _load_flight(row: Row, flight: Flight, slot: dict[str, Any]) -> None:
    device, has = row.lanes[0].live.device, slot["has"].split(",")
    buffers: dict[str, Tensor | None] = {
        name: slot[name].to(device).clone() if name in has else None for name in ("mean", "own", "rest", "kept")
    }
    present = slot["present"].tolist()
    sent = Sent(buffers["own"], buffers["rest"], buffers["kept"], bool(slot["sick"]), float(slot["weighed"]), present)
    sent.unwell = bool(slot.get("unwell", False))  # states of earlier versions do not say
    flight.sent.append(sent)
    if slot["lost"]:
        flight.lost = AllSick(slot["lost"])  # it stopped the run that was saved, if it had to; not this one too
    else:
        mean, held = buffers["mean"], slot["held"].tolist()
        source = int(slot["source"]) if slot["source"] >= 0 else None
        assert mean is not None
        flight.answer = flight.answer or Answer(mean, [], None if all(held) else held, source)
        flight.answer.shares.append(float(slot["share"]))
