"""What the callbacks of all training frameworks share."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..calls import led
from ..fleet import Fleet
from ..group import Group
from ..header import checksum
from ..replica import local
from ..transport import Transport


def shares_the_line(transport: Transport | None, processes: int) -> bool:
    """Whether the workers are processes of the framework's own world, so that its collectives cross the line too."""
    if processes == 1 or (transport is not None and not isinstance(transport, Group)):
        return False
    site = transport._site if transport is not None else None
    joined_by_connect = site is not None and site.parent is None
    return not joined_by_connect


def refuse_shared_world(framework: str, settings: Sequence[str]) -> None:
    """Name each setting that would cross the line at every step, and say what to do instead."""
    raise ValueError(
        f"all workers are in one torchrun world, where {framework} itself crosses the line at every step: "
        f"{', '.join(settings)}. Start one torchrun for each worker, and join them with "
        "transport=tw.Group.connect(HOST:PORT, worker=i, workers=n)"
    )


@led
def refuse_shared_folder(fleet: Fleet, folder: str | None) -> None:
    """Checkpoints hold each worker's own weights: two workers must not write to one folder. Collective."""
    if fleet.transport.elastic:  # workers come and go: there is no moment at which all are here
        return
    place = f"{socket.gethostname()}:{os.path.realpath(folder)}" if folder else ""
    everybody = [blob.decode() for blob in fleet.transport.talk([place.encode()])]
    if place and everybody.count(place) > 1:
        raise ValueError(f"two workers would write their checkpoints to {folder}: give each worker a folder of its own")


@led
def refuse_unequal_plans(fleet: Fleet, plan: Mapping[str, Any]) -> None:
    """All workers take the same steps and evaluate after the same ones: said now, not after hours. Collective."""
    if fleet.transport.elastic:  # who joins late has fewer steps to take
        return
    everybody = [json.loads(blob) for blob in fleet.transport.talk([json.dumps(plan).encode()])]
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        values = [theirs.get(name) for theirs in everybody]
        if any(value != values[0] for value in values):
            said = ", ".join(f"worker {worker} has {value}" for worker, value in enumerate(values))
            raise ValueError(
                f"{name}: {said}. Every worker must take the same number of steps and evaluate after the same ones: "
                "give all the same settings and equally much data, or a number of steps"
            )


def warn_if_alone(fleet: Fleet, transport: Transport | None) -> None:
    """Nobody was asked for, and nobody is here: most likely a transport was forgotten."""
    if transport is None and fleet.workers == 1:
        warnings.warn(
            "this worker trains alone: to join others, pass transport=tw.Group.connect(HOST:PORT, worker=i, workers=n)",
            stacklevel=2,
        )


def weights_checksum(fleet: Fleet) -> int:
    """Of the hosted replica's trainable parameters: ties a fleet's state to the weights it was saved with."""
    return sum(checksum(local(parameter.detach())) for parameter in fleet.replicas[0].trainable.values())


class Meter:
    """What a training log should show of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.time, self.waited = time.monotonic(), fleet.clock.waited

    def read(self) -> dict[str, float]:
        """Bytes sent so far, and the share of the time since the last reading that was spent waiting for peers."""
        now, waited = time.monotonic(), self.fleet.clock.waited
        share = (waited - self.waited) / max(now - self.time, 1e-9)
        self.time, self.waited = now, waited
        return {"bytes_sent": float(self.fleet.bytes_sent), "waiting_share": share}


class FirstBatch:
    """Warns when two workers train on the same data. Compared once, in a few bytes."""

    def __init__(self) -> None:
        self.digest: int | None = None
        self.compared = False

    def note(self, batch: Any) -> None:
        """Remember the first batch; one without tensors says nothing."""
        if self.digest is None:
            tensors = list(_tensors_in(batch))
            self.digest = _digest(tensors) if tensors else 0

    def compare(self, fleet: Fleet) -> None:
        """Before the first optimizer step. Collective."""
        if not self.compared:
            self.compared = True
            fleet._open()
            _warn_of_twins(fleet, _one_for_all_ranks(fleet, self.digest or 0))


def _one_for_all_ranks(fleet: Fleet, digest: int) -> int:
    """The ranks of one worker have batches of their own: the least number stands for all."""
    line = fleet.island.line
    return digest if line is None else int(line.reduce([digest], dist.ReduceOp.MIN)[0])


@led
def _warn_of_twins(fleet: Fleet, digest: int) -> None:
    if fleet.transport.elastic:
        return
    mine = str(digest).encode()
    twins = [worker for worker, theirs in enumerate(fleet.transport.talk([mine])) if digest and theirs == mine]
    if len(twins) > 1:
        warnings.warn(
            f"workers {', '.join(map(str, twins))} began with the same batch: give each worker its own part of the "
            "data, or its own seed",
            stacklevel=2,
        )


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)


def _digest(tensors: list[Tensor]) -> int:
    """48 bits, which a double carries exactly."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {checksum(tensor.detach())}".encode())
    return int.from_bytes(found.digest()[:6], "little")
