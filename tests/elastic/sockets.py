"""The table of ports in docs/security.md against the sockets that a process really listens on."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.elastic.garbage import listening

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
EVERYWHERE = {"0.0.0.0", "::"}


@dataclass(frozen=True)
class Row:
    """One line of the table: `bound` is "--bind", "worker's address" or "all interfaces"."""

    process: str
    socket: str
    port: str
    bound: str


def table() -> list[Row]:
    lines = PAGE.read_text().split("## Every port")[1].split("\n## ")[0].splitlines()
    cells = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]
    return [Row(*row[:4]) for row in cells[2:]]


def complaints(process: str, pid: int, address: str, ports: dict[str, int] | None = None) -> list[str]:
    """What does not match between the table's rows of a kind of process and one such process, which uses `address`.

    `ports` names those that are known (socket -> port); what is left must fit the rows that are left.
    """
    rows = {row.socket: row for row in table() if row.process == process}
    found = {port: host for host, port in listening(pid)}
    wrong = []
    for name, port in (ports or {}).items():
        wrong += _check(rows.pop(name), found.pop(port, None), address)
    wide = [f"{host}:{port}" for port, host in found.items() if host in EVERYWHERE]
    if len(wide) > sum(row.bound == "all interfaces" for row in rows.values()):
        wrong.append(f"{process}: {wide} listen on all interfaces, {list(rows)} are what the table has left")
    narrow = {host for host in found.values() if host not in EVERYWHERE}
    if narrow - {address} or narrow and not any(row.bound != "all interfaces" for row in rows.values()):
        wrong.append(f"{process}: listens at {sorted(narrow)}, which the table does not have")
    return wrong


def _check(row: Row, host: str | None, address: str) -> list[str]:
    if host is None:
        return [f"{row.process}: {row.socket} is in the table, and nothing listens"]
    right = host in EVERYWHERE if row.bound == "all interfaces" else host == address
    return [] if right else [f"{row.process}: {row.socket} listens at {host}, the table says {row.bound}"]


def by_ss(pid: int) -> set[tuple[str, int]] | None:
    """The same as `listening`, by another way; None where there is no `ss`."""
    if shutil.which("ss") is None:
        return None
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    local = [line.split()[3] for line in lines if f"pid={pid}," in line]
    hosts = (text.rpartition(":") for text in local)
    return {("::" if host == "*" else host.strip("[]"), int(port)) for host, _, port in hosts}
