"""Writes docs/results.md, the tables behind it and its plots from the raw results: only prose is typed by hand.

    python bench/write_results.py

docs/results.md has a section for each topic: its claims, judged by claims.py, a plot, and the prose of results_text.py.
docs/results/runs.md has a table for each run list in bench/runs (title, text, and the order of the runs); a run without
a result is listed as not run. docs/results/speed.md has the tables of speed_tables.py.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import claims
import plots
import results_text as text
from claims import Claim
from fill import flow
from known import AGAIN, CPU_PRESETS, LARGE, ON_CPU, Known
from quality import Run, read_list
from speed_tables import RESNET, RESULTS, SMALL_RESNET, SPEED, Speed, markdown, read

ROOT = Path(__file__).parents[1]
LISTS, DOCS = ROOT / "bench/runs", ROOT / "docs"
EARLIER = ("overlap_quality", "decoupled_quality")
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """One run list with what is known of it."""

    path: Path
    title: str
    text: str
    runs: list[Run]
    known: Results  # by the run's name

    @property
    def missing(self) -> list[str]:
        return [run.name for run in self.runs if run.name not in self.known]


def read_results() -> Results:
    found = [json.loads(path.read_text())["results"] for path in sorted((RESULTS / "quality").glob("*.json"))]
    return {results["name"]: {"decay": Run.decay, **results} for results in found}  # the first runs do not name it


def read_earlier() -> Results:
    """Runs from before the corpus was cut at whole novels; their losses compare with each other only."""
    runs = [run for name in EARLIER for run in read(name)["runs"] if run["finished"] is not None]
    return {f"earlier {run['name']}": run for run in runs}


def read_resnets() -> Results:
    return read_resnet(RESNET, "resnet") | read_resnet(SMALL_RESNET, "small resnet")


def read_resnet(bench: Speed, prefix: str) -> Results:
    """Runs of a ResNet with the first seed, named as claims name them."""
    runs = [] if bench.missing else read(bench.file)["results"]["runs"]
    return {
        f"{prefix} M{run['workers']} {run['method']}": {"finished": run["loss"], "bytes_sent": run["bytes_sent"]}
        for run in runs
        if run["seed"] == min(run["seed"] for run in runs)
    }


def read_tables(results: Results) -> list[Table]:
    tables = []
    for path in sorted(LISTS.glob("*.json"), key=lambda path: (int(path.stem.split("_")[0]), path.stem)):
        facts, runs = json.loads(path.read_text()), read_list(path)
        known = {run.name: results[run.name] for run in runs if run.name in results}
        tables.append(Table(path, facts["title"], facts["text"], runs, known))
    return tables


def reference(result: dict[str, Any], results: Results) -> dict[str, Any] | None:
    """DDP with the same inner optimizer, weight decay, tokens and seed; the best learning rate of those tried."""
    alike = ("optimizer", "decay", "steps", "tokens", "preset", "seed")
    found = [r for r in results.values() if r["method"] == "tw.ddp()" and all(r[k] == result[k] for k in alike)]
    return min(found, key=lambda r: r["finished"], default=None)


def gap_to_ddp(result: dict[str, Any], results: Results) -> float | None:
    ddp = reference(result, results)
    return 100 * (result["finished"] / ddp["finished"] - 1) if ddp else None


def row(result: dict[str, Any], results: Results) -> dict[str, str]:
    """By the heads of the columns."""
    known, name = Known(results), result["name"]
    gap, tokens, second = gap_to_ddp(result, results), result["steps"] * result["tokens"], result.get("second_test")
    alone = result["workers"] == 1 or result["double_at"]  # nothing received, or counted after the doubling only
    return {
        "run": name, "workers": str(result["workers"]), "method": f"`{result['method']}`", "lr": f"{result['lr']:g}",
        "tokens": f"{tokens / 1e6:.0f}M", "held-out loss": f"{result['finished']:.4f}",
        "against DDP": "" if gap is None else f"{gap:+.1f}%",
        "WikiText-2": "" if second is None else f"{second:.3f}",
        "sent, fewer than DDP": times(known.fewer(name)),
        "received": "" if alone else times(known.fewer_received(name)),
    }  # fmt: skip


def times(fewer: float) -> str:
    """
    >>> times(170.7), times(2.0), times(1.001), times(4 / 3)
    ('171x', '2x', '1x', '1.3x')
    """
    digits = 0 if fewer > 1.95 or abs(fewer - 1) < 0.05 else 1
    return f"{fewer:,.{digits}f}x"


def table_of(rows: list[dict[str, str]]) -> str:
    """Without the columns that are empty."""
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return markdown(heads, [[row[head] for head in heads] for row in rows])


def quality(table: Table, results: Results) -> str:
    on_a_cpu = " --data data/bytes --plain --parallel 2 --held 64 --seconds 11000" * (
        table.runs[0].preset in CPU_PRESETS
    )
    command = f"python bench/evidence.py bench/runs/{table.path.name}{on_a_cpu}"
    missing = f"\nNot run: {'; '.join(table.missing)}.\n" if table.missing else ""
    found = [row(table.known[run.name], results) for run in table.runs if run.name in table.known]
    body = table_of(found) if found else ""
    return f"## {table.title}\n\n{table.text} Command: `{command}`.\n\n{body}{missing}"


def seeds(known: Known, tables: list[Table]) -> str:
    """Both losses of every run that was repeated."""
    head = ("run", "seed 0", "seed 1", "change")
    rows = [
        [name, f"{known.loss(name):.4f}", f"{known.loss(name + AGAIN):.4f}", f"{known.gap(name + AGAIN, name):+.2f}%"]
        for preset in sorted({run.preset for table in tables for run in table.runs})
        for name in known.changes(preset)
    ]
    return "## What another seed changes\n\n" + markdown(head, rows)


@dataclass(frozen=True)
class Topic:
    """A section of the page: claims and prose, of the runs on a GPU and of those on a CPU."""

    title: str
    claims: list[Claim]
    text: str
    cpu_claims: list[Claim]
    cpu_text: str

    def section(self, known: Known, pictures: list[str]) -> str:
        on_a_gpu = [judged(self.claims, known), *pictures, text.prose(self.text, known)]
        on_a_cpu = ["**On a CPU:**\n", judged(self.cpu_claims, known), text.prose(self.cpu_text, known)]
        return "\n".join([f"## {self.title}\n", *on_a_gpu, *on_a_cpu])


TOPICS = [
    Topic("DES-LOC", claims.DESLOC, text.DESLOC, claims.FRESH_DESLOC, text.DESLOC_ON_A_CPU),
    Topic("Overlap", claims.OVERLAP, text.OVERLAP, claims.FRESH_OVERLAP, text.OVERLAP_ON_A_CPU),
    Topic("Decoupled momentum", claims.DECOUPLED, text.DECOUPLED, claims.FRESH_DECOUPLED, text.DECOUPLED_ON_A_CPU),
    Topic("1000 times fewer bytes", claims.COMPOSED, text.COMPOSED, claims.FRESH_COMPOSED, text.COMPOSED_ON_A_CPU),
]


def judged(some: list[Claim], known: Known) -> str:
    return markdown(("claim", "verdict", "numbers"), [[claim.text, *claim.judge(known)] for claim in some])


def machines(results: Results) -> str:
    kinds = sorted({f"{r['device']}, torch {r['torch']}" for r in results.values()})
    where = "Commands, versions and seeds are in each file of `bench/results/quality`."
    return f"Quality was measured on: {'; '.join(kinds)}. {where}\n"


def points(results: Results, preset: str) -> list[tuple[str, float, float]]:
    """Every run of four workers of this size: its kind, how many times fewer bytes than DDP, percent of loss above."""
    found = []
    for name, result in results.items():
        gap = gap_to_ddp(result, results)
        if gap is None or not math.isfinite(gap) or result["preset"] != preset or result["workers"] != 4:
            continue
        tokens = f"{result['steps'] * result['tokens'] / 1e6:.0f}M tokens"
        named = {"adamw": f"AdamW, {tokens}", "muon": f"Muon, {tokens}"}
        found.append((named.get(result["optimizer"], plots.OTHERS), Known(results).fewer(name), gap))
    return found


def earlier(runs: Results) -> str:
    text = (
        "From before the corpus was cut at whole novels, with AdamW at 1e-3, 49M and 33M tokens, period 32, one seed: "
        "compare them with each other only. They are written up in `LOG.md`. Raw: "
        + " and ".join(f"`bench/results/{name}.json`" for name in EARLIER)
    )
    rows = [[name, str(run["workers"]), f"`{run['method']}`", f"{run['finished']:.4f}"] for name, run in runs.items()]
    return f"## Earlier runs\n\n{text}.\n\n" + markdown(("run", "workers", "method", "held-out loss"), rows)


def not_measured() -> str:
    names = [
        f"{speed.title[0].lower()}{speed.title[1:]} (`{speed.command}`)"
        for speed in [RESNET, SMALL_RESNET, *SPEED]
        if speed.missing
    ]
    return flow("- Benches without a recorded run: " + "; ".join(names) + ".") + "\n" if names else ""


def everything() -> Known:
    return Known({**read_results(), **read_earlier(), **read_resnets()})


def draw(results: Results) -> dict[str, list[str]]:
    """The pictures of each topic, as Markdown."""
    return {
        "Overlap": [plots.by_workers(results), plots.curves(results)],
        "1000 times fewer bytes": [
            plots.passes(results),
            plots.by_bytes("by_bytes", "12M parameters, 4 workers", points(results, LARGE)),
            plots.by_bytes("by_bytes_cpu", ".26M parameters, 4 workers, on a CPU", points(results, ON_CPU)),
        ],
        "Speed": [plots.utilization(read("overlap_2"))],
    }


def page() -> str:
    results, known = read_results(), everything()
    pictures = draw(results)
    parts = [
        text.TITLE, "## In short\n", text.prose(text.IN_SHORT, known),
        *(topic.section(known, pictures.get(topic.title, [])) for topic in TOPICS),
        "## Speed\n", text.prose(text.SPEED, known), *pictures["Speed"],
        "## Set-up\n", text.setup(known), flow(text.ON_A_CPU) + "\n", machines(results),
        text.NOT_LISTED + not_measured(),
    ]  # fmt: skip
    return "\n".join(parts)


def runs_page() -> str:
    results = read_results()
    tables = read_tables(results)
    parts = [
        "# Every run\n", flow(text.RUNS) + "\n",
        *(quality(table, results) for table in tables), text.KEPT,
        *(bench.section() for bench in (RESNET, SMALL_RESNET) if not bench.missing),
        seeds(everything(), tables), earlier(read_earlier()),
    ]  # fmt: skip
    return "\n".join(parts)


def speed_page() -> str:
    return "\n".join(["# Speed tables\n", flow(text.SPEEDS) + "\n", *(s.section() for s in SPEED if not s.missing)])


PAGES = {"results.md": page, "results/runs.md": runs_page, "results/speed.md": speed_page}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, write in PAGES.items():
        (DOCS / name).write_text(write())
        print(DOCS / name)


if __name__ == "__main__":
    main()
