"""The planner's answers as tables and words."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.table import Table

from thinwire import units
from thinwire.plan import paper
from thinwire.plan.advisor import ENOUGH, Advisor, Row, equal_batches


def paper_tables(cells: list[paper.Cell], outside: list[paper.Cell]) -> None:
    """Published and ours, side by side; a star marks a cell that differs."""
    console = _console()
    console.print(_paper_table("Gbit/s for a compute utilization of .. (published | ours)", cells))
    matched = sum(cell.ours == cell.published for cell in cells)
    console.print(f"{matched} of {len(cells)} cells equal; both name the last grid point below the target.\n")
    console.print(_paper_table("Out of sample: scaling laws, DiLoCo (published | ours)", outside))
    console.print(_steady_table(cells))


def _console() -> Console:
    console = Console(highlight=False)
    # Piped into a file there is no width to keep to.
    return console if console.is_terminal else Console(highlight=False, width=200)


def _titled(title: str, *heads: str) -> Table:
    # wider than the title, or rich breaks it
    return Table(*heads, title=title, title_justify="left", min_width=len(title) + 2)


def _paper_table(title: str, cells: list[paper.Cell]) -> Table:
    table = _percent_table(title)
    for (method, size), row in groupby(cells, lambda cell: (cell.method, cell.size)):
        table.add_row(method, size, *(f"{c.published:g} | {c.ours:g}{_star(c)}" for c in row))
    return table


def _star(cell: paper.Cell) -> str:
    return "" if cell.ours == cell.published else " *"


def _steady_table(cells: list[paper.Cell]) -> Table:
    table = _percent_table("What a long run needs, Gbit/s (40 periods, first grid point that meets the target)")
    for (method, size), row in groupby(cells, lambda cell: (cell.method, cell.size)):
        table.add_row(method, size, *(f"{c.steady_state:g}" if c.steady_state else "more" for c in row))
    return table


def _percent_table(title: str) -> Table:
    table = _titled(title, "method", "model")
    for target in paper.TARGETS:
        table.add_column(f"{target:.0%}", justify="right")
    return table


def answer(advisor: Advisor, rows: list[Row]) -> None:
    console = _console()
    console.print(_table(advisor, rows))
    console.print(_sources(rows))
    if advisor.trouble is not None:
        console.print(_goodput(rows))
    for line in [*_batches(advisor), *_recommendation(advisor.recommend())]:
        console.print(line, soft_wrap=True)


def _table(advisor: Advisor, rows: list[Row]) -> Table:
    budget = units.show_count(advisor.tokens)
    title = f"{units.show_count(advisor.site.parameters)} parameters, {advisor.site.workers} workers"
    table = _titled(title, "method")
    heads = ("every", "busy", f"{budget} tokens", "sent/day", "received/day", "memory +", "host +", "fits", "loss +")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(row.method, *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    loss = "?" if row.quality_percent is None else f"{row.quality_percent:.1f}%"
    return [
        str(row.every),
        f"{row.utilization:.1%}",
        units.show_duration(row.seconds),
        units.show_size(row.sent_per_day),
        units.show_size(row.received_per_day),
        units.show_size(row.memory_device),
        units.show_size(row.memory_host),
        "yes" if row.fits else "no",
        loss,
    ]


def _sources(rows: list[Row]) -> str:
    lines = [f"  {row.method}: {row.quality_source}" for row in rows]
    return "\n".join(["loss + is against DDP on the same tokens, from the source named:", *lines, ""])


def _goodput(rows: list[Row]) -> Table:
    table = _titled("Goodput under failures and stragglers, by kind of round", "method")
    kinds = list(rows[0].goodput or {})
    for kind in kinds:
        table.add_column(kind, justify="right")
    for row in rows:
        table.add_row(row.method, *(f"{(row.goodput or {})[kind]:.1%}" for kind in kinds))
    return table


def _batches(advisor: Advisor) -> list[str]:
    """For unequal machines, the batches that make their steps equally long."""
    site = advisor.site
    if len(set(site.step_times)) == 1:
        return []
    batches, step = equal_batches(site.step_times, site.batch_tokens)
    shares = ", ".join(f"worker {worker}: {tokens}" for worker, tokens in enumerate(batches))
    return [f"Equal steps of {units.show_duration(step)} with batches (tokens) of {shares}.", ""]


def _recommendation(row: Row | None) -> list[str]:
    if row is None:
        return ["No method fits into this memory: use larger machines, or shard the model inside each worker."]
    fragments = f", {row.fragments} fragments" if row.fragments and row.fragments > 1 else ""
    codec = f", {row.codec}" if row.codec else ""
    setting = f"{row.method}, every {row.every}{fragments}{codec}"
    why = f"keeps the machines {row.utilization:.0%} busy"
    if row.utilization < ENOUGH:
        why += f" (nothing here reaches {ENOUGH:.0%} on this line)"
    loss = "" if row.quality_percent is None else f"; expected loss +{row.quality_percent:.1f}% ({row.quality_source})"
    return [f"Recommended: {setting}: {why}{loss}.", f"  {row.command}"]
