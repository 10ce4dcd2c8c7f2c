"""The pictures of docs/results.md: small, as SVG, the same bytes for the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 - after the choice of what draws

PLOTS = Path(__file__).parents[1] / "docs/results"
Results = dict[str, dict[str, Any]]

plt.rcParams.update({"svg.hashsalt": "thinwire", "svg.fonttype": "none", "font.size": 9, "lines.linewidth": 1.3})

BY_WORKERS = ("diloco .6", "relay .6", "carry", "diloco", "relay", "eager")
LEAST, MOST = -4, 16  # percent
OTHERS = "other inner optimizers"
PASSES = {
    "muon 100M ddp": "C0",
    "muon 100M two bits 64": "C1",
    "muon 100M ddp, decay 1": "C2",
    "muon 100M two bits 64, decay 1": "C3",
}
CURVES = ("ddp", "M4 diloco .6", "M4 relay .6", "M4 diloco", "M4 carry", "M4 eager")


def save(name: str, axes: Axes, **labels: str) -> str:
    """The Markdown that shows it."""
    axes.set(**labels)
    axes.grid(alpha=0.3)
    PLOTS.mkdir(exist_ok=True)
    axes.figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")  # type: ignore[union-attr]
    plt.close(axes.figure)  # type: ignore[arg-type]
    return f"![{labels['ylabel']} against {labels['xlabel']}](results/{name}.svg)\n"


def by_workers(results: Results) -> str:
    """The loss of the overlap runs against the number of workers."""
    axes = plt.subplots(figsize=(5.5, 3.2))[1]
    for kind in BY_WORKERS:
        found = [(m, results[f"M{m} {kind}"]["finished"]) for m in (2, 4, 8) if f"M{m} {kind}" in results]
        axes.plot(*zip(*found, strict=True), marker="o", label=kind)
    axes.axhline(results["ddp"]["finished"], color="grey", linestyle="--", label="ddp")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8], ["2", "4", "8"])
    axes.legend(fontsize=8)
    return save("by_workers", axes, xlabel="workers", ylabel="held-out loss")


def curves(results: Results) -> str:
    axes = plt.subplots(figsize=(5.5, 3.2))[1]
    for name in CURVES:
        result = results[name]
        points = [(p["step"] * result["tokens"] / 1e6, p["held"]) for p in result["curve"]]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_ylim(3.4, 5)
    axes.legend(fontsize=8)
    return save("curves", axes, xlabel="million tokens", ylabel="held-out loss")


def by_bytes(name: str, model: str, points: list[tuple[str, float, float]]) -> str:
    """(kind, times fewer bytes than DDP, percent of the loss above it) of every run but DDP's; the best are joined."""
    axes = plt.subplots(figsize=(5.5, 3.4))[1]
    kinds = sorted({kind for kind, _, _ in points if kind != OTHERS}, key=lambda kind: (len(kind), kind))
    for place, kind in enumerate(kinds):
        chosen = [(fewer, gap) for k, fewer, gap in points if k == kind]
        axes.scatter(*zip(*chosen, strict=True), s=9, alpha=0.35, color=f"C{place}")
        axes.plot(*zip(*best(chosen), strict=True), marker="o", markersize=4, color=f"C{place}", label=kind)
    others = [(fewer, gap) for kind, fewer, gap in points if kind == OTHERS]
    if others:
        axes.scatter(*zip(*others, strict=True), s=9, color="lightgrey", label=OTHERS)
    axes.axhline(1, color="grey", linestyle="--", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(LEAST, MOST)
    axes.set_title(f"{model}; {sum(gap > MOST for _, _, gap in points)} runs above {MOST}% are not shown", fontsize=8)
    axes.legend(
        fontsize=8, title="lines: the best with as few bytes", title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
    )
    return save(name, axes, xlabel="times fewer bytes than DDP", ylabel="percent of loss above DDP")


def best(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of (times fewer, percent) that no other beats with as few bytes, give or take a twentieth.

    >>> best([(10, 3.0), (100, 2.0), (1000, 5.0), (1003, 6.0)])
    [(100, 2.0), (1000, 5.0)]
    """
    return [(fewer, gap) for fewer, gap in sorted(points) if not any(f > 0.95 * fewer and g < gap for f, g in points)]


def passes(results: Results) -> str:
    """Held-out and training loss over 100M tokens, 5.8 passes: DDP overfits, not so with ten times the weight decay."""
    axes = plt.subplots(figsize=(6.5, 3.6))[1]
    for name, color in PASSES.items():
        result = results[name]
        tokens = [point["step"] * result["tokens"] / 1e6 for point in result["curve"]]
        axes.plot(tokens, [point["held"] for point in result["curve"]], color=color, label=name)
        axes.plot(tokens, [point["train"] for point in result["curve"]], color=color, linestyle=":")
    axes.set_ylim(2.8, 4.1)
    axes.legend(fontsize=8, title="dotted: in training", title_fontsize=8, loc="upper right")
    return save("passes", axes, xlabel="million tokens, 17.4 a pass", ylabel="loss, held out and in training")


def utilization(record: dict[str, Any]) -> str:
    axes = plt.subplots(figsize=(5.5, 3.2))[1]
    for method in dict.fromkeys(r["method"] for r in record["results"]):
        found = [(r["mbits"], 100 * r["utilization"]) for r in record["results"] if r["method"] == method]
        axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=method)
    axes.set_xscale("log")
    axes.legend(fontsize=8)
    return save("utilization", axes, xlabel="Mbit a second", ylabel="percent busy, two workers")
