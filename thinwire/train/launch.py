"""The modes of a run: one process, several that it starts itself, torchrun, and separate sites over one line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.train import place as places
from thinwire.train.config import Config
from thinwire.train.errors import UserError, file_line
from thinwire.train.run import Order, PeerGone, run

if TYPE_CHECKING:
    from thinwire.train.command import Join


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def in_one_process(config: Config, order: Order) -> dict[str, Any] | None:
    return run(config, places.alone(config), order)


def in_torchrun(config: Config, order: Order) -> None:
    try:
        place = places.among_processes(config)
        _share_folder(order)
        run(config, place, order)
    finally:
        _leave_group()


def as_site(config: Config, order: Order, address: str, worker: int) -> None:
    try:
        place = places.connected(config, address, worker)
        _share_folder(order)
        run(config, place, order)
    except tw.PeerLost as error:
        raise PeerGone(f"ended while setting up: {error}") from error
    finally:
        _leave_group()


def as_elastic(config: Config, order: Order, join: Join) -> None:
    """One worker of a fleet whose workers come and go."""
    place = places.elastic(config, join)
    from thinwire.elastic import RunFinished

    try:
        run(config, place, order)
    except RunFinished as error:
        print(f"thinwire: {error}")
    finally:
        place.transport.leave("ended")


def _share_folder(order: Order) -> None:
    """Processes that were started apart take the first one's folder, each on its own disk."""
    if dist.is_initialized():
        chosen = [str(order.folder)]
        dist.broadcast_object_list(chosen)
        order.folder = Path(chosen[0])
        order.folder.mkdir(parents=True, exist_ok=True)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def in_processes(config: Config, order: Order, count: int) -> None:
    """Start `count` processes, pass on signals, and say once what went wrong in any of them."""
    if config.workers % count:
        raise UserError(f"workers = {config.workers} cannot be shared out evenly over --processes {count}")
    context = multiprocessing.get_context("spawn")
    troubles, met = context.SimpleQueue(), context.Event()
    port = _free_port()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what a child has to say comes once, through `troubles`
    children = [
        context.Process(target=_child, args=(config, order, rank, count, port, troubles, met)) for rank in range(count)
    ]
    with _forwarding(children):
        for child in children:
            child.start()
        lost = _lost_among(children, met)
    if not troubles.empty():
        kind, text = troubles.get()
        raise {"user": UserError, "peer": PeerGone, "file": OSError}[kind](text)
    if lost:
        codes = ", ".join(f"process {i}: {child.exitcode}" for i, child in enumerate(children) if child in lost)
        raise PeerGone(f"a process ended with an error ({codes})")


def _lost_among(children: Sequence[BaseProcess], met: Any) -> list[BaseProcess]:
    """Wait until all children have ended. Returns those that ended badly by themselves.

    Once they have `met`, the others notice by themselves and save. Before, torch would have them wait for it.
    """
    alive, lost = list(children), list[BaseProcess]()
    while alive:
        wait([child.sentinel for child in alive])
        for child in alive:
            child.join(0)
        ended = [child for child in alive if child.exitcode is not None]  # asked once: more may end meanwhile
        lost += [child for child in ended if child.exitcode]
        alive = [child for child in alive if child not in ended]
        if lost and not met.is_set():
            _end(alive)
            return lost
    return lost


def _end(children: Sequence[BaseProcess]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        child.join()


def _child(config: Config, order: Order, rank: int, count: int, port: int, troubles: Any, met: Any) -> None:
    _end_with_the_parent()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        place = places.among_processes(config)
        met.set()
        run(config, place, order)
        _leave_group()
    except UserError as error:
        troubles.put(("user", str(error)))
        os._exit(2)  # others may be waiting in a collective: do not wait for them
    except PeerGone as error:
        troubles.put(("peer", str(error)))
        os._exit(1)
    except OSError as error:
        troubles.put(("file", file_line(error)))
        os._exit(1)


def _end_with_the_parent() -> None:
    """If it is killed, nobody sees this process any more, nor can stop it: it saves and ends as after SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _forwarding(children: Sequence[BaseProcess]) -> Iterator[None]:
    """SIGTERM goes on to the children; Ctrl-C reaches them by itself, as they share the terminal."""

    def forward(number: int, frame: Any) -> None:
        for child in children:
            if child.is_alive() and child.pid:
                os.kill(child.pid, signal.SIGTERM)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, forward)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_folder(out: Path | None, method: str) -> Path:
    """The folder of a new run: the one given, or the next free number under runs/."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror or error}") from error
        return out
    if int(os.environ.get("RANK", "0")):
        return Path("runs")  # the first process chooses for all
    number = 1
    while True:
        folder = Path("runs") / f"{method}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"cannot make {folder} ({error.strerror}): name another place with --out") from error
