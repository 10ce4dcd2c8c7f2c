"""Utilization against bandwidth for all methods, like the papers' figure: an HTML file that opens offline, or a PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thinwire.plan.timeline import Array

RATES: Array = np.logspace(6, 12, 73)  # bit/s
_COLOURS = (
    *("#4269d0", "#e08f1c", "#d1495b", "#3ca7a0", "#2f8f4e", "#8a63d2"),
    *("#d46aa5", "#7c5a3c", "#5aa9e6", "#8d99ae", "#a3a329", "#1b1b3a"),
)
_DASHES = ("solid", "dash")  # once through the colours, then again dashed
_LABELS = {
    1e6: "1 Mbit/s",
    1e7: "10 Mbit/s",
    1e8: "100 Mbit/s",
    1e9: "1 Gbit/s",
    1e10: "10 Gbit/s",
    1e11: "100 Gbit/s",
    1e12: "1 Tbit/s",
}


def plot(path: Path, curves: dict[str, Array], here: float, title: str) -> None:
    """`curves` are over `RATES`; `here` is the slowest line asked about, in bit/s."""
    if path.suffix not in (".html", ".png"):
        raise ValueError(f"--plot {path}: write a name that ends in .html or .png")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    (_html if path.suffix == ".html" else _png)(path, curves, here, title)


def _style(number: int) -> tuple[str, str]:
    return _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]


def _html(path: Path, curves: dict[str, Array], here: float, title: str) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = _style(number)
        figure.add_scatter(x=RATES, y=100 * curve, name=name, line={"color": colour, "dash": dash})
    figure.update_xaxes(type="log", title="bandwidth", tickvals=list(_LABELS), ticktext=list(_LABELS.values()))
    figure.update_yaxes(title="compute utilization", range=[0, 102], ticksuffix="%", hoverformat=".1f")
    figure.add_vline(x=here, line={"dash": "dot", "color": "#666"})
    figure.update_layout(title=title, template="plotly_white", hovermode="x unified")
    figure.write_html(path, include_plotlyjs=True)


def _png(path: Path, curves: dict[str, Array], here: float, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = _style(number)
        axes.plot(RATES, 100 * curve, label=name, color=colour, linestyle={"solid": "-", "dash": "--"}[dash])
    axes.set_xscale("log")
    axes.set_xticks(list(_LABELS), list(_LABELS.values()))
    axes.axvline(here, linestyle=":", color="#666")
    axes.set(xlim=(RATES[0], RATES[-1]), ylim=(0, 102), ylabel="compute utilization, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
