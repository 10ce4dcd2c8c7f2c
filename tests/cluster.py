"""Real processes for tests, forked from one that has imported torch: they cost little, and are ended soon.

Groups that are never closed leave threads behind that wake a hundred times a second, so no cluster lives long.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["thinwire", "torch.distributed.fsdp", "tests.cluster", "tests.elastic.member"])


def free_port() -> int:
    """The first of four free ports in a row, below those that the system gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 29_000, 4)
        if all(_is_free(port + i) for i in range(4)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Cluster:
    """`run(function, world, *args)` calls `function(rank, *args)` in `world` processes joined by gloo."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 20, join: bool = True) -> list:
        """The results in rank order; an exception of a worker comes back as itself, raised here."""
        port = free_port() if join else None
        for pipe in self.pipes[:world]:
            pipe.send((function, args, world, port, timeout))
        answers = [self._answer(pipe, timeout) for pipe in self.pipes[:world]]
        for outcome in answers:
            if isinstance(outcome, Failure):
                raise AssertionError(outcome.text)
        return answers

    def _answer(self, pipe: Any, timeout: float) -> Any:
        if not pipe.poll(timeout + 40):
            self.close()
            self._start()  # the next test starts afresh
            raise TimeoutError("a worker did not answer")
        return pipe.recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _serve(pipe: Any, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        function, args, world, port, timeout = pipe.recv()
        try:
            if port is not None:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                limit = datetime.timedelta(seconds=timeout)
                dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
            result = function(rank, *args)
        except Exception:
            result = Failure(f"rank {rank}:\n{traceback.format_exc()}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(result)
