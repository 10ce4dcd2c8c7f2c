"""`thinwire check`, between processes on one machine and between two machines made of network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.train.conftest import Process, ended
from thinwire.train.check import _obey, _speed_out, _way_back
from thinwire.train.line import Broken, Line, drain, pump, versions

PORT = 29417


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(start: Callable[..., Process], port: int, **options: object) -> Process:
    process = start("check", "--listen", port, **options)
    assert process.stdout is not None
    assert f"port {port}" in process.stdout.readline()
    return process


def test_both_sides_tell_what_they_found(start, thinwire) -> None:
    port = free_port()
    other = listening(start, port)
    here = thinwire("check", f"127.0.0.1:{port}").stdout
    there = ended(other).stdout
    for text in (here, there):
        for label in ("interface   lo", "there       connects", "back        connects", "latency", "bit/s", "torch"):
            assert label in text
    out, into = (re.search(r"out (\S+ \S+), in (\S+ \S+)", text) for text in (here, there))
    assert out and into and out[1] == into[2], "what goes out here comes in there"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_in_brackets(start, thinwire) -> None:
    port = free_port()
    other = listening(start, port)
    assert f"::1 -> ::1:{port}" in thinwire("check", f"[::1]:{port}").stdout
    assert "::1 <- ::1" in ended(other).stdout


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("127.0.0.1:{port}", 1, "thinwire check --listen {port}"),
        ("no-such-host.invalid:{port}", 1, "use an IP address"),
        ("127.0.0.1", 2, "HOST:PORT"),
    ],
)
def test_a_failure_is_one_line_with_the_cure(thinwire, address: str, status: int, said: str) -> None:
    port = free_port()
    result = thinwire("check", address.format(port=port), status=status)
    assert said.format(port=port) in result.stderr and len(result.stderr.splitlines()) == 1 and not result.stdout


@pytest.mark.parametrize("measure", [pump, drain], ids=["sending", "receiving"])
def test_a_line_that_breaks_in_the_middle_of_a_measurement_is_said(measure: Callable[[Line], object]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as link:
        peer = door.accept()[0]
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a killed process
        peer.close()
        with pytest.raises(Broken, match="the line to there broke .*run the check again"):
            measure(Line(link, "there"))


@pytest.mark.parametrize("greeting", [b"220 mail\n", b"220\n"])
def test_something_else_that_listens_is_told_apart(thinwire, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(120)
        answer = threading.Thread(target=lambda: door.accept()[0].sendall(greeting))
        answer.start()
        result = thinwire("check", f"127.0.0.1:{door.getsockname()[1]}", status=1)
        answer.join()
    assert "is not `thinwire check`" in result.stderr and len(result.stderr.splitlines()) == 1


HELLO = json.dumps({"do": "hello", **versions()})


@pytest.mark.parametrize(
    "said",
    [
        ['{"hello": 1}'],
        ["[]"],
        ["GET / HTTP/1.1"],
        ['{"do": 7}'],
        [HELLO, '{"do": "dance"}'],
        [HELLO, '{"do": "connect back"}'],
        [HELLO, '{"do": "connect back", "host": "127.0.0.1", "port": "80"}'],
        [HELLO, '{"do": "done"}'],
        [HELLO, '{"do": "done", "latency": 0.1, "out": null, "into": 1.0}'],
    ],
)
def test_something_else_that_calls_is_told_apart(said: list[str]) -> None:
    with connected() as (link, caller):
        caller.sendall("".join(f"{line}\n" for line in said).encode())
        with pytest.raises(Broken, match="caller is not `thinwire check`, or it ended: start it anew on both sides"):
            _obey(Line(link, "caller"))


def test_another_version_that_calls_is_told_both_versions() -> None:
    with connected() as (link, caller):
        caller.sendall(b'{"do": "hello", "thinwire": "9.9"}\n')
        with pytest.raises(Broken, match="9.9 there: install the same version on both"):
            _obey(Line(link, "caller"))


@pytest.mark.parametrize(("host", "port"), [("a" * 100, 1), ("127.0.0.1", 10**30), ("127.0.0.1", -1)])
def test_an_address_that_is_none_is_told_in_one_line(host: str, port: int) -> None:
    with connected() as (link, caller):
        caller.sendall(json.dumps({"do": "connect back", "host": host, "port": port}).encode() + b"\n")
        with pytest.raises(Broken, match="this machine cannot connect back to") as broken:
            _obey(Line(link, "caller"))
    assert "\n" not in str(broken.value)


@pytest.mark.parametrize("measure", [_speed_out, lambda line: _way_back(line, "127.0.0.1", "there")])
def test_an_answer_of_something_else_is_told_apart(measure: Callable[[Line], object]) -> None:
    with connected() as (link, peer):
        hears = threading.Thread(target=lambda: _take_all(peer))
        hears.start()
        with pytest.raises(Broken, match="there is not `thinwire check`"):
            peer.sendall(b'{"hello": 1}\n')
            measure(Line(link, "there"))
        link.shutdown(socket.SHUT_RDWR)
        hears.join()


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as caller:
        link = door.accept()[0]
        with link:
            yield link, caller


def _take_all(peer: socket.socket) -> None:
    while peer.recv(1 << 16):
        pass


def test_a_port_in_use_is_said(thinwire) -> None:
    with socket.create_server(("", 0)) as taken:
        result = thinwire("check", "--listen", taken.getsockname()[1], status=1)
    assert "choose another" in result.stderr


# -- two machines ------------------------------------------------------------------------------------------------------


class Machines:
    """Two namespaces joined by one line, 10.77.0.1 and 10.77.0.2, each with a decoy that leads nowhere."""

    def __init__(self) -> None:
        self.names = [f"tw-check-{os.getpid()}-{i}" for i in range(2)]

    def build(self) -> None:
        one, two = self.names
        for name in self.names:
            _do("ip", "netns", "add", name)
        _do("ip", "-n", one, "link", "add", "line0", "type", "veth", "peer", "name", "line0", "netns", two)
        for number, name in enumerate(self.names, start=1):
            # the decoys come first by name and by number, and have the same address on both machines
            _do("ip", "-n", name, "link", "add", "decoy0", "type", "veth", "peer", "name", "decoy1")
            _do("ip", "-n", name, "address", "add", "10.0.0.5/24", "dev", "decoy0")
            _do("ip", "-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "line0")
            for device in ("lo", "decoy0", "decoy1", "line0"):
                _do("ip", "-n", name, "link", "set", device, "up")

    def inside(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[number])

    def refuse_new(self, number: int) -> None:
        """A firewall on one machine: what it asked for may come in, new connections are dropped without a word."""
        rules = ("-p", "tcp", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")
        _do(*self.inside(number), "iptables", "-A", "INPUT", *rules)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _do(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")


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


def test_the_interface_of_the_line_is_chosen_not_the_decoy(start, thinwire, machines: Machines) -> None:
    other = listening(start, PORT, prefix=machines.inside(1))
    here = thinwire("check", f"10.77.0.2:{PORT}", prefix=machines.inside(0)).stdout
    assert "interface   line0, 10.77.0.1 -> 10.77.0.2" in here
    assert "interface   line0, 10.77.0.2 <- 10.77.0.1" in ended(other).stdout


@pytest.mark.parametrize("closed", [0, 1])
def test_a_firewall_on_one_side_is_told_with_its_cure(start, thinwire, machines: Machines, closed: int) -> None:
    try:
        machines.refuse_new(closed)
    except OSError as error:
        pytest.skip(f"iptables with conntrack is not to be had here: {error}")
    other = listening(start, PORT, prefix=machines.inside(1))
    result = thinwire("check", f"10.77.0.2:{PORT}", prefix=machines.inside(0), status=1)
    assert len(result.stderr.splitlines()) == 1
    if closed == 1:
        assert f"no answer from 10.77.0.2:{PORT}" in result.stderr and f"open TCP {PORT}" in result.stderr
    else:
        assert "10.77.0.2 cannot connect back to 10.77.0.1" in result.stderr and "firewall" in result.stderr
        assert "cannot connect back" in ended(other, 1).stderr


def test_training_takes_the_interface_of_the_line(tmp_path: Path, start, machines: Machines, tiny: list[str]) -> None:
    common = ("train", *tiny, "--steps", 6, "--connect", "10.77.0.1:29418", "--workers", 2)
    sites = [start(*common, "--worker", i, "--out", tmp_path / f"{i}", prefix=machines.inside(i)) for i in range(2)]
    for site in sites:
        ended(site)
