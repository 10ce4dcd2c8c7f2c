"""A coordinator and two workers of torchft, each a process of its own, for all tests that look at their ports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import free_port
from tests.elastic.garbage import listening, until
from tests.train.conftest import environment

MET = {"committed": True, "workers": 2}


class Workers:
    def __init__(self) -> None:
        self.port = free_port()
        self.lighthouse = f"127.0.0.1:{self.port}"
        coordinator = ["thinwire.cli", "coordinator", "--port", str(self.port), "--round-deadline", "5s"]
        self.processes = [self._start(coordinator)]
        self._line(self.processes[0])
        self.processes += [self._start(["tests.elastic.plain_worker", self.lighthouse, name]) for name in ("a", "b")]
        self.ports = [json.loads(self._line(process)) for process in self.processes[1:]]
        self.rounds: list[dict[str, Any]] = [{}, {}]
        for number in range(2):
            threading.Thread(target=self._follow, args=(number,), daemon=True).start()

    def go_on(self) -> None:
        """Both take part in two more rounds that are committed."""
        reached = max(round_.get("step", 0) for round_ in self.rounds)
        until(
            lambda: all(r.items() >= MET.items() and r["step"] > reached + 1 for r in self.rounds), 60, "no more rounds"
        )

    def port_of(self, name: str) -> int:
        if name == "lighthouse":
            return self.port
        if name != "gloo":
            return int(self.ports[0][name])
        return next(port for _, port in listening(self.processes[1].pid) if port not in self.ports[0].values())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def _follow(self, number: int) -> None:
        while line := self._line(self.processes[1 + number]):
            self.rounds[number] = json.loads(line)

    @staticmethod
    def _start(module: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *module]
        env = environment() | {"RUST_LOG": "error", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(command, env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()
