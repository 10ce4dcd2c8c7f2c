"""`report.html`: one self-contained page for a run or a comparison, which opens offline."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from thinwire import units
from thinwire.report import figures, metrics, words
from thinwire.train.errors import UserError

# the numbers that the page needs of a summary and of each record, and those that some records have
SUMMARY = ("loss", "perplexity", "bytes_sent", "bytes_ddp", "tokens", "steps", "workers", "parameters")
RECORD = (
    "step", "loss", "tokens", "tokens_per_second", "bytes_sent", "wire_sent",
    "seconds", "step_seconds", "waited_seconds", "waited_share", "hidden_seconds",
)  # fmt: skip
RECORD_IF_ANY = ("val_loss", "drift_norm", "drift_cosine")


@dataclass
class Run:
    """What the page knows of one run."""

    label: str
    records: list[metrics.Record]
    summary: dict[str, Any]
    config: str

    @property
    def counted(self) -> str:
        """What the record's `tokens` are."""
        return "images" if 'kind = "resnet"' in self.config else "tokens"


def write(folder: Path) -> Path:
    """The page of whatever the folder holds."""
    if (folder / "compare.json").exists():
        return _write(folder, _compared(folder), "Comparison")
    if (folder / "metrics.jsonl").exists():
        return write_run(folder)
    raise UserError(f"{folder} holds neither a run (metrics.jsonl) nor a comparison (compare.json)")


def write_run(folder: Path) -> Path:
    return _write(folder, [_load(folder)], "Run")


def _load(folder: Path, label: str = "") -> Run:
    summary, lines, config = (folder / name for name in ("summary.json", "metrics.jsonl", "config.toml"))
    known = _numbers(summary, _json(summary), SUMMARY) if summary.exists() else {}
    records = [_numbers(lines, record, RECORD, RECORD_IF_ANY) for record in metrics.read(lines)]
    if not records:
        raise UserError(f"{folder}: no step has been recorded yet")
    text = config.read_text() if config.exists() else ""
    return Run(label or str(known.get("method", _name(folder))), records, known, text)


def _name(folder: Path) -> str:
    """Of `.` too."""
    return folder.resolve().name


def _numbers(path: Path, entry: Any, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """An entry of a file whose values of these keys are numbers, with NaN for null, which stands for it in a file."""
    if not isinstance(entry, dict):
        raise UserError(f"{path} is damaged: {entry!r:.40} is not a table of numbers")
    numbers = {key: math.nan if value is None else value for key, value in entry.items()}
    for key in (*needed, *(key for key in optional if key in numbers)):
        if not isinstance(numbers.get(key), (int, float)):
            raise UserError(f"{path} is damaged: {key} must be a number")
    return numbers


def _compared(folder: Path) -> list[Run]:
    path = folder / "compare.json"
    entries = _json(path)
    if not isinstance(entries, list) or not entries or not all(map(_names_a_run, entries)):
        raise UserError(f"{path} is damaged: it must list runs, each with its label")
    return [_load(folder / entry["run"], entry["label"]) for entry in entries]


def _names_a_run(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("run", "label"))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _write(folder: Path, runs: list[Run], kind: str) -> Path:
    template = Template((Path(__file__).parent / "page.html").read_text())
    page = template.substitute(
        title=html.escape(f"{kind}: {_name(folder)}"),
        plotly=get_plotlyjs(),
        cards=_cards(runs),
        loss="".join(map(_divergence, runs)) + _chart("loss", figures.loss(runs)),
        pareto=_pareto(runs),
        timeline=_chart("timeline", figures.timeline(runs)),
        drift=_drift(runs),
        table=_table(runs),
        config="".join(_config(run) for run in runs),
    )
    target = folder / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def _chart(name: str, figure: Any) -> str:
    """A placeholder and the call that draws into it; the library itself is in the page once."""
    return str(
        figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=name, config={"displayModeBar": False, "responsive": True}
        )
    )


_NO_PARETO = '<p class="none">Nothing to show: nothing was sent, or no loss was finite after the first exchange.</p>'


def _pareto(runs: list[Run]) -> str:
    figure = figures.pareto(runs)
    return _chart("pareto", figure) if figure else _NO_PARETO


_NO_DRIFT = '<p class="none">Nothing to show: no exchange of drifts was recorded.</p>'
DRIFTS = {"drift_norm": "norm of a worker's message", "drift_cosine": "mean cosine between two workers"}


def _drift(runs: list[Run]) -> str:
    """Two charts that stand side by side where there is room."""
    drawn = {key: figures.drift(runs, key) for key in DRIFTS}
    charts = (f"<div><h3>{DRIFTS[key]}</h3>{_chart(key, figure)}</div>" for key, figure in drawn.items() if figure)
    found = "".join(charts)
    return f'<div class="pair">{found}</div>' if found else _NO_DRIFT


def _divergence(run: Run) -> str:
    """A word on a curve that ends early, or never begins."""
    losses = [(record["step"], record.get(key, 0)) for record in run.records for key in ("loss", "val_loss")]
    step = next((step for step, loss in losses if not math.isfinite(loss)), None)
    said = f"{run.label}: the loss was not finite at step {step}, and its curve ends there."
    return "" if step is None else f'<p class="none">{html.escape(said)}</p>'


def _cards(runs: list[Run]) -> str:
    """The few numbers that matter: of the run, or of the comparison's best."""
    done = [run for run in runs if run.summary]
    if not done:
        last = runs[0].records[-1]
        return _card("step", str(last["step"]), "so far") + _card("loss", f"{last['loss']:.4f}", "training")
    # nan is neither less nor more than any number
    best = min(done, key=lambda run: run.summary["loss"] if math.isfinite(run.summary["loss"]) else math.inf)
    least = min(done, key=lambda run: run.summary["bytes_sent"])
    first = done[0].summary
    sent, ddp = least.summary["bytes_sent"], least.summary["bytes_ddp"]
    loss = "held-out loss" if best.summary.get("held_out", True) else "training loss"
    several = len(done) > 1
    best_note = best.label if several else "exported weights"
    return "".join(
        [
            _card(f"lowest {loss}" if several else loss, f"{best.summary['loss']:.4f}", best_note),
            _card("fewest bytes sent" if several else "bytes sent per worker", units.show_size(sent), least.label),
            _beside_ddp(sent, ddp),
            _card("model", units.show_count(first["parameters"]), f"parameters, {words.workers(first['workers'])}"),
            _card("data", units.show_count(first["tokens"]), f"{done[0].counted} in {first['steps']} steps"),
        ]
    )


def _beside_ddp(sent: float, ddp: float) -> str:
    """The number alone is large: `11.1x`, under "fewer than DDP"."""
    factor, times, word = words.against_ddp(sent, ddp).partition("x ")
    label, value = (f"{word} than DDP", f"{factor}x") if times else ("beside DDP", factor)
    return _card(label, value, f"DDP sends {units.show_size(ddp)}")


def _card(label: str, value: str, note: str) -> str:
    parts = (
        f'<div class="{kind}">{html.escape(text)}</div>'
        for kind, text in (("label", label), ("value", value), ("note", note))
    )
    return f'<div class="card">{"".join(parts)}</div>'


COLUMNS = (
    "Method",
    "Held-out loss",
    "Perplexity",
    "Bytes sent",
    "Against DDP",
    "On the wire",
    "Waiting",
)


def _table(runs: list[Run]) -> str:
    columns = (*COLUMNS, f"{runs[0].counted.capitalize()}/s", "Time")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, runs))}</tbody></table>"


def _row(run: Run) -> str:
    last, summary = run.records[-1], run.summary
    sent, ddp = last["bytes_sent"], summary.get("bytes_ddp", 0)
    cells = [
        run.label,
        f"{summary.get('loss', last['loss']):.4f}" + ("" if summary.get("held_out", bool(summary)) else " (training)"),
        words.perplexity(summary["perplexity"]) if summary else "-",
        units.show_size(sent),
        words.against_ddp(sent, ddp) if summary else "-",
        units.show_size(last["wire_sent"]),
        f"{last['waited_share']:.1%}",
        units.show_count(last["tokens_per_second"]),
        units.show_duration(last["seconds"]),
    ]
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _config(run: Run) -> str:
    return f"<details><summary>{html.escape(run.label)}</summary><pre>{html.escape(run.config)}</pre></details>"
