"""What every recorded result carries: numbers with their spread, and the machine, versions and command behind them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Iterable[float]) -> dict[str, float]:
    """The median, the quartiles and the least of many short measurements."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    return {"median": statistics.median(ordered), "low": low, "high": high, "least": ordered[0], "count": len(ordered)}


def machine() -> dict[str, Any]:
    processor = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {"processor": processor, "cores": os.cpu_count(), "system": platform.system(), "load": os.getloadavg()[0]}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "thinwire", "torchft"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def save(path: Path | None, seed: int, results: Any, started: dict[str, Any]) -> None:
    """Write the results as JSON; `started` is `machine()` as it was before the first measurement."""
    if path is None:
        return
    places = {"--out", "--json"}
    asked = [word for before, word in zip(sys.argv, sys.argv[1:], strict=False) if not places & {before, word}]
    command = shlex.join(["python", "bench/" + Path(sys.argv[0]).name, *asked])
    record = {
        "command": command, "seed": seed, "versions": versions(),
        "machine": {**started, "load": [round(started["load"], 2), round(os.getloadavg()[0], 2)]},
        "results": results,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]))
