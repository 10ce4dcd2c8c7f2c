"""`thinwire check`: the line between two machines, each direction apart; every failure is one line with its cure.

The side that listens does as it is told over one connection; the other side measures, and both print the result.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from typing import Any

from thinwire import units
from thinwire.site import likely_address
from thinwire.train.errors import UserError
from thinwire.train.line import PATIENCE, Broken, Line, drain, interface_of, pump, versions

PINGS = 20
FOUND = ("latency", "out", "into")  # what the side that asks measured, each a number


def check(address: str | None, listen: int | None) -> None:
    """The command: one of the two sides."""
    if (address is None) == (listen is None):
        raise UserError("give one: thinwire check HOST:PORT, or on the other machine thinwire check --listen PORT")
    try:
        results = serve(listen) if listen is not None else probe(*_split(str(address)))
    except Broken as error:
        print(f"thinwire: {error}", file=sys.stderr)
        sys.exit(1)
    for label, value in results.items():
        print(f"{label:<11} {value}", flush=True)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r}: write HOST:PORT, for example 10.0.0.1:29500")
    return host.strip("[]"), int(port)


# -- the side that asks ------------------------------------------------------------------------------------------------


def probe(host: str, port: int) -> dict[str, str]:
    """Everything about the line to HOST:PORT, where `thinwire check --listen PORT` runs."""
    with _connect(host, port) as link:
        here, there = link.getsockname()[0], link.getpeername()[0]
        line = Line(link, f"{host}:{port}")
        facts = line.ask("hello", **versions())
        _same_versions(facts)
        _way_back(line, here, host)
        latency = _latency(line)
        out, into = _speed_out(line), _speed_in(line)
        results = _results(f"{interface_of(here)}, {here} -> {there}:{port}", latency, out, into, facts)
        line.ask("done", latency=latency, out=into, into=out)
        return results


def _results(way: str, latency: float, out: float, into: float, facts: dict[str, Any]) -> dict[str, str]:
    named = ", ".join(f"{name} {number}" for name, number in versions().items())
    there = ", ".join(f"{name} {number}" for name, number in facts.items() if number != versions().get(name))
    return {
        "interface": way,
        "there": "connects",
        "back": "connects",
        "latency": units.show_duration(latency) + " there and back",
        "speed": f"out {units.show_rate(out)}, in {units.show_rate(into)}",
        "versions": named + (f" (there {there})" if there else " (the same there)"),
    }


def _connect(host: str, port: int) -> socket.socket:
    start = f"on {host} run: thinwire check --listen {port}"
    try:
        return socket.create_connection((host, port), timeout=PATIENCE)
    except socket.gaierror as error:
        raise Broken(
            f"{host} has no address here ({error.strerror}): use an IP address, or add the name to /etc/hosts"
        ) from error
    except ConnectionRefusedError as error:
        raise Broken(f"nothing listens at {host}:{port}: {start}") from error
    except TimeoutError as error:
        cure = f"open TCP {port} in its firewall, or use another of its addresses"
        raise Broken(f"no answer from {host}:{port} in {PATIENCE:.0f} s: {cure}; then {start}") from error
    except OSError as error:
        raise Broken(f"no way to {host}:{port} ({error.strerror}): check the address, cable, VPN and routes") from error


def _same_versions(there: dict[str, Any]) -> None:
    here = versions()
    if there.get("thinwire") != here["thinwire"]:
        raise Broken(
            f"thinwire {here['thinwire']} here, {there.get('thinwire')} there: install the same version on both"
        )


def _way_back(line: Line, here: str, host: str) -> None:
    """The other side must be able to open connections to us: training does so from both ends."""
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with socket.socket(family) as door:
        door.bind((here, 0))
        door.listen(1)
        port = door.getsockname()[1]
        answer = line.ask("connect back", host=here, port=port)
    (trouble,) = _facts(line, answer, trouble=str)
    if trouble:
        raise Broken(_no_way_back(host, f"{here}:{port}", trouble, "this machine's"))


def _no_way_back(who: str, where: str, trouble: str, whose: str) -> str:
    cure = f"open incoming TCP in {whose} firewall (training uses ports of its own choice), or join the two by a VPN"
    return f"{who} cannot connect back to {where} ({trouble}): {cure}"


def _latency(line: Line) -> float:
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        line.ask("ping")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _speed_out(line: Line) -> float:
    line.say(do="take")
    sent = pump(line)
    size, seconds = _facts(line, line.hear(), bytes=int, seconds=float)
    assert size == sent
    return sent / seconds


def _speed_in(line: Line) -> float:
    line.say(do="give")
    size, seconds = drain(line)
    line.hear()
    return size / seconds


# -- the side that listens ---------------------------------------------------------------------------------------------


def serve(port: int) -> dict[str, str]:
    """Wait for the other side, do what it asks, and tell what it found."""
    with _door(port) as door:
        command = f"thinwire check {likely_address()}:{port}"
        print(f"listening on port {port}; on the other machine run: {command}", flush=True)
        link = door.accept()[0]
    with link:
        link.settimeout(PATIENCE * 4)
        here, there = _plain(link.getsockname()[0]), _plain(link.getpeername()[0])
        line = Line(link, there)
        facts, found = _obey(line)
        way = f"{interface_of(here)}, {here} <- {there}"
        return _results(way, found["latency"], found["out"], found["into"], facts)


def _door(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    except OSError as error:
        raise Broken(f"cannot listen on port {port} ({error.strerror}): choose another, or end what uses it") from error


def _plain(address: str) -> str:
    """A door for IPv6 and IPv4 tells an IPv4 address as `::ffff:10.0.0.1`."""
    return address.removeprefix("::ffff:")


def _obey(line: Line) -> tuple[dict[str, Any], dict[str, Any]]:
    facts: dict[str, Any] = {}
    while True:
        order = line.hear()
        (do,) = _facts(line, order, do=str)
        if do == "hello":
            facts = {name: number for name, number in order.items() if name != "do"}
            line.say(**versions())
            _same_versions(facts)
        elif do == "connect back":
            _connect_back(line, *_facts(line, order, host=str, port=int))
        elif do == "ping":
            line.say()
        elif do == "take":
            size, seconds = drain(line)
            line.say(bytes=size, seconds=seconds)
        elif do == "give":
            pump(line)
            line.say()
        elif do == "done":
            found = dict(zip(FOUND, _facts(line, order, **dict.fromkeys(FOUND, float)), strict=True))
            line.say()
            return facts, found
        else:
            raise _stranger(line)


def _connect_back(line: Line, host: str, port: int) -> None:
    trouble = _try(host, port)
    line.say(trouble=trouble)
    if trouble:
        raise Broken(_no_way_back("this machine", f"{host}:{port}", trouble, f"{host}'s"))


def _facts(line: Line, said: dict[str, Any], **kinds: type) -> list[Any]:
    """These facts of a message, each of its type: another program may have said anything."""
    if not all(isinstance(said.get(name), kind) for name, kind in kinds.items()):
        raise _stranger(line)
    return [said[name] for name in kinds]


def _stranger(line: Line) -> Broken:
    return Broken(f"{line.peer} is not `thinwire check`, or it ended: start it anew on both sides")


def _try(host: str, port: int) -> str:
    """Why a connection to there fails, or nothing."""
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except TimeoutError:
        return f"no answer in {PATIENCE:.0f} s"
    except OSError as error:
        return str(error.strerror or error)
    except (OverflowError, ValueError) as error:  # no port, no name
        return str(error)
    return ""
