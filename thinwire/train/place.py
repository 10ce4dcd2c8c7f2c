"""Where a process stands: which workers it hosts, how it meets the others, what lies inside its worker."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.train.config import Config
from thinwire.train.errors import UserError, as_user_error
from thinwire.train.notes import Notes

if TYPE_CHECKING:
    from thinwire.train.command import Join


PATIENCE = 3.0  # seconds of waiting until it is said for whom


@dataclass
class Place:
    """One process of a run."""

    hosted: list[int]  # numbers of the workers whose replicas live here
    device: torch.device
    transport: Any
    notes: Notes = field(default_factory=Notes)
    mesh: Any = None  # the processes inside this worker (DDP, FSDP2), where there are several
    separate: bool = False  # this site has a run folder of its own

    @property
    def writes(self) -> bool:
        """Whether this process shows progress and writes metrics."""
        return self.inner == 0 and (self.separate or self.notes.process == 0)

    @property
    def elastic(self) -> bool:
        return bool(self.transport.elastic)

    @property
    def inner(self) -> int:
        return self.mesh.get_local_rank() if self.mesh is not None else 0

    @property
    def inside(self) -> int:
        return self.mesh.size() if self.mesh is not None else 1


def device_of(config: Config, local: int = 0) -> torch.device:
    name = config.train.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"train.device = {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device = {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device = {name!r}: this machine has no CUDA device; use cpu")
    if device.type == "cuda" and ":" not in name:
        device = torch.device("cuda", local % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def alone(config: Config) -> Place:
    """All workers in this process; the exchange is a loop in memory."""
    inside = config.train.inside
    if inside != "none":
        raise UserError(f"train.inside = {inside!r} is for workers of several processes: start it with torchrun")
    return Place(list(range(config.workers)), device_of(config), tw.Local())


def among_processes(config: Config) -> Place:
    """One of the processes of `--processes` or torchrun, from the variables that both set."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = device_of(config, local)
    wait = timedelta(seconds=config.train.wait)
    if not dist.is_initialized():
        dist.init_process_group(_backend(device), timeout=wait)
    store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait)
    if config.train.inside != "none":
        return _node_as_worker(config, device, store)
    if config.workers % size:
        raise UserError(f"workers = {config.workers} cannot be shared out evenly over {size} processes")
    count = config.workers // size
    hosted = list(range(rank * count, (rank + 1) * count))
    notes = Notes(rank, size, _prefixed("run", store), config.train.wait, os.environ["MASTER_ADDR"])
    return Place(hosted, device, tw.Group(), notes)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _store(host: str, port: int, wait: timedelta) -> Any:
    """A connection of our own to the store at which the processes met."""
    return dist.TCPStore(host, port, is_master=False, timeout=wait)  # type: ignore[attr-defined]


def _prefixed(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _node_as_worker(config: Config, device: torch.device, store: Any) -> Place:
    """Each node's processes are one worker; process r of a node meets process r of the others."""
    size, local_size = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = size // local_size
    if config.workers != nodes:
        raise UserError(
            f"train.inside = {config.train.inside!r} makes each of {nodes} nodes a worker: set workers = {nodes}"
        )
    mesh = dist.device_mesh.init_device_mesh(device.type, (nodes, local_size), mesh_dim_names=("across", "inside"))
    node, inner = mesh.get_coordinate() or (0, 0)
    notes = Notes(node, nodes, _prefixed(f"run/{inner}", store), config.train.wait, os.environ["MASTER_ADDR"])
    transport = tw.Group(mesh["across"]) if nodes > 1 else tw.Local()
    return Place([node], device, transport, notes, mesh["inside"])


def connected(config: Config, address: str, worker: int) -> Place:
    """One site of several that share no disk and no process group, joined over one line."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--connect {address!r}: write HOST:PORT, the same on every machine")
    if not 0 <= worker < config.workers:
        raise UserError(f"--worker {worker}: workers are numbered from 0 to {config.workers - 1}")
    mesh, local, port_number = _own_mesh(config), int(os.environ.get("LOCAL_RANK", "0")), int(port)
    device = device_of(config, local)
    with as_user_error():
        transport = tw.Group.connect(address, worker=worker, workers=config.workers, timeout=config.train.wait)
    inner = mesh.get_local_rank() if mesh is not None else 0
    meeting = _store(host.strip("[]"), port_number, timedelta(seconds=config.train.wait))
    where = "" if inner else address  # one process of a site speaks
    _refuse_unequal_sites(meeting, worker, config, mesh.size() if mesh is not None else 1, where)
    store = _prefixed(f"run/{inner}", meeting)
    notes = Notes(worker, config.workers, store, config.train.wait, host.strip("[]"))
    return Place([worker], device, transport, notes, mesh, separate=True)


def _refuse_unequal_sites(store: Any, worker: int, config: Config, size: int, where: str) -> None:
    """The processes of a site tell those of the others what they lose and when they stop, one to one."""
    keys = [f"processes/{other}" for other in range(config.workers)]
    try:
        store.set(keys[worker], str(size))
        _wait_for_all(store, keys, config.train.wait, where)
        sizes = [int(store.get(key)) for key in keys]
    except tw.PeerLost:
        raise
    except RuntimeError as error:  # worker 0 hosts the store
        raise tw.PeerLost("worker 0 is gone", [0]) from error
    if len(set(sizes)) > 1:
        listed = ", ".join(f"{count} at worker {other}" for other, count in enumerate(sizes))
        raise UserError(f"the sites have different numbers of processes ({listed}): start the same number at each")


def _wait_for_all(store: Any, keys: list[str], wait: int, where: str) -> None:
    """Asked again and again: the store's own waiting would write warnings of its own when nobody comes."""
    began, silent = time.monotonic(), bool(where)
    while absent := [worker for worker, key in enumerate(keys) if not store.check([key])]:
        names, waited = " and ".join(f"worker {worker}" for worker in absent), time.monotonic() - began
        if waited > wait:
            cure = "start it, or run thinwire check between the machines"
            raise tw.PeerLost(f"{names} did not come in {wait} s: {cure}", absent)
        if silent and waited > PATIENCE:
            print(f"waiting for {names} at {where}", file=sys.stderr, flush=True)
            silent = False
        time.sleep(0.1)


def elastic(config: Config, join: Join) -> Place:
    """A worker that joins a coordinator's fleet, now or later, and keeps a run folder of its own."""
    try:
        from thinwire.elastic import Elastic
    except ModuleNotFoundError as error:
        raise UserError(f"--join: {error}") from error
    if config.train.inside != "none":
        raise UserError(
            f"--join: an elastic worker is one process, so train.inside = {config.train.inside!r} cannot be: "
            "leave it at 'none', or join workers of several processes with --connect, --worker and --workers"
        )
    with as_user_error():
        transport = Elastic(
            join.coordinator,
            min_workers=join.min_workers,
            secret_file=join.secret_file,
            address=join.address,
        )
    return Place([0], device_of(config), transport, separate=True)


def _own_mesh(config: Config) -> Any:
    """The processes of this site's own torchrun, if it has several."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if config.train.inside == "none":
        raise UserError("several processes at one site are one worker: set train.inside = 'ddp' or 'fsdp'")
    device = device_of(config, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_backend(device))
    return dist.device_mesh.init_device_mesh(device.type, (size,), mesh_dim_names=("inside",))
