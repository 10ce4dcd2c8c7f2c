"""`thinwire plan`: the command line of the planner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire import units
from thinwire.plan import inputs, paper, show
from thinwire.plan.advisor import Advisor, Site


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


def plan(
    context: typer.Context,
    paper_tables: Annotated[bool, typer.Option(help="The papers' utilization tables beside ours.")] = False,
    params: Annotated[str | None, _option("N", "Parameters of the model: 7e9, 350M.")] = None,
    layers: Annotated[str | None, _option("N", "Its blocks.")] = None,
    step_time: Annotated[str | None, _option("TIME", "Compute of a step: 1.2s, or each worker's: 1.2,0.8.")] = None,
    bandwidth: Annotated[
        str | None, _option("RATE", "A worker's line: 1Gbit, 40Mbit/200Mbit (up/down); or A,B,..")
    ] = None,
    latency: Annotated[str, _option("TIME", "One way: 30ms, or 30ms+-5ms with jitter.")] = "20ms",
    workers: Annotated[str | None, _option("N", "Machines or islands that exchange.")] = None,
    run: Annotated[Path | None, _option("DIR", "Take model and step time from a run.")] = None,
    probe: Annotated[bool, typer.Option(help="Measure lines and step time between a torchrun's processes.")] = False,
    tokens: Annotated[str | None, _option("N", "Budget; 20 a parameter where not given.")] = None,
    batch_tokens: Annotated[str | None, _option("N", "Of a worker's step; else 524288 over all workers.")] = None,
    gpu_memory: Annotated[str | None, _option("SIZE", "Of one worker: refuse what does not fit.")] = None,
    ram: Annotated[str | None, _option("SIZE", "Of one worker: refuse what does not fit.")] = None,
    mtbf: Annotated[str | None, _option("TIME", "Mean time between failures of one worker: 12h.")] = None,
    slow_workers: Annotated[str | None, _option("N", "How many are slow: 5%, 3, 5%x1.5 (times slower).")] = None,
    plot: Annotated[Path | None, _option("FILE", "Utilization against bandwidth: .html or .png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")] = False,
) -> None:
    """What every method costs on your link, and which one to take."""
    with _one_line():
        given = _given(context)
        if paper_tables:
            _refuse(
                given - {"--paper-tables", "--json"}, "goes without --paper-tables: these are the papers' own cases"
            )
            _paper_tables(as_json)
            return
        if probe and bandwidth is None:
            _refuse(given & {"--latency"}, "goes with --bandwidth: --probe measures the latency as well")
        known = _facts(run, params, layers, step_time, workers, batch_tokens)
        if bandwidth is not None:
            known.links = inputs.links(bandwidth, latency)
        speaks = _probe(known, step_time, bandwidth) if probe else True
        if not speaks:
            return
        site = inputs.site(known)
        budget = units.count(tokens) if tokens else inputs.TOKENS_PER_PARAMETER * site.parameters
        trouble = inputs.trouble(mtbf, slow_workers, site.workers)
        advisor = Advisor(site, budget, inputs.limits(gpu_memory, ram), trouble)
        _answer(advisor, as_json, plot)


def _given(context: typer.Context) -> set[str]:
    """The options that were written on the command line."""
    sources = {each.opts[0]: context.get_parameter_source(each.name or "") for each in context.command.params}
    return {option for option, source in sources.items() if source and source.name == "COMMANDLINE"}


def _refuse(options: set[str], why: str) -> None:
    if options:
        raise ValueError(f"{min(options)} {why}")


@contextmanager
def _one_line() -> Iterator[None]:
    """A mistake of the user's is one line and status 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"thinwire plan: {error}", err=True)
        raise typer.Exit(2) from error


def _facts(
    run: Path | None,
    params: str | None,
    layers: str | None,
    step_time: str | None,
    workers: str | None,
    batch_tokens: str | None,
) -> inputs.Facts:
    """What the run says, replaced by what the options say."""
    known = inputs.Facts()
    if run is not None:
        from thinwire.plan.run import facts_of_run

        known = facts_of_run(run)
    told = inputs.Facts(
        parameters=units.count(params) if params else None,
        layers=inputs.whole("--layers", layers) if layers else None,
        step_times=inputs.step_times(step_time) if step_time else None,
        workers=inputs.whole("--workers", workers) if workers else None,
        batch_tokens=units.count(batch_tokens) if batch_tokens else None,
    )
    if not known.same_model(told):
        known.config = None  # the run's file holds another model than the one planned
    known.update(told)
    return known


def _probe(known: inputs.Facts, step_time: str | None, bandwidth: str | None) -> bool:
    """Fill in what was measured and not told. True on the one process that speaks."""
    from thinwire.plan.probe import measure, torchrun

    if known.parameters is None or known.layers is None:
        raise ValueError("--probe also needs --params and --layers (or --run DIR)")
    with torchrun() as (rank, size):
        batch = known.batch_tokens or max(1, inputs.FLEET_BATCH // size)
        found = measure(known.parameters, known.layers, batch)
    if step_time or known.step_times:
        found.step_times = None
    if bandwidth:
        found.links = None
    known.update(found)
    return rank == 0


def _paper_tables(as_json: bool) -> None:
    cells, outside = paper.cells(), paper.out_of_sample()
    if as_json:
        typer.echo(json.dumps(_paper_json(cells, outside), indent=1))
    else:
        show.paper_tables(cells, outside)


def _paper_json(cells: list[paper.Cell], outside: list[paper.Cell]) -> dict[str, Any]:
    return {
        "cells": [asdict(cell) for cell in cells],
        "matched": sum(cell.ours == cell.published for cell in cells),
        "total": len(cells),
        "out_of_sample": [asdict(cell) for cell in outside],
    }


def _answer(advisor: Advisor, as_json: bool, plot: Path | None) -> None:
    if plot is not None:
        _plot(advisor, plot)
    rows = advisor.table()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show.answer(advisor, rows)


def _plot(advisor: Advisor, path: Path) -> None:
    from thinwire.plan.plot import RATES, plot

    plot(path, advisor.curves(RATES / 8), here=8 * advisor.site.slowest_up, title=_title(advisor.site))


def _title(site: Site) -> str:
    size, time = units.show_count(site.parameters), units.show_duration(site.step_time)
    return f"{size} parameters, {site.workers} workers, {time} a step"
