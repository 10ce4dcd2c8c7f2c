"""What came of a run: its loss, its bytes, and the same for DDP."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thinwire as tw
from thinwire import units
from thinwire.report import words
from thinwire.site import likely_address

if TYPE_CHECKING:
    from thinwire.report.metrics import Record
    from thinwire.train.loop import Trainer


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The numbers of a finished run; the loss is that of the exported weights, on held-out data where there is some."""
    config, last = trainer.config, _last(trainer)
    held = trainer.held_loss()
    loss = last["loss"] if held is None else held
    loss = math.nan if loss is None else loss  # as metrics.jsonl has it where training diverged
    # over the steps in which the bytes were sent: an elastic worker may have come when others had taken most, or all
    ddp = tw.cost(tw.ddp(), trainer.team.replicas[0].module, config.workers).bytes(trainer.own_steps)
    return {
        "method": config.method["name"],
        "loss": loss,
        "held_out": held is not None,
        "perplexity": math.exp(min(loss, 700.0)),
        "bytes_sent": last["bytes_sent"],
        "bytes_ddp": ddp,
        "bytes_vs_ddp": last["bytes_sent"] / ddp if ddp else math.nan,
        "wire_sent": last["wire_sent"],
        "wire_received": last["wire_received"],
        "seconds": last["seconds"],
        "steps": config.steps,
        "tokens": last["tokens"],
        "workers": trainer.fleet.workers,
        "parameters": config.parameters,
    }


def _last(trainer: Trainer) -> Record:
    """The last step's record, or what is known without metrics.jsonl: it is lost, and no step was left to take."""
    return trainer.last or {"loss": None, "seconds": 0.0, "tokens": trainer.tokens} | trainer.sent()


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The closing table, label and value."""
    sent, ddp = summary["bytes_sent"], summary["bytes_ddp"]
    return [
        ("method", summary["method"]),
        ("held-out loss" if summary["held_out"] else "training loss", f"{summary['loss']:.4f}"),
        ("perplexity", words.perplexity(summary["perplexity"])),
        ("bytes sent per worker", units.show_size(sent)),
        ("the same for DDP", units.show_size(ddp)),
        ("ratio", words.against_ddp(sent, ddp) if sent else "nothing sent: the run is shorter than a period"),
        ("time", units.show_duration(summary["seconds"])),
    ]


def show(summary: dict[str, Any], folder: Path, report: Path | None, command: str) -> None:
    """The end of a run, on stdout."""
    print_table(rows(summary))
    print(f"run     {folder}")
    if report:
        print(f"report  {report}")
    if not command:
        return
    address = likely_address()
    print(f"\nOn two machines, this one at {address}:")
    for worker, place in enumerate(("here", "there")):
        print(f"  {command} --connect {address}:29500 --workers 2 --worker {worker}   # {place}")


def print_table(pairs: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in pairs)
    for label, value in pairs:
        print(f"{label:<{width}}  {value}")
