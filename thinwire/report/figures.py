"""The charts of the page, by plotly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from thinwire import units

if TYPE_CHECKING:
    from thinwire.report.page import Run

COLOURS = (
    "#3b5bdb", "#f76707", "#0ca678", "#e64980", "#7048e8", "#f59f00", "#1098ad", "#868e96", "#a61e4d", "#5c940d",
    "#212529", "#94d82d", "#b197fc", "#795548", "#66d9e8", "#ffa8a8", "#0b7285",
)  # fmt: skip
KINDS = {"compute": "#4c6ef5", "waiting for the link": "#fa5252", "exchange hidden behind compute": "#fab005"}
STEPS = "optimizer steps"
VISIBLE = 0.01  # of a step: exchanges in memory take less, and are no traffic
SHOWN_STEPS = 48  # of the time lines: enough for some rounds, few enough to see a step


def _styled(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 64, "r": 16, "t": 24, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#343a40"},
        # below the chart, where many names have room on a phone too
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "tracegroupgap": 0},
        hoverlabel={"font": {"family": "system-ui, sans-serif"}},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        **layout,
    )
    figure.update_xaxes(gridcolor="#e9ecef", zeroline=False)
    figure.update_yaxes(gridcolor="#e9ecef", zeroline=False)
    return figure


def smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """A running mean that forgets; the first values count in full."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def loss(runs: list[Run]) -> go.Figure:
    """Training (smoothed) and held-out loss; buttons choose what they are drawn against."""
    figure, sources = go.Figure(), []
    for run, colour in zip(runs, _colours(runs), strict=True):
        held = [record for record in run.records if "val_loss" in record]
        curve = smooth([record["loss"] for record in run.records])
        sources += [run.records, held]
        thin = {"color": colour, "width": 1.5}
        figure.add_scatter(
            x=_column(run.records, "step"),
            y=curve,
            name=f"{run.label}, training",
            showlegend=False,
            legendgroup=run.label,
            line=thin,
            opacity=0.55,
        )
        bold = {"color": colour, "width": 2.5}
        figure.add_scatter(
            x=_column(held, "step"),
            y=_column(held, "val_loss"),
            name=run.label,
            legendgroup=run.label,
            mode="lines+markers",
            line=bold,
        )
    _styled(figure, 460, hovermode="x unified", yaxis_title="loss", xaxis_title=STEPS)
    figure.update_layout(updatemenus=[_axis_buttons(sources, runs[0].counted)])
    return figure


def _axis_buttons(sources: list[list[Any]], counted: str) -> dict[str, Any]:
    axes = {
        "steps": ("step", STEPS),
        counted: ("tokens", f"{counted}, all workers"),
        "bytes": ("bytes_sent", "bytes sent per worker"),
        "time": ("seconds", "seconds"),
    }
    sizes = _byte_ticks([record["bytes_sent"] for records in sources for record in records])
    buttons = []
    for label, (key, title) in axes.items():
        # bytes differ by orders of magnitude between methods; zeros, before the first exchange, have no logarithm
        scale = "log" if key == "bytes_sent" else "linear"
        data = [[record[key] or None for record in records] for records in sources]
        ticks = {f"xaxis.{name}": value for name, value in sizes.items()}
        if key != "bytes_sent":
            ticks["xaxis.tickmode"] = "auto"
        buttons.append(
            {
                "label": label,
                "method": "update",
                "args": [{"x": data}, {"xaxis.title.text": title, "xaxis.type": scale} | ticks],
            }
        )
    return {
        "type": "buttons",
        "direction": "right",
        "x": 1,
        "xanchor": "right",
        "y": 1.16,
        "buttons": buttons,
        "showactive": True,
    }


def _byte_ticks(sizes: list[int]) -> dict[str, Any]:
    """Of a log axis: plotly's own ticks between two powers of ten are single digits, without a unit."""
    known = [size for size in sizes if size] or [1]
    low, high = min(known) / 1.5, max(known) * 1.5
    decades = [10**power for power in range(15) if low / 10 < 10**power < high]
    steps = (1, 2, 5) if len(decades) < 4 else (1,)
    values = [step * decade for decade in decades for step in steps if low < step * decade < high]
    return {"tickmode": "array", "tickvals": values, "ticktext": list(map(units.show_size, values))}


def pareto(runs: list[Run]) -> go.Figure | None:
    """Loss against bytes: where a run stood at each evaluation, and where it ended; None where there is no point."""
    if not any(run.records[-1]["bytes_sent"] for run in runs):
        return None
    figure = go.Figure()
    for run, colour in zip(runs, _colours(runs), strict=True):
        held = [record for record in run.records if "val_loss" in record and record["bytes_sent"]]
        figure.add_scatter(
            x=_column(held, "bytes_sent"),
            y=_column(held, "val_loss"),
            mode="lines",
            line={"color": colour, "width": 1, "dash": "dot"},
            showlegend=False,
            hoverinfo="skip",
        )
        end_x, end_y = _end(run)
        figure.add_scatter(
            x=[end_x],
            y=[end_y],
            mode="markers",
            name=run.label,
            marker={"color": colour, "size": 14, "line": {"color": "white", "width": 2}},
            showlegend=True,
        )
    if not any(math.isfinite(loss) for trace in figure.data for loss in trace.y):
        return None
    drawn = [run.summary["bytes_ddp"] for run in runs if len(runs) == 1 and run.summary.get("bytes_ddp")]
    for ddp in drawn:
        figure.add_vline(x=ddp, line={"color": "#adb5bd", "dash": "dash"}, annotation_text="DDP would send")
        # a text, unlike a line, is placed on a log axis by its exponent
        figure.update_annotations(x=math.log10(ddp), xanchor="right")
    _styled(figure, 420, xaxis_title="bytes sent per worker (log)", yaxis_title="held-out loss")
    figure.update_xaxes(type="log", **_byte_ticks([*drawn, *(x for trace in figure.data for x in trace.x)]))
    return figure


def _end(run: Run) -> tuple[Any, Any]:
    last = run.records[-1]
    return last["bytes_sent"] or 1, run.summary.get("loss", last["loss"])


Bars = dict[str, list[tuple[str, float, float, int]]]  # of each kind: row, start, length, step


def timeline(runs: list[Run]) -> go.Figure:
    """The last steps of each run on the clock: what computed, what waited, what was hidden behind compute."""
    figure, bars = go.Figure(), {name: [] for name in KINDS}  # type: tuple[go.Figure, Bars]
    for run in runs:
        shown = run.records[-SHOWN_STEPS:]
        origin = shown[0]["seconds"] - shown[0]["step_seconds"]
        for record in shown:
            _add_step(bars, run.label, record, origin)
    for name, colour in KINDS.items():
        rows, starts, lengths, steps = _transposed(bars[name])
        figure.add_bar(
            y=rows,
            base=starts,
            x=lengths,
            customdata=steps,
            name=name,
            orientation="h",
            marker={"color": [_shade(colour, step) for step in steps] or colour, "line": {"width": 0}},
            hovertemplate="step %{customdata}: %{x:.4f} s<extra>" + name + "</extra>",
        )
    used = {row for entries in bars.values() for row, *_ in entries}
    order = [row for run in runs for row in (run.label, _link_row(run.label)) if row in used]
    _styled(figure, 170 + 40 * len(order), barmode="overlay", xaxis_title="seconds", bargap=0.3, showlegend=True)
    names = ["link" if row not in {run.label for run in runs} else row for row in order]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], automargin=True)
    figure.update_yaxes(tickmode="array", tickvals=order, ticktext=names)  # the link's stands under its run's
    return figure


def _transposed(entries: list[tuple[str, float, float, int]]) -> tuple[list[Any], ...]:
    return tuple(list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [], [])


def _shade(colour: str, step: int) -> str:
    """Neighbouring steps in two shades, so that each can be seen."""
    return colour if step % 2 else colour + "b0"


def _link_row(label: str) -> str:
    return f"{label}, link"


def _add_step(bars: Bars, label: str, record: dict[str, Any], origin: float) -> None:
    compute, waiting, hidden = bars.values()
    waited, number = min(record["waited_seconds"], record["step_seconds"]), record["step"]
    start = record["seconds"] - record["step_seconds"] - origin
    computed = record["step_seconds"] - waited
    compute.append((label, start, computed, number))
    if waited > VISIBLE * record["step_seconds"]:
        waiting.append((label, start + computed, waited, number))
        waiting.append((_link_row(label), start + computed, waited, number))
    if record["hidden_seconds"] > VISIBLE * record["step_seconds"]:
        length = min(record["hidden_seconds"], start + computed)
        hidden.append((_link_row(label), start + computed - length, length, number))


def drift(runs: list[Run], key: str) -> go.Figure | None:
    """`drift_norm` or `drift_cosine`, exchange by exchange; None where no run recorded any."""
    figure = go.Figure()
    for run, colour in zip(runs, _colours(runs), strict=True):
        met = [record for record in run.records if key in record]
        figure.add_scatter(
            x=_column(met, "step"),
            y=_column(met, key),
            name=run.label,
            showlegend=bool(met),
            mode="lines+markers",
            line={"color": colour},
            marker={"size": 4},
        )
    _styled(figure, 360, xaxis_title=STEPS)
    return figure if any(trace.x for trace in figure.data) else None


def _colours(runs: list[Run]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def _column(records: list[Any], key: str) -> list[Any]:
    return [record[key] for record in records]
