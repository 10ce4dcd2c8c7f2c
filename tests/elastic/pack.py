"""Elastic workers as processes: start them, read what they tell, and do them harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Line = dict[str, Any]


class Member:
    """One worker's process, and the lines it has told so far."""

    def __init__(self, coordinator: str, method: str, steps: int, name: str, *more: str) -> None:
        command = [sys.executable, "-m", "tests.elastic.member", coordinator, method, str(steps), "--name", name, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.name, self.lines = name, list[Line]()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append({**json.loads(text), "at": time.monotonic()})

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def wait_for(self, wanted: Callable[[Line], bool], seconds: float = 60) -> Line:
        """The first line of that kind, waited for."""
        deadline, seen = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            fresh, seen = self.lines[seen:], len(self.lines)
            for line in fresh:
                if wanted(line):
                    return line
            if self.process.poll() is not None and seen == len(self.lines):
                self._join()
                if seen == len(self.lines):
                    break
            time.sleep(0.02)
        raise AssertionError(f"{self.name}: no such line; last {self.lines[-2:]}; {''.join(self.errors[-20:])}")

    def step(self, number: int, seconds: float = 60) -> Line:
        """Its first line at that step or later."""
        return self.wait_for(lambda line: line["kind"] == "step" and line["step"] >= number, seconds)

    def at(self, step: int) -> Line:
        return next(line for line in self.lines if line["kind"] == "step" and line["step"] == step)

    def finished(self, seconds: float = 90) -> Line:
        line = self.wait_for(lambda line: line["kind"] == "finished", seconds)
        self.process.wait(timeout=10)
        return line

    def events(self, kind: str) -> list[str]:
        said = [text for line in self.lines if line["kind"] == "step" for text in line["events"]]
        return [text for text in said if text.startswith(f"{kind}: ")]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def died(self, seconds: float = 60) -> None:
        self.process.wait(timeout=seconds)
        self._join()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(timeout=5)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
