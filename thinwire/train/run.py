"""One run in one process: set up, train, save, and say what came of it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import thinwire as tw
from thinwire.report import metrics
from thinwire.train import checkpoint, data, toml, weights
from thinwire.train.config import Config, shared
from thinwire.train.errors import UserError, as_user_error, file_line, memory_as_user_error
from thinwire.train.graphs import work_for
from thinwire.train.ledger import Ledger, finite
from thinwire.train.loop import Trainer
from thinwire.train.models import export_config
from thinwire.train.place import Place
from thinwire.train.progress import Talker, talker
from thinwire.train.resume import Keeper
from thinwire.train.summary import show, summarise
from thinwire.train.work import build_team

PACKAGES = ("thinwire", "torch", "numpy", "safetensors", "tokenizers", "transformers", "datasets", "torchft", "plotly")

# what says how a run was launched: its config.toml does not
LAUNCH = ("--processes", "--connect", "--workers", "--worker", "--join", "--secret-file", "--address", "--min-workers")


@dataclass
class Order:
    """What the command line asks of a run, beside its config."""

    folder: Path
    resume: bool = False
    stop_at: int | None = None
    words: str = "thinwire train"  # the command that made this run, for the lines about two machines; empty = none
    quiet: bool = False  # a comparison shows one table for all its runs


def run(config: Config, place: Place, order: Order) -> dict[str, Any] | None:
    """Train; the summary of a run that reached its last step, else None."""
    _refuse_names(config, order.folder)
    data.resolve(config)
    try:
        place.notes.keep_watch()
        _compare(config, place)
        with _claimed(order.folder, place, order.resume), memory_as_user_error():
            trainer = _set_up(config, place)
            talk = talker(place.writes and not order.quiet, config.steps, trainer.step)
            try:
                return _run(trainer, order, talk)
            finally:
                talk.close()
    except tw.PeerLost as error:
        raise PeerGone(f"ended while setting up: {error}") from error


def _refuse_names(config: Config, folder: Path) -> None:
    """Config and report are UTF-8: a name that is not cannot stand in them."""
    for text in (str(folder), *toml.dump(config).splitlines()):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(text.partition("  # ")[0]).decode(errors="backslashreplace").strip()
            raise UserError(f"{shown}: the name is not UTF-8: rename the file or folder") from error


def _set_up(config: Config, place: Place) -> Trainer:
    dataset = data.load(config)
    _refuse_other_tokenizers(dataset, place)
    team = build_team(config, place, dataset)
    config.parameters = sum(p.numel() for p in team.replicas[0].module.parameters() if p.requires_grad)
    return Trainer(config, place, dataset, team, work_for(team, config, place))


def _refuse_other_tokenizers(dataset: data.Dataset, place: Place) -> None:
    """The same numbers would stand for other tokens, and the model learn neither."""
    if len({str(settings) for settings in place.notes.exchange(dataset.settings())}) > 1:
        place.notes.leave()  # every process refuses
        raise UserError(
            f"workers have different tokenizers, as bpe is learnt from each one's own text; this one's is "
            f"{dataset.tokenizer}: copy one of them to all machines, under one name, and set data.tokenizer to it"
        )


def _run(trainer: Trainer, order: Order, talk: Talker) -> dict[str, Any] | None:
    config, place = trainer.config, trainer.place
    keeper = Keeper(order.folder, config, place, talk)
    if order.resume:
        with as_user_error():
            keeper.restore(trainer)
        _refuse_what_is_behind(trainer, order)
        talk.say(f"resumed {order.folder} at step {trainer.step}")
    else:
        trainer.open_fleet(config.method)
    if place.elastic:
        trainer.join(talk.say)
    try:
        with _leaving_nothing(trainer, order):
            return _go_on(trainer, order, talk, keeper)
    except (ConnectionError, TimeoutError):  # of a network, not of a disk
        raise
    except OSError as error:
        raise OSError(_unsaved(trainer, order, keeper, error)) from error


@contextmanager
def _leaving_nothing(trainer: Trainer, order: Order) -> Iterator[None]:
    """A new run that fails within its first step, for want of memory say, leaves no files that would pass for one."""
    before = set(order.folder.rglob("*"))
    try:
        yield
    except Exception:
        is_alone = trainer.place.notes.processes == 1  # else another process may go on, and save
        if is_alone and not trainer.step and not order.resume:
            for path in sorted({*order.folder.rglob("*")} - before, reverse=True):  # a folder after what is in it
                with suppress(OSError):  # W&B may be writing to its own yet
                    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        raise


def _refuse_what_is_behind(trainer: Trainer, order: Order) -> None:
    for flag, goal in (("--steps", trainer.config.steps), ("--stop-at", order.stop_at)):
        if goal is not None and goal < trainer.step:
            trainer.place.notes.leave()  # every process refuses alike
            raise UserError(f"{order.folder} is at step {trainer.step} already: {flag} {goal} is behind it")


def _unsaved(trainer: Trainer, order: Order, keeper: Keeper, error: OSError) -> str:
    whole = [checkpoint.folder_of(order.folder, step) for step in keeper.whole[-1:]]
    last = f"the last whole checkpoint is {whole[0]}" if whole else "there is no checkpoint yet"
    if not (order.folder / "config.toml").exists():
        return f"cannot begin in {order.folder}: {file_line(error)}; free space and start again"
    again = _again(order.folder)
    return f"cannot save at step {trainer.step}: {file_line(error)}; {last}; free space and go on with: {again}"


def _go_on(trainer: Trainer, order: Order, talk: Talker, keeper: Keeper) -> dict[str, Any] | None:
    """From the step where the trainer is to where it is to stop."""
    config, place = trainer.config, trainer.place
    sinks = _sinks(trainer, order, talk) if place.writes else []
    keeper.begin()
    every = 1 if place.notes.processes == 1 and place.device.type == "cpu" else config.logging.every
    ledger = Ledger(place.notes, every, sinks, talk.show)
    until = min(config.steps, order.stop_at or config.steps)
    with _closing(ledger):
        try:
            with _stopping_on_signals(ledger, place):
                why = trainer.train(until, ledger, keeper)
            keeper.save(trainer)
            summary = _finish(trainer, order, talk) if trainer.step == config.steps else None
            place.notes.leave()
        except tw.PeerLost as error:
            folder = _save_alone(trainer, ledger, keeper)
            what = str(error).split(" ([")[0]  # without the network library's own words
            raise PeerGone(f"stopped after step {trainer.step}: {what}; saved {folder}") from error
    if place.elastic and summary is not None:
        place.transport.leave("finished")
    if summary is None:
        reason = why or f"--stop-at {order.stop_at}"
        talk.say(f"stopped after step {trainer.step} ({reason}); go on with: {_again(order.folder)}")
    return summary


@contextmanager
def _closing(ledger: Ledger) -> Iterator[None]:
    """On a full disk closing fails too: what failed first is what is told."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            ledger.close()
        raise
    ledger.close()


def _again(folder: Path) -> str:
    """The command that goes on with a run, launched as this one was."""
    return shlex.join(["thinwire", "train", "--resume", str(folder), *_launch_words(sys.argv[1:])])


def _launch_words(arguments: Sequence[str]) -> list[str]:
    """Those of the command line that say who meets where; `--workers` too where it is about machines."""
    given = dict[str, str]()
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        given |= {flag: value if equals else following} if flag in LAUNCH else {}
    if "--connect" not in given:
        given.pop("--workers", None)
    return [word for flag in LAUNCH if flag in given for word in (flag, given[flag])]


def _save_alone(trainer: Trainer, ledger: Ledger, keeper: Keeper) -> Path:
    """A peer is gone: keep what there is."""
    ledger.write_own()
    trainer.step = trainer.steps_taken()
    keeper.save_alone(trainer)
    return checkpoint.folder_of(keeper.run, trainer.step)


class PeerGone(Exception):
    """The run ended because a peer did; the text names it."""


def _finish(trainer: Trainer, order: Order, talk: Talker) -> dict[str, Any]:
    """Take the last steps into the weights, export them, and report."""
    trainer.fleet.finish()
    summary = summarise(trainer)
    tensors = weights.whole(trainer.team.replicas[0].module)
    if trainer.place.writes:
        _export(trainer, order.folder, tensors)
        checkpoint.replace_text(order.folder / "summary.json", json.dumps(finite(summary), indent=2))
        report = _report(trainer.config, order.folder, talk)
        if not order.quiet:
            talk.close()
            show(summary, order.folder, report, order.words)
    return summary


def _export(trainer: Trainer, folder: Path, tensors: Any) -> None:
    described = export_config(trainer.team.replicas[0].module)
    files = {"model.safetensors": tensors} | ({"config.json": described} if described else {})
    if trainer.data.tokenizer:
        files["tokenizer.json"] = json.loads(trainer.data.tokenizer.read_text(encoding="utf-8"))
    target = folder / "model"
    target.mkdir(exist_ok=True)
    for name, content in files.items():
        checkpoint.write_file(target / name, content)


def _report(config: Config, folder: Path, talk: Talker) -> Path | None:
    if not config.logging.report:
        return None
    try:
        from thinwire.report.page import write_run
    except ImportError as error:
        talk.say(f"no report.html: {error.name} is not installed (pip install 'thinwire[train]')")
        return None
    try:
        return write_run(folder)
    except UserError as error:  # nothing in metrics.jsonl
        talk.say(f"no report.html: {error}")
        return None


def _compare(config: Config, place: Place) -> None:
    """Refuse to start where workers disagree, with both sides' values."""
    mine, everybody = shared(config), place.notes.exchange(shared(config))
    for process, theirs in enumerate(everybody):
        differing = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
        if differing:
            place.notes.leave()  # every process finds a difference, and each must hear of it
            key = differing[0]
            who = f"this process has {mine.get(key)!r}, process {process} has {theirs.get(key)!r}"
            raise UserError(f"workers disagree on {key}: {who}; give all the same (local keys may differ with --local)")


@contextmanager
def _claimed(folder: Path, place: Place, resume: bool) -> Iterator[None]:
    """The run folder is this run's alone while it goes. All processes hear of it where it cannot be."""
    lock, trouble = _lock(folder, resume) if place.writes else (None, "")
    if heard := next(filter(None, place.notes.exchange(trouble)), ""):
        place.notes.leave()
        raise UserError(heard)
    try:
        yield
    finally:
        if lock:
            lock.close()


def _lock(folder: Path, resume: bool) -> tuple[IO[str] | None, str]:
    """The folder's lock, or why it is not to be had."""
    if not resume and (trouble := _occupied(folder)):
        return None, trouble
    try:
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None, f"{folder} is in use by another run: give each worker its own --out"
    except OSError as error:
        return None, file_line(error)
    return lock, ""


def _occupied(folder: Path) -> str:
    """Why no new run can begin here; a config.toml is what makes a run that can be resumed."""
    if (folder / "compare.json").exists():
        return f"{folder} holds a comparison, whose report the run's would replace: give another --out"
    if (folder / "config.toml").exists():
        return f"{folder} holds a run already: {_again(folder)}, or another --out"
    if checkpoint.steps_in(folder) or metrics.read(folder / "metrics.jsonl"):
        return f"{folder} holds a run that has lost its config.toml: put that back, or give another --out"
    return ""


def _sinks(trainer: Trainer, order: Order, talk: Talker) -> list[metrics.Sink]:
    """Where records go. A new run that cannot begin leaves no files that would pass for one."""
    try:
        return _open_sinks(trainer, order.folder, talk)
    except OSError:
        for name in () if order.resume else ("metrics.jsonl", "versions.json", "config.toml"):
            (order.folder / name).unlink(missing_ok=True)
        raise


def _open_sinks(trainer: Trainer, folder: Path, talk: Talker) -> list[metrics.Sink]:
    """What came after the checkpoint is dropped from the records, since it will be written again."""
    config = trainer.config
    checkpoint.replace_text(folder / "config.toml", toml.dump(config))
    last = metrics.cut_after(folder / "metrics.jsonl", trainer.step)
    if last:
        trainer.last, trainer.seconds_before = last, last["seconds"]
        # a fleet that was opened anew (another number of workers) counts from zero
        trainer.wire_before = {key: max(0, last[key] - getattr(trainer.fleet, key)) for key in trainer.wire_before}
    (folder / "summary.json").unlink(missing_ok=True)  # of an earlier end, if this run goes on
    checkpoint.replace_text(folder / "versions.json", json.dumps(versions(), indent=2))
    sinks: list[metrics.Sink] = [metrics.Lines(folder / "metrics.jsonl")]
    if config.logging.tensorboard:
        sinks += _optional(lambda: metrics.TensorBoard(folder / "tensorboard", trainer.step + 1), "TensorBoard", talk)
    if config.logging.wandb:
        sinks += _optional(lambda: metrics.WandB(config.logging.wandb, folder, asdict(config)), "W&B", talk)
    return sinks


def _optional(make: Any, name: str, talk: Talker) -> list[metrics.Sink]:
    try:
        return [make()]
    except ImportError as error:
        talk.say(f"no {name}: {error.name} is not installed")
        return []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def _stopping_on_signals(ledger: Ledger, place: Place) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask all workers to stop after the same step; a second Ctrl-C ends this process at once."""

    def ask(number: int, frame: Any) -> None:
        ledger.stop_asked = f"{signal.Signals(number).name} on worker {place.hosted[0]}"
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    if place.elastic:
        place.transport.asked_to_stop = lambda: bool(ledger.stop_asked)
    try:
        yield
    finally:
        if place.elastic:
            place.transport.asked_to_stop = lambda: False  # finishing tries again whatever is lost
        for number, handler in before.items():
            signal.signal(number, handler)
