"""Workers on shaped lines: one network namespace each, joined by a bridge, shaped both ways by `tc tbf`. Needs root.

    with Network(4, up=1.25e6) as network:
        processes = [network.start(worker, [sys.executable, "train.py"]) for worker in range(4)]

Everything is removed at the end. Nothing leaves the machine: the namespaces reach only each other.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

_BURST_SECONDS = 0.01  # tokens a full bucket holds; a short one keeps short messages honest
_QUEUE = "50ms"  # what a modem holds back; with a far longer one TCP both ways at once loses a quarter of the line


class Network:
    """`workers` namespaces with the addresses 10.77.0.1, ...; rates are bytes per second, None is unshaped."""

    def __init__(
        self, workers: int, up: float | None = None, down: float | None = None, name: str = "thinwire"
    ) -> None:
        if os.geteuid() != 0:
            raise SystemExit("network namespaces need root: run this with sudo")
        self.workers, self.name = workers, f"{name}{os.getpid()}"
        self.up, self.down = up, down if down is not None else up

    def address(self, worker: int) -> str:
        return f"10.77.0.{worker + 1}"

    def namespace(self, worker: int | str) -> str:
        return f"{self.name}-{worker}"

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for space in ("hub", *range(self.workers)):  # the veth pairs and the bridge go with them
            subprocess.run(["ip", "netns", "del", self.namespace(space)], stderr=subprocess.DEVNULL, check=False)

    def _build(self) -> None:
        hub = self.namespace("hub")
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "hub", "up")
        for worker in range(self.workers):
            self._join(worker, hub)
        self.shape(self.up, self.down)

    def _join(self, worker: int, hub: str) -> None:
        space, port = self.namespace(worker), f"port{worker}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", hub)
        _run("ip", "-n", space, "addr", "add", f"{self.address(worker)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", hub, "link", "set", port, "master", "hub")
        _run("ip", "-n", hub, "link", "set", port, "up")

    def shape(self, up: float | None, down: float | None) -> None:
        """What a worker sends is shaped where it leaves the worker, what it receives where it leaves the hub."""
        for worker in range(self.workers):
            _shape(self.namespace(worker), "eth0", up)
            _shape(self.namespace("hub"), f"port{worker}", down)

    def start(self, worker: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(["ip", "netns", "exec", self.namespace(worker), *command], **options)

    def moved(self, worker: int) -> tuple[int, int]:
        """Bytes sent and received by a worker, as the kernel counts them."""
        read = ["cat", *(f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx"))]
        out = subprocess.run(["ip", "netns", "exec", self.namespace(worker), *read], capture_output=True, check=True)
        sent, received = out.stdout.split()
        return int(sent), int(received)


def _shape(space: str, device: str, rate: float | None) -> None:
    if rate is None:
        subprocess.run(
            ["tc", "-n", space, "qdisc", "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False
        )
        return
    burst = max(16_000, int(rate * _BURST_SECONDS))
    shaped = ["tbf", "rate", f"{int(rate * 8)}bit", "burst", str(burst), "latency", _QUEUE]
    _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shaped)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
