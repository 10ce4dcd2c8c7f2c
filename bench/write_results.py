"""Writes docs/results.md and its plots from the raw results: nothing on that page is typed by hand but prose.

    python bench/write_results.py

Quality tables follow the run lists in bench/runs (title, text, and the order of the runs); a run without a result is
listed as not run. Claims are judged by the functions in claims.py.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import CLAIMS, Known
from quality import Run, read_list

ROOT = Path(__file__).parents[1]
LISTS, RESULTS, PAGE = ROOT / "bench/runs", ROOT / "bench/results/quality", ROOT / "docs/results.md"
PLOTS = ROOT / "docs/results"


@dataclass(frozen=True)
class Table:
    """One run list with what is known of it."""

    path: Path
    title: str
    text: str
    runs: list[Run]
    known: dict[str, dict[str, Any]]  # by the run's name

    @property
    def missing(self) -> list[str]:
        return [run.name for run in self.runs if run.name not in self.known]


def read_results() -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text())["results"] for path in sorted(RESULTS.glob("*.json"))]
    return {results["name"]: results for results in found}


def read_tables(results: dict[str, dict[str, Any]]) -> list[Table]:
    tables = []
    for path in sorted(LISTS.glob("*.json")):
        facts, runs = json.loads(path.read_text()), read_list(path)
        known = {run.name: results[run.name] for run in runs if run.name in results}
        tables.append(Table(path, facts["title"], facts["text"], runs, known))
    return tables


def reference(result: dict[str, Any], results: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """DDP with the same inner optimizer, tokens and seed; the best learning rate of those tried."""
    alike = ("optimizer", "steps", "tokens", "preset", "seed")
    found = [r for r in results.values() if r["method"] == "tw.ddp()" and all(r[k] == result[k] for k in alike)]
    return min(found, key=lambda r: r["finished"], default=None)


def fewer_bytes(result: dict[str, Any]) -> float:
    """Than DDP, which sends every gradient in fp32 at every step."""
    return 4 * result["parameters"] * result["steps"] / result["bytes_sent"]


def row(result: dict[str, Any], results: dict[str, dict[str, Any]]) -> list[str]:
    ddp = reference(result, results)
    gap = f"{100 * (result['finished'] / ddp['finished'] - 1):+.1f}%" if ddp else ""
    tokens = result["steps"] * result["tokens"] / 1e6
    return [
        result["name"], str(result["workers"]), f"`{result['method']}`", f"{result['lr']:g}", f"{tokens:.0f}M",
        f"{result['finished']:.3f}", gap, f"{fewer_bytes(result):,.0f}x",
    ]  # fmt: skip


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


HEAD = ("run", "workers", "method", "lr", "tokens", "held-out loss", "against DDP", "fewer bytes than DDP")


def section(table: Table, results: dict[str, dict[str, Any]]) -> str:
    body = markdown(HEAD, [row(table.known[run.name], results) for run in table.runs if run.name in table.known])
    plot = f"\n![loss against tokens](results/{draw_curves(table).name})\n" if table.known else ""
    missing = f"\nNot run: {', '.join(table.missing)}.\n" if table.missing else ""
    return f"## {table.title}\n\n{table.text}\n\n{body}{plot}{missing}"


def draw_curves(table: Table) -> Path:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "thinwire"  # the same picture has the same bytes
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, result in table.known.items():
        points = [(p["step"] * result["tokens"] / 1e6, p["held"]) for p in result["curve"]]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
    losses = [result["finished"] for result in table.known.values()]
    axes.set_ylim(min(losses) - 0.05, statistics.median(losses) + 1.0)
    axes.set(xlabel="million tokens", ylabel="held-out loss")
    axes.legend(fontsize=5, ncols=2)
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{table.path.stem}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return path


def claims(results: dict[str, dict[str, Any]]) -> str:
    rows = [[claim.text, *claim.judge(Known(results))] for claim in CLAIMS]
    return "## Claims\n\n" + markdown(("claim", "verdict", "numbers"), rows)


def machines(results: dict[str, dict[str, Any]]) -> str:
    kinds = sorted({f"{r['device']}, torch {r['torch']}" for r in results.values()})
    return (
        "Measured on: "
        + "; ".join(kinds)
        + ". Commands, versions and seeds are in each file of `bench/results/quality`.\n"
    )


PREFACE = """# Results

This page is written by `python bench/write_results.py` from the raw results in `bench/results`. Loss is that of
held-out whole novels, in nats a token, of the model a user would export (`fleet.finish()`). All runs of a table see the
same tokens in the same order. "Against DDP" is against DDP with the same inner optimizer and tokens, at the best
learning rate tried. One seed unless several are named: differences below about .3% are noise.

"""


def main() -> None:
    results = read_results()
    tables = read_tables(results)
    parts = [PREFACE + machines(results), claims(results), *(section(table, results) for table in tables)]
    PAGE.write_text("\n".join(parts))
    print(PAGE)


if __name__ == "__main__":
    main()
