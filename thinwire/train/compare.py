"""`thinwire compare`: the same model, data order, seeds and tokens for each method, in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from thinwire import units
from thinwire.report import words
from thinwire.train import checkpoint, data, launch, models, optimizers
from thinwire.train import config as configs
from thinwire.train.config import Config
from thinwire.train.errors import UserError, as_user_error, nearest
from thinwire.train.ledger import finite
from thinwire.train.methods import build_method, method_keys, methods, refuse_optimizer
from thinwire.train.run import Order

Planned = list[tuple[str, Config]]  # label and config of each run


def run_all(names: list[str], fresh: Callable[[], Config], sets: list[str], folder: Path) -> None:
    """One run a method under `folder`, each with its entry in compare.json, then the report and the table."""
    if not names:
        raise UserError("--methods names no method: for example --methods ddp,desloc,diloco")
    _refuse_unknown(names, sets)
    planned = [(label, _configured(fresh(), name, sets)) for label, name in zip(_labels(names), names, strict=True)]
    if any((folder / name).exists() for name in ("compare.json", *(label for label, _ in planned))):
        raise UserError(f"{folder} holds a comparison already, or a part of one: choose another --out")
    if any((folder / name).exists() for name in ("config.toml", "metrics.jsonl")):
        raise UserError(f"{folder} holds a run, whose report the comparison's would replace: choose another --out")
    _refuse_unfit(planned)
    results: list[dict[str, Any]] = []
    try:
        for label, config in planned:
            print(f"{len(results) + 1}/{len(planned)} {label}", file=sys.stderr, flush=True)
            results.append(_one(label, config, folder / label))
            checkpoint.replace_text(folder / "compare.json", json.dumps([*map(finite, results)], indent=2))
    except BaseException:  # Ctrl-C too: what is finished is not lost
        if results:
            done = ", ".join(result["label"] for result in results)
            print(f"finished {len(results)} of {len(planned)}: {done}: thinwire report {folder}", file=sys.stderr)
        raise
    _show(results, folder)


def _labels(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}-{names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _refuse_unknown(names: list[str], sets: list[str]) -> None:
    """A method key that none of the methods has is a mistake; one that some have not is left out for those."""
    known = {key for name in names for key in method_keys(name)}
    for key in filter(None, map(_method_key, sets)):
        if key not in known:
            raise UserError(f"none of these methods has 'method.{key}': {nearest(key, known)}")


def _method_key(text: str) -> str | None:
    """The key of the method that `key=value` sets, by its full name or its last part; None for other sections' keys."""
    section, _, name = text.partition("=")[0].strip().rpartition(".")
    others = {key.rpartition(".")[2] for key in [*configs.keys()]}
    of_any = {key for method in methods() for key in method_keys(method)}
    return name if section == "method" or (not section and name in of_any - others) else None


def _configured(config: Config, name: str, sets: list[str]) -> Config:
    """The common config with this method; a method key that it does not have is left out for it."""
    configs.assign(config, "method.name", name)
    for text in sets:
        key = _method_key(text)
        if key is None or key in method_keys(name):
            configs.override(config, text)
    return config


def _refuse_unfit(planned: Planned) -> None:
    """What does not go with this model and optimizer is said before the first run, not after hours of others."""
    common = planned[0][1]
    data.resolve(common)
    with as_user_error():
        model = _shapes(common)
        inner = optimizers.build(model, common.optimizer)
        replica = tw.Replica(model, inner if len(inner) > 1 else inner[0])
    for label, config in planned:
        try:
            method = build_method(config.method, model)
            refuse_optimizer(method, common.optimizer)
            tw.Fleet([replica], method, tw.Local(), clip=config.train.clip or None)
        except ValueError as error:
            raise UserError(f"{label} cannot run here, so none was started: {error}") from error


def _shapes(config: Config) -> torch.nn.Module:
    """The model without its values. Vocabulary and channels are the data's; no method depends on them."""
    if config.model.kind == "hf":  # transformers loads weights to memory only
        return models.build(config, vocabulary=2)
    with torch.device("meta"):
        return models.build(config, vocabulary=2, channels=3)


def _one(label: str, config: Config, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    config.logging.report = False
    summary = launch.in_one_process(config, Order(folder, quiet=True))
    if summary is None:
        raise SystemExit(130)
    return summary | {"label": label, "run": folder.name}


def _show(results: list[dict[str, Any]], folder: Path) -> None:
    print(f"{'method':<22}{'loss':>9}{'perplexity':>12}{'bytes sent':>12}{'than DDP':>14}{'time':>10}")
    for result in results:
        size, time = units.show_size(result["bytes_sent"]), units.show_duration(result["seconds"])
        print(
            f"{result['label']:<22}{result['loss']:>9.4f}{words.perplexity(result['perplexity']):>12}{size:>12}"
            f"{words.against_ddp(result['bytes_sent'], result['bytes_ddp']):>14}{time:>10}"
        )
    print(f"\nruns    {folder}")
    try:
        from thinwire.report.page import write
    except ImportError as error:
        print(f"no report.html: {error.name} is not installed (pip install 'thinwire[train]')", file=sys.stderr)
        return
    print(f"report  {write(folder)}")
