"""Elastic workers as processes: start them, read what they tell, and do them harm."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import FORKS

ROOT = Path(__file__).resolve().parents[2]
Line = dict[str, Any]


def _enter(words: list[str], said: str, errors: str, namespace: str | None) -> None:
    """In the child: what it prints goes to two files, its connections through a network namespace."""
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0
    for path, stream in ((said, sys.stdout), (errors, sys.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    from tests.elastic.member import main

    main(words)


class Member:
    """One worker's process, and the lines it has told so far."""

    def __init__(
        self, coordinator: str, method: str, steps: int, name: str, *more: str, namespace: str | None = None
    ) -> None:
        folder = Path(tempfile.mkdtemp(prefix="member-"))
        self.name, self.lines, self._read_to = name, list[Line](), 0
        self._said, self._errors = folder / "said", folder / "errors"
        words = [coordinator, method, str(steps), "--name", name, *more]
        self.process = FORKS.Process(
            target=_enter, args=(words, str(self._said), str(self._errors), namespace), daemon=True
        )
        self.process.start()

    def _read(self) -> None:
        """Take in the whole lines that have come since."""
        text = self._said.read_bytes()[self._read_to :] if self._said.exists() else b""
        whole = text.rfind(b"\n") + 1
        self._read_to += whole
        for line in text[:whole].splitlines():
            self.lines.append({**json.loads(line), "at": time.monotonic()})

    @property
    def errors(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    def wait_for(self, wanted: Callable[[Line], bool], seconds: float = 60) -> Line:
        """The first line of that kind, waited for."""
        deadline, seen = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            alive = self.process.is_alive()
            self._read()
            for line in self.lines[seen:]:
                if wanted(line):
                    return line
            seen = len(self.lines)
            if not alive:
                break
            time.sleep(0.02)
        raise AssertionError(f"{self.name}: no such line; last {self.lines[-2:]}; {self.errors[-2000:]}")

    def step(self, number: int, seconds: float = 60) -> Line:
        """Its first line at that step or later."""
        return self.wait_for(lambda line: line["kind"] == "step" and line["step"] >= number, seconds)

    def at(self, step: int) -> Line:
        return next(line for line in self.lines if line["kind"] == "step" and line["step"] == step)

    def finished(self, seconds: float = 90) -> Line:
        line = self.wait_for(lambda line: line["kind"] == "finished", seconds)
        self.process.join(timeout=10)
        return line

    def events(self, kind: str) -> list[str]:
        said = [text for line in self.lines if line["kind"] == "step" for text in line["events"]]
        return [text for text in said if text.startswith(f"{kind}: ")]

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def died(self, seconds: float = 60) -> int:
        """Its exit status, waited for."""
        self.process.join(timeout=seconds)
        self._read()
        assert self.process.exitcode is not None, f"{self.name} is still alive"
        return self.process.exitcode

    def end(self) -> None:
        self.process.kill()
        self.process.join(timeout=10)
        shutil.rmtree(self._said.parent, ignore_errors=True)
