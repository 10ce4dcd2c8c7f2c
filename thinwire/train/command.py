"""What the commands `train`, `compare` and `report` do with their arguments."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.train import config as configs
from thinwire.train import launch, toml
from thinwire.train.config import Config
from thinwire.train.errors import UserError
from thinwire.train.run import Order, PeerGone


@dataclass
class Join:
    """The arguments of an elastic worker."""

    coordinator: str
    secret_file: Path | None
    address: str | None
    min_workers: int


@dataclass
class TrainRequest:
    """The arguments of `thinwire train`."""

    config: Path | None
    flags: dict[str, Any]  # --method, --workers and --steps, by their config keys
    sets: list[str]
    locals: list[str]
    out: Path | None
    resume: Path | None
    stop_at: int | None
    processes: int | None
    connect: str | None
    worker: int | None
    join: Join | None
    print_config: bool


def train(request: TrainRequest) -> None:
    config = _config(request)
    if request.print_config:
        print(toml.dump(config), end="")
        return
    _check_mode(request)
    with _run_folder(request.out, config.method["name"], request.resume) as folder:
        # who joined other machines knows already how they join
        words = "" if request.join or request.connect else _words(request)
        try:
            _launch(request, config, Order(folder, request.resume is not None, request.stop_at, words))
        except PeerGone as error:
            print(f"thinwire: {error}", file=sys.stderr)
            sys.exit(1)


@contextmanager
def _run_folder(out: Path | None, name: str, resume: Path | None = None) -> Iterator[Path]:
    """A run's folder. A start that fails leaves none behind, unless it was there before."""
    known = resume or (out and out.exists())
    is_ours = not known and int(os.environ.get("RANK", "0")) == 0
    folder = resume or launch.run_folder(out, name)
    try:
        yield folder
    finally:
        if is_ours and all(path.is_dir() or path.name == ".lock" for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)


def _words(request: TrainRequest) -> str:
    """The command again, without what belongs to this machine or to the way it was launched."""
    source = request.resume / "config.toml" if request.resume else request.config
    words = ["thinwire", "train", *([str(source)] if source else [])]
    for key, flag in (("method.name", "--method"), ("steps", "--steps")):
        words += [flag, str(request.flags[key])] if key in request.flags else []
    # the lines about two machines say themselves how many workers there are
    sets = _without(request.sets, {*request.flags, "workers"})
    return shlex.join(words + [word for text in sets for word in ("--set", text)])


def _without(sets: list[str], keys: set[str]) -> list[str]:
    """The words of --set, but for those of these keys."""
    return [text for text in sets if text.partition("=")[0].strip() not in keys]


def _config(request: TrainRequest) -> Config:
    """Defaults, then the file (or the resumed run's own), then --set and --local; a flag wins over --set."""
    path = request.config
    if request.resume:
        if request.config or request.out:
            raise UserError(
                "--resume DIR takes the config and the folder of that run: leave CONFIG.toml and --out away"
            )
        path = request.resume / "config.toml"
        if not path.exists():
            raise UserError(f"--resume {request.resume}: no run there (config.toml is missing)")
    config = Config(workers=0)  # 0: nobody has said yet
    if path:
        configs.load(path, config)
    for key, value in request.flags.items():
        configs.assign(config, key, value)
    for text in _without(request.sets, {*request.flags}):
        configs.override(config, text)
    for text in request.locals:
        configs.override(config, text, local_only=True)
    config.workers = config.workers or _default_workers(request, config.train.inside)
    return config


def _default_workers(request: TrainRequest, inside: str) -> int:
    """Under torchrun what was started decides: each node a worker, or each process."""
    if not launch.under_torchrun() or request.connect:
        return Config().workers
    return int(os.environ["WORLD_SIZE" if inside == "none" else "GROUP_WORLD_SIZE"])


def _check_mode(request: TrainRequest) -> None:
    modes = {
        "--processes": request.processes,
        "--connect": request.connect,
        "--join": request.join,
        "torchrun": launch.under_torchrun() or None,
    }
    chosen = [name for name, value in modes.items() if value is not None]
    if len(chosen) > 1 and ("--processes" in chosen or "--join" in chosen):
        raise UserError(f"{' and '.join(chosen)} exclude each other: choose one")
    if (request.connect is None) != (request.worker is None):
        raise UserError("--connect HOST:PORT goes with --worker I (this machine's number, from 0) and --workers N")
    if request.connect and "workers" not in request.flags:
        raise UserError("--connect needs --workers N, the number of machines, the same on each")


def _launch(request: TrainRequest, config: Config, order: Order) -> None:
    if request.join:
        launch.as_elastic(config, order, request.join)
    elif request.connect and request.worker is not None:
        launch.as_site(config, order, request.connect, request.worker)
    elif launch.under_torchrun():
        launch.in_torchrun(config, order)
    elif request.processes:
        launch.in_processes(config, order, request.processes)
    else:
        launch.in_one_process(config, order)


def compare(methods: str, config: Path | None, flags: dict[str, Any], sets: list[str], out: Path | None) -> None:
    from thinwire.train.compare import run_all

    names = [name.strip() for name in methods.split(",") if name.strip()]
    request = TrainRequest(config, flags, [], [], out, None, None, None, None, None, None, False)
    with _run_folder(out, "compare") as folder:
        run_all(names, lambda: _config(request), _without(sets, {*flags}), folder)


def report(folder: Path) -> None:
    try:
        from thinwire.report.page import write
    except ImportError as error:
        raise UserError(f"the report needs {error.name}: pip install 'thinwire[train]'") from error
    print(write(folder))
