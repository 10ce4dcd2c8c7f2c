"""One rank of a worker leads: it alone runs the engine, on whole tensors, and the other ranks lend it their parts.

The lead tells them by a small broadcast what all are to do next: gather these tensors, take these values. So rules,
codecs and rows know nothing of shards. A public call of the fleet ends with a report, from which the others take what
a user may ask them for, or the error to raise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .events import Event
from .live import Live, add_scaled
from .replica import Replica, View, local, model, part, sharded_as, whole
from .site import site_among
from .transport import PeerLost

if TYPE_CHECKING:
    from .fleet import Fleet

PATIENCE = 7 * 24 * 3600.0  # the lead decides what is lost; when it dies, its connections break at once
MIRRORED = ("steps", "steps_begun", "bytes_sent", "wire_sent", "wire_received", "loaded", "_begun")


@dataclass(frozen=True)
class Task:
    """What every rank of the worker is to do with its parts of some tensors; `numbers` has one for each."""

    verb: str
    lane: int
    view: View
    names: Sequence[str]
    numbers: Sequence[float] = ()


@dataclass(frozen=True)
class Report:
    """How a call of the lead's ended, and where its fleet stands."""

    error: Exception | None
    led: bool
    place: tuple[int, int]
    facts: dict[str, Any]
    clock: dict[str, Any]
    events: list[Event]


class Line:
    """Between the lead of an island and the ranks that follow it; each rank has its end."""

    def __init__(self, ranks: Sequence[int], groups: Sequence[Any], replicas: Sequence[Replica]) -> None:
        site = site_among(ranks, PATIENCE)
        self.channel = site.gloo("inside")
        self.leads = site.rank == 0
        self.groups, self.replicas = groups, list(replicas)
        self.busy = False  # within a call of the lead's
        self.told = 0  # events reported so far

    def reduce(self, values: Sequence[float], how: Any) -> list[float]:
        """One number each, put together over all ranks of the worker."""
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self.channel.allreduce([tensor], options).wait()
        return tensor.tolist()

    # -- calls -----------------------------------------------------------------------------------------------------

    def conduct(self, fleet: Fleet, call: Callable[[], Any]) -> Any:
        """Make the call on the lead; elsewhere, what it hands out."""
        if self.busy:
            return call()
        return self._lead(fleet, call) if self.leads else self._follow(fleet)

    def _lead(self, fleet: Fleet, call: Callable[[], Any]) -> Any:
        self.busy = True
        try:
            answer = call()
        except Exception as error:
            self._say(self._report(fleet, error))
            raise
        finally:
            self.busy = False
        self._say(self._report(fleet, None))
        return answer

    def _follow(self, fleet: Fleet) -> dict[str, Tensor]:
        handed: dict[str, Tensor] = {}
        while isinstance(heard := self._hear(), Task):
            handed.update(self._perform(heard))
        self._take_over(fleet, heard)
        if heard.error is not None:
            raise heard.error
        return {name: handed[name] for name in model.table(self.replicas[0]) if name in handed}  # as the lead has them

    def _say(self, what: Task | Report) -> None:
        blob = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        self._from_lead(torch.tensor([blob.numel()], device="cpu"))
        self._from_lead(blob)

    def _hear(self) -> Task | Report:
        size = int(self._from_lead(torch.zeros(1, dtype=torch.int64, device="cpu")))
        return pickle.loads(bytes(self._from_lead(torch.empty(size, dtype=torch.uint8, device="cpu")).numpy()))

    def _from_lead(self, tensor: Tensor) -> Tensor:
        self.channel.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    def _report(self, fleet: Fleet, error: Exception | None) -> Report:
        known = error if error is None or isinstance(error, (PeerLost, ValueError)) else _described(error)
        total = sum(fleet.events.counts.values())
        fresh = list(fleet.events[-(total - self.told) :]) if total > self.told else []
        self.told = total
        facts = {name: getattr(fleet, name) for name in MIRRORED}
        place = (fleet.transport.worker, fleet.transport.workers)
        return Report(known, fleet.island.led, place, facts, vars(fleet.clock), fresh)

    def _take_over(self, fleet: Fleet, report: Report) -> None:
        fleet.island.led = report.led
        fleet.transport.worker, fleet.transport.workers = report.place
        vars(fleet).update(report.facts)
        vars(fleet.clock).update(report.clock)
        for event in report.events:
            fleet.events.add(event.kind, event.step, event.text, event.row, event.round, event.workers)

    # -- what the lead asks for ------------------------------------------------------------------------------------

    def order(self, verb: str, live: Live, numbers: Sequence[float] = ()) -> Task:
        """Tell the others; a view's own filter stays here, the names travel."""
        view = View(live.view.kind, live.view.states)
        task = Task(verb, self.replicas.index(live.replica), view, live.names, numbers)
        self._say(task)
        return task

    def read(self, live: Live) -> Iterator[Tensor | None]:
        """The whole tensors, gathered one by one; None where the lead has none."""
        present = live.present()
        gathered = self._gathered(self.order("read", live, present))
        for there in present:
            yield next(gathered) if there else None
        assert next(gathered, None) is None

    def write(self, live: Live, values: Sequence[Tensor], chosen: Sequence[bool]) -> None:
        """Each rank takes its parts of the chosen values."""
        self._write(self.order("write", live, chosen), values)

    def add(self, live: Live, values: Sequence[Tensor], scales: Sequence[float]) -> None:
        """Each rank adds its parts of the values, scaled."""
        there = [scale * present for scale, present in zip(scales, live.present(), strict=True)]
        self._add(self.order("add", live, there), values)

    def hand_out(self, replica: Replica, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
        """New tensors of these values on every rank, sharded as the model's own."""
        return self._hand_out(self._tell("hand_out", replica, names), values)

    def copies(self, replica: Replica, names: Sequence[str]) -> dict[str, Tensor]:
        """New tensors of the values that the model has."""
        return self._copies(self._tell("copies", replica, names))

    def _tell(self, verb: str, replica: Replica, names: Sequence[str]) -> Task:
        task = Task(verb, self.replicas.index(replica), model, list(names), [True] * len(names))
        self._say(task)
        return task

    def cure(self, replica: Replica) -> set[str]:
        """Start anew what is not finite of the optimizer's state on any rank; whose it was."""
        self._tell("cure", replica, ())
        return self.cured(replica)

    def cured(self, replica: Replica) -> set[str]:
        """The same, where every rank runs the engine."""
        names = list(replica.trainable)
        sick = self.reduce([not replica.has_finite_state(name) for name in names], dist.ReduceOp.MAX)
        ill = [name for name, bad in zip(names, sick, strict=True) if bad]
        replica.restart_states(ill)
        return set(ill)

    # -- on every rank ---------------------------------------------------------------------------------------------

    def _perform(self, task: Task) -> dict[str, Tensor]:
        replica = self.replicas[task.lane]
        if task.verb == "read":
            for _ in self._gathered(task):
                pass
        elif task.verb == "write":
            self._write(task, None)
        elif task.verb == "add":
            self._add(task, None)
        elif task.verb == "cure":
            self.cured(replica)
        elif task.verb == "drop_gradients":
            replica.drop_gradients()
        elif task.verb == "restart_states":
            replica.restart_states(task.names)
        elif task.verb == "set_steps":
            replica.set_steps(task.names, task.numbers)
        else:
            return self._copies(task) if task.verb == "copies" else self._hand_out(task, None)
        return {}

    def _parts(self, task: Task) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """The wanted tensors: their place in the task, an entry that is laid out like them, this rank's part."""
        replica = self.replicas[task.lane]
        table = task.view.table(replica)
        for i, (name, wanted) in enumerate(zip(task.names, task.numbers, strict=True)):
            if wanted:
                yield i, table[name], task.view.tensor(replica, name, table[name])

    def _gathered(self, task: Task) -> Iterator[Tensor]:
        for _, entry, piece in self._parts(task):
            yield whole(entry, torch.zeros_like(local(entry)) if piece is None else piece)

    def _spread(self, task: Task, values: Sequence[Tensor] | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """The same with each rank's part of the lead's values: (place, part of the value, part of the tensor)."""
        for i, entry, piece in self._parts(task):
            if values is not None:
                full = values[i]
            else:
                full = torch.empty(entry.shape, dtype=torch.float32, device=entry.device)
            yield i, part(entry, self._broadcast(full)), piece

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """The lead's values, on every rank: along each dimension of the mesh in turn, from its first rank."""
        tensor = tensor.contiguous()
        for group in self.groups if tensor.numel() else ():
            dist.broadcast(tensor, group=group, group_src=0)
        return tensor

    def _write(self, task: Task, values: Sequence[Tensor] | None) -> None:
        if task.view.kind == "grads":
            self.replicas[task.lane].match_gradients(task.names, task.numbers)
        for _, value, piece in self._spread(task, values):
            if piece is not None:
                piece.copy_(value)

    def _add(self, task: Task, values: Sequence[Tensor] | None) -> None:
        for i, value, piece in self._spread(task, values):
            if piece is not None:
                add_scaled(piece, value, task.numbers[i])

    def _hand_out(self, task: Task, values: Sequence[Tensor] | None) -> dict[str, Tensor]:
        handed = {}
        for i, entry, _ in self._parts(task):
            full = torch.empty(entry.shape, dtype=entry.dtype, device=entry.device)
            if values is not None:
                full.copy_(values[i])
            handed[task.names[i]] = sharded_as(entry, part(entry, self._broadcast(full)).clone())
        return handed

    def _copies(self, task: Task) -> dict[str, Tensor]:
        return {task.names[i]: sharded_as(entry, local(entry.detach()).clone()) for i, entry, _ in self._parts(task)}


def _described(error: Exception) -> RuntimeError:
    return RuntimeError(f"the lead of this worker failed: {type(error).__name__}: {error}")
