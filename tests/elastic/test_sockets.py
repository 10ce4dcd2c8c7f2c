"""docs/security.md is true: its table lists every listening socket, and its firewall closes them."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torchft")

from tests.elastic.garbage import listening  # noqa: E402
from tests.elastic.sockets import PAGE, by_ss, complaints, table  # noqa: E402
from thinwire.elastic.coordinator import Coordinator  # noqa: E402

pytestmark = pytest.mark.xdist_group("chaos")

LOOPBACK = "127.0.0.1"


def test_the_table_has_what_the_coordinator_opens(workers) -> None:
    workers.go_on()
    ports = {"lighthouse": workers.port, "page": workers.port + 1}
    assert complaints("coordinator", workers.processes[0].pid, LOOPBACK, ports) == []


@pytest.mark.parametrize("number", [0, 1])
def test_the_table_has_what_a_worker_opens(workers, number: int) -> None:
    workers.go_on()
    pid, ports = workers.processes[1 + number].pid, workers.ports[number]
    assert complaints("worker", pid, LOOPBACK, ports) == []
    assert complaints("worker", pid, LOOPBACK) == [], "also when it is not known which port is which"
    assert len(set(listening(pid))) > len(ports), "gloo's are among them"


def test_the_kernel_and_ss_agree(workers) -> None:
    workers.go_on()
    for process in workers.processes:
        assert by_ss(process.pid) in (None, set(listening(process.pid)))


def test_a_socket_that_is_not_in_the_table_is_found() -> None:
    """This process listens where no worker should."""
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.2", 0)):
        found = complaints("coordinator", os.getpid(), LOOPBACK)
    assert len(found) == 2 and "all interfaces" in found[0] and "127.0.0.2" in found[1]


def test_the_ports_in_the_table_are_the_defaults() -> None:
    port = inspect.signature(Coordinator).parameters["port"].default
    said = {row.socket: re.search(r"\((\d+)\)", row.port) for row in table() if row.process == "coordinator"}
    assert {name: int(found[1]) for name, found in said.items() if found} == {"lighthouse": port, "page": port + 1}


# -- the firewall ------------------------------------------------------------------------------------------------------


def _do(*command: str, **options) -> None:
    result = subprocess.run(command, capture_output=True, text=True, **options)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


def block(language: str, holding: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return next(text for text in found if holding in text)


class Machines:
    """A worker's machine and another, joined by one line: the fleet's network and two others, one of them IPv6."""

    ADDRESSES = ("10.77.0.{}/24", "10.88.0.{}/24", "fd00:77::{}/64")

    def __init__(self) -> None:
        self.names = [f"tw-wall-{os.getpid()}-{i}" for i in range(2)]

    def build(self) -> None:
        one, two = self.names
        for name in self.names:
            _do("ip", "netns", "add", name)
        _do("ip", "-n", one, "link", "add", "line0", "type", "veth", "peer", "name", "line0", "netns", two)
        for number, name in enumerate(self.names, start=1):
            for address in self.ADDRESSES:
                flags = ["nodad"] if ":" in address else []
                _do("ip", "-n", name, "address", "add", address.format(number), "dev", "line0", *flags)
            for device in ("lo", "line0"):
                _do("ip", "-n", name, "link", "set", device, "up")

    def inside(self, number: int, *command: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[number], *command)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


SERVE = """
import socket, sys
six = {"family": socket.AF_INET6, "dualstack_ipv6": True}
doors = [socket.create_server(("::", int(port)), **six) for port in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""

KNOCK = """
import socket, sys
for text in sys.argv[1:]:
    host, port = text.rsplit("-", 1)
    try:
        socket.create_connection((host, int(port)), timeout=0.7).close()
        print(1)
    except OSError:
        print(0)
"""
PORTS = (29510, 29511, 40000, 8080)


@pytest.fixture
def machines() -> Iterator[Machines]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    pair = Machines()
    try:
        pair.build()
    except OSError as error:
        pair.remove()
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield pair
    pair.remove()


def load(machines: Machines, kind: str) -> None:
    if shutil.which("nft" if kind == "nft" else "iptables") is None:
        pytest.skip(f"no {kind} here")
    try:
        if kind == "nft":
            _do(*machines.inside(0, "nft", "-f", "-"), input=block("nft", "table inet thinwire"))
        else:
            _do(*machines.inside(0, "sh", "-e", "-c", block("sh", "ip6tables")))
    except OSError as error:
        pytest.skip(f"{kind} is not to be had here: {error}")


@pytest.mark.parametrize("kind", ["nft", "iptables"])
def test_the_firewall_lets_the_fleet_in_and_nobody_else(machines: Machines, kind: str) -> None:
    serve = machines.inside(0, sys.executable, "-c", SERVE, *map(str, PORTS))
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        open_to_all = reached(machines)
        load(machines, kind)
        fleet, others, six = (address.format(1).split("/")[0] for address in Machines.ADDRESSES)
        assert all(open_to_all.values()), "the line works"
        expected = {(host, port): host == fleet or port == 8080 for host in (fleet, others, six) for port in PORTS}
        assert reached(machines) == expected
        server.communicate("")


def reached(machines: Machines) -> dict[tuple[str, int], bool]:
    """From the other machine, each address and port of the worker's."""
    hosts = [address.format(1).split("/")[0] for address in Machines.ADDRESSES]
    doors = [(host, port) for host in hosts for port in PORTS]
    knock = machines.inside(1, sys.executable, "-c", KNOCK, *(f"{host}-{port}" for host, port in doors))
    answers = subprocess.run(knock, capture_output=True, text=True, check=True).stdout.split()
    return {door: answer == "1" for door, answer in zip(doors, answers, strict=True)}
