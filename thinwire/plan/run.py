"""Model and step time of a finished or running run, from its directory."""

from __future__ import annotations

import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.plan.inputs import Facts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WARM_UP = 5  # the first steps compile, allocate and open connections


def facts_of_run(folder: Path) -> Facts:
    """Parameters, layers, workers, batch and step time; a line says what the directory lacks."""
    config, steps = _config(folder), _metrics(folder)
    workers = _took_part(steps) or config.get("workers")
    parameters = config.get("parameters")
    if not isinstance(parameters, int) or parameters < 1:
        raise ValueError(f"{folder}/config.toml has no `parameters`: was it written by thinwire train?")
    return Facts(
        parameters=parameters,
        layers=_layers(config),
        step_times=[_step_time(steps, folder)],
        workers=workers,
        batch_tokens=_batch_tokens(steps, workers) or _configured_batch(config),
        config=str(folder / "config.toml"),
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "config.toml").read_text())
    except FileNotFoundError as error:
        raise ValueError(f"--run {folder}: no config.toml there; give the directory of a thinwire train run") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--run {folder}: config.toml cannot be read: {error}") from error


def _metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines; the last may be half written while the run goes on."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--run {folder}: no metrics.jsonl that can be read there") from error
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return [record for record in records if isinstance(record, dict)]


def _step_time(records: list[dict[str, Any]], folder: Path) -> float:
    """The median compute of a step, waiting for the link left out."""
    times = [r["compute_seconds"] for r in records if isinstance(r.get("compute_seconds"), (int, float))]
    if not times:
        raise ValueError(f"--run {folder}: metrics.jsonl has no compute_seconds yet; let the run take a few steps")
    return float(statistics.median(times[_WARM_UP:] or times))


def _took_part(records: list[dict[str, Any]]) -> int | None:
    """The median of an elastic run, whose config does not tell who came. None: the run is not elastic."""
    counts = [r["workers"] for r in records if "committed" in r and isinstance(r.get("workers"), int)]
    return statistics.median_low(counts) if counts else None


def _layers(config: dict[str, Any]) -> int | None:
    """The run's blocks; its preset's where the config says 0. None (an HF or image model) must be told by --layers."""
    from thinwire.train.models import PRESETS

    model = config.get("model", {})
    preset = PRESETS.get(str(model.get("preset"))) if model.get("kind") in (None, "auto", "llama") else None
    return model.get("layers") or (preset.layers if preset else None)


def _batch_tokens(records: list[dict[str, Any]], workers: int | None) -> int | None:
    """Of one worker's step, as the run counted them: images where it trains on images, and unequal batches too."""
    counted = [r for r in records if isinstance(r.get("tokens"), int) and isinstance(r.get("step"), int)]
    shares = [
        (after["tokens"] - before["tokens"]) / (after["step"] - before["step"]) / (after.get("workers") or workers or 1)
        for before, after in pairwise(counted)
        if after["step"] > before["step"]
    ]
    return max(1, round(statistics.median(shares))) if shares else None


def _configured_batch(config: dict[str, Any]) -> int | None:
    train, model = config.get("train", {}), config.get("model", {})
    sizes = [train.get("batch"), train.get("accumulate", 1), model.get("context")]
    return sizes[0] * sizes[1] * sizes[2] if all(isinstance(size, int) for size in sizes) else None
