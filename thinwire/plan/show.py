"""The planner's answers as tables and words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from thinwire import units
from thinwire.plan import paper
from thinwire.plan.advisor import ENOUGH, Advisor, Row, equal_batches

# heads of columns that a narrow terminal leaves out, the first to go in front
LEFT_OUT = ("host +", "received/day", "memory +", "sent/day", "fits", "every")
GOODPUT_LEFT_OUT = ("eager", "quorum")
TARGETS_LEFT_OUT = ("80%", "95%", "50%", "99%")
NAME = 20  # columns of the terminal that a name has at the least

Lines = list[tuple[str, ...]]  # of a table: the cells of each row


def paper_tables(cells: list[paper.Cell], outside: list[paper.Cell]) -> None:
    """Published and ours, side by side; a star marks a cell that differs."""
    console = _console()
    _print_paper(console, "Gbit/s for a compute utilization of .. (published | ours)", _both(cells))
    matched = sum(cell.ours == cell.published for cell in cells)
    console.print(f"{matched} of {len(cells)} cells equal; both name the last grid point below the target.\n")
    _print_paper(console, "Out of sample: scaling laws, DiLoCo (published | ours)", _both(outside))
    title = "What a long run needs, Gbit/s (40 periods, first grid point that meets the target)"
    _print_paper(console, title, _steady(cells))


def _console() -> Console:
    console = Console(highlight=False)
    # Piped into a file there is no width to keep to.
    return console if console.is_terminal else Console(highlight=False, width=200)


def _print(console: Console, title: str, heads: Sequence[str], lines: Lines, leave: Sequence[str]) -> None:
    """A table that is as wide as the terminal at the most: columns of `leave` are left out one by one until it is."""
    left_out = 0
    while left_out < len(leave) and not _fits(console, _table(heads, lines, leave[:left_out])):
        left_out += 1
    console.print(title, style="italic", soft_wrap=True)
    console.print(_table(heads, lines, leave[:left_out]))
    if left_out:
        console.print(f"Left out, as the terminal is narrow: {', '.join(leave[:left_out])}.", soft_wrap=True)


def _fits(console: Console, table: Table) -> bool:
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum <= console.width


def _table(heads: Sequence[str], lines: Lines, without: Sequence[str]) -> Table:
    """Names, the first column, may take several lines; no number is ever cut."""
    shown = [index for index, head in enumerate(heads) if head not in without]
    table = Table()
    for index in shown:
        width = max(len(text) for text in (heads[index], *(line[index] for line in lines)))
        if index:
            table.add_column(heads[index], justify="right", no_wrap=True, min_width=width)
        else:
            table.add_column(heads[index], min_width=min(width, NAME))
    for line in lines:
        table.add_row(*(line[index] for index in shown))
    return table


def _print_paper(console: Console, title: str, lines: Lines) -> None:
    heads = ["method", "model", *(f"{target:.0%}" for target in paper.TARGETS)]
    _print(console, title, heads, lines, TARGETS_LEFT_OUT)


def _both(cells: list[paper.Cell]) -> Lines:
    return [
        (method, size, *(f"{c.published:g} | {c.ours:g}{_star(c)}" for c in row))
        for (method, size), row in groupby(cells, lambda cell: (cell.method, cell.size))
    ]


def _star(cell: paper.Cell) -> str:
    return "" if cell.ours == cell.published else " *"


def _steady(cells: list[paper.Cell]) -> Lines:
    return [
        (method, size, *(f"{c.steady_state:g}" if c.steady_state else "more" for c in row))
        for (method, size), row in groupby(cells, lambda cell: (cell.method, cell.size))
    ]


def answer(advisor: Advisor, rows: list[Row]) -> None:
    console = _console()
    _print_costs(console, advisor, rows)
    console.print(_sources(rows))
    if advisor.trouble is not None:
        _print_goodput(console, rows)
    for line in [*_batches(advisor), *_recommendation(advisor)]:
        console.print(line, soft_wrap=True)


def _print_costs(console: Console, advisor: Advisor, rows: list[Row]) -> None:
    budget = units.show_count(advisor.tokens)
    title = f"{units.show_count(advisor.site.parameters)} parameters, {advisor.site.workers} workers"
    duration = f"{budget} tokens"
    costs = ("every", "busy", duration, "sent/day", "received/day", "memory +", "host +", "fits", "loss +")
    lines = [(row.method, *_cells(row)) for row in rows]
    _print(console, title, ("method", *costs), lines, (*LEFT_OUT, duration))


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


def _print_goodput(console: Console, rows: list[Row]) -> None:
    kinds = list(rows[0].goodput or {})
    lines = [(row.method, *(f"{(row.goodput or {})[kind]:.1%}" for kind in kinds)) for row in rows]
    _print(
        console, "Goodput under failures and stragglers, by kind of round", ("method", *kinds), lines, GOODPUT_LEFT_OUT
    )


def _batches(advisor: Advisor) -> list[str]:
    """For unequal machines, the batches that make their steps equally long."""
    site = advisor.site
    if len(set(site.step_times)) == 1:
        return []
    batches, step = equal_batches(site.step_times, site.batch_tokens)
    shares = ", ".join(f"worker {worker}: {tokens}" for worker, tokens in enumerate(batches))
    return [f"Equal steps of {units.show_duration(step)} with batches (tokens) of {shares}.", ""]


def _recommendation(advisor: Advisor) -> list[str]:
    if advisor.site.workers == 1:
        return ["One worker exchanges nothing: train without any method, or plan for --workers 2 or more."]
    row = advisor.recommend()
    if row is None:
        return ["No method fits into this memory: use larger machines, or shard the model inside each worker."]
    fragments = f", {row.fragments} fragments" if row.fragments and row.fragments > 1 else ""
    codec = f", {row.codec}" if row.codec else ""
    setting = f"{row.method}, every {row.every}{fragments}{codec}"
    why = f"keeps the machines {row.utilization:.0%} busy{_why_not_more(advisor, row.utilization)}"
    loss = "" if row.quality_percent is None else f"; expected loss {row.quality_percent:+.1f}% ({row.quality_source})"
    return [f"Recommended: {setting}: {why}{loss}.", f"  {row.command}"]


def _why_not_more(advisor: Advisor, utilization: float) -> str:
    """What holds a recommendation below `ENOUGH`, if it is: the machines, the line, or both."""
    if utilization >= ENOUGH:
        return ""
    allowed = f"{advisor.site.balance:.0%}"
    if utilization >= advisor.enough:
        return f" (their unequal steps allow {allowed}: take the batches above)"
    unequal = len(set(advisor.site.step_times)) > 1
    goal = f"{ENOUGH:.0%} of the {allowed} that unequal steps allow" if unequal else f"{ENOUGH:.0%}"
    return f" (nothing here reaches {goal} on this line)"
