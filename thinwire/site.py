"""Where this process stands among those it exchanges with, and the connections it opens to them."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from .meeting import Meeting
from .transport import PeerLost
from .waiting import in_time

_ANSWER = 5.0  # seconds in which the store answers, if its host lives
_instances: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # of each default group


@dataclass
class Site:
    """A rank among `size` processes with a store of their own; `address` is the interface to use, None for torch's."""

    store: Any
    rank: int
    size: int
    timeout: float
    address: str | None = None
    parent: Any = None
    meeting: Meeting | None = None

    def gloo(self, name: str) -> Any:
        """A gloo group apart from all others."""
        if self.meeting is not None:
            self.meeting.gather()
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=self.timeout)
        options._devices = [_device(name, self.address, os.environ.get("GLOO_SOCKET_IFNAME"), os.getpid())]
        place = c10d.PrefixStore(name, self.store), self.rank, self.size
        try:  # gloo has a limit of its own, but asks the store without any
            return in_time(lambda: dist.ProcessGroupGloo(*place, options), self.timeout + _ANSWER)
        except TimeoutError as error:
            raise RuntimeError(f"{error} from a process, or from the store that they meet in") from error

    def nccl(self) -> Any | None:
        """An NCCL group apart from all others, where the parent group speaks NCCL."""
        if self.parent is None or "nccl" not in dist.get_backend_config(self.parent):
            return None
        return dist.new_group(
            dist.get_process_group_ranks(self.parent),
            timeout=datetime.timedelta(seconds=self.timeout),
            backend="nccl",
            use_local_synchronization=True,
        )


@cache
def _device(name: str, address: str | None, interface: str | None, process: int) -> Any:
    """gloo's end of connections of one kind: one for all groups of a process, as each has a thread that never rests."""
    if address is not None:
        return dist.ProcessGroupGloo.create_device(hostname=address)
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()


def ranks_of(group_or_mesh: Any) -> tuple[int, ...]:
    """The ranks of a process group, of one dimension of a mesh, or of the default group; none if it is not in it."""
    if not dist.is_initialized() or group_or_mesh is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    return tuple(dist.get_process_group_ranks(_group(group_or_mesh)))


def _group(group_or_mesh: Any) -> Any:
    if isinstance(group_or_mesh, DeviceMesh) and group_or_mesh.ndim != 1:
        raise ValueError('pass one dimension of the mesh, as in tw.Group(mesh["workers"])')
    return group_or_mesh.get_group() if isinstance(group_or_mesh, DeviceMesh) else group_or_mesh or dist.group.WORLD


def site_of_group(group_or_mesh: Any) -> Site:
    """The place of this process in a process group, in one dimension of a mesh, or in the default group."""
    if not dist.is_initialized():
        raise ValueError(
            "no process group: start with torchrun, call torch.distributed.init_process_group(), "
            "or join machines with tw.Group.connect(HOST:PORT, worker=i, workers=n)"
        )
    ranks = ranks_of(group_or_mesh)
    if dist.get_rank() not in ranks:
        raise ValueError(f"process {dist.get_rank()} is in no island, and not in the group that joins the workers")
    group = _group(group_or_mesh)
    return replace(site_among(ranks, _timeout_of(group)), parent=group)


def site_among(ranks: Sequence[int], timeout: float) -> Site:
    """The place of this process among these ranks of the default group, which meet in its store."""
    key = tuple(ranks)
    instances = _instances.setdefault(dist.group.WORLD, Counter())
    instances[key] += 1
    store = c10d.PrefixStore(f"thinwire/{'-'.join(map(str, ranks))}/{instances[key]}", c10d._get_default_store())
    return Site(store, key.index(dist.get_rank()), len(key), timeout, _way_to_master())


def _timeout_of(group: Any) -> float:
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return group._get_backend(device).options._timeout.total_seconds()


def _way_to_master() -> str | None:
    """The address of the interface that reaches the master: a host's own name may resolve to another one."""
    master = os.environ.get("MASTER_ADDR")
    return own_address(master) if master and not os.environ.get("GLOO_SOCKET_IFNAME") else None


def own_address(host: str, port: int = 9) -> str:
    """The address this machine uses to reach `host`. Sends nothing.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"no way to {host}: {error}. Check the name, and that a network interface is up") from error


def likely_address() -> str:
    """The address by which others most likely reach this machine: that of its default route."""
    try:
        return own_address("192.0.2.1")  # a documentation address
    except ValueError:
        return socket.gethostname()


def meet_at(address: str, worker: int, workers: int, timeout: float) -> Site:
    """The place of this process when worker 0 of every site meets at `address`: process r meets the other r-th ones."""
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers must be a whole number, at least 1, not {workers!r}")
    if type(worker) is not int or not 0 <= worker < workers:
        raise ValueError(f"worker must be a whole number from 0 to {workers - 1}, not {worker!r}")
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    host = host.strip("[]")
    inner = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    mine = own_address(host, int(port))
    listens = worker == 0 and inner == 0
    store = c10d.PrefixStore(f"thinwire/{inner}", _store_at(host, int(port), listens, timeout))
    return Site(store, worker, workers, timeout, mine, meeting=Meeting(store, address, worker, workers, timeout))


def _store_at(host: str, port: int, listens: bool, timeout: float) -> Any:
    """The store that the first process of worker 0 hosts."""
    if not listens:
        _wait_for(host, port, timeout)
    wait = datetime.timedelta(seconds=timeout)

    def opened() -> Any:
        return dist.TCPStore(host, port, None, listens, timeout=wait, wait_for_workers=False)  # type: ignore[attr-defined]

    try:
        return in_time(opened, timeout)
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0]
        if listens:
            raise ValueError(
                f"worker 0 cannot listen at {host}:{port} ({reason}): choose another port, or end what uses it; "
                "the address must be this machine's, and only one worker is worker 0"
            ) from error
        why = f"worker 0 went away at {host}:{port}, or something else listens there ({reason}): check the address"
        raise PeerLost(why, [0]) from error


def _wait_for(host: str, port: int, timeout: float) -> None:
    """Until worker 0 listens: torch's own waiting fills the terminal with its stack when nobody comes."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=min(5.0, timeout)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                cure = f"start worker 0 there, and open TCP {port} in its firewall"
                text = f"worker 0 did not answer at {host}:{port} in {timeout:g} s ({error}): {cure}"
                raise PeerLost(text, [0]) from error
        time.sleep(0.2)
