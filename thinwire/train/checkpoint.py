"""Checkpoints: one folder a step, in it one part a worker, each part complete or absent.

    DIR/checkpoint-000100/worker-0/  model.safetensors  config.json  state.pt  fleet.pt  manifest.json

Sites share no disk, so each process writes the parts of the workers it hosts, and nothing else. A part is written under
another name and renamed when it is complete; the manifest has every file's size and hash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from thinwire.train.errors import UserError

PART = re.compile(r"worker-\d+(-shard-\d+)?")

Files = dict[str, Any]  # name -> tensors for .safetensors, else what torch.save or json.dumps takes


class Damaged(Exception):
    """A part that is not what its manifest says; the text names the file."""


def folder_of(run: Path, step: int) -> Path:
    return run / f"checkpoint-{step:06d}"


def steps_in(run: Path) -> list[int]:
    """Steps with a checkpoint folder, newest first; whether they are whole is another question."""
    names = (path.name.removeprefix("checkpoint-") for path in run.glob("checkpoint-*"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def save_part(run: Path, step: int, part: str, workers: int, files: Files) -> None:
    """Write one part so that it is there whole or not at all, whenever the process is killed."""
    target = folder_of(run, step) / part
    draft = _draft(target)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, content in files.items():
        write_file(draft / name, content)
    listing = {name: [(draft / name).stat().st_size, _hash(draft / name)] for name in files}
    write_file(draft / "manifest.json", {"step": step, "workers": workers, "files": listing})
    _replace(target, draft)
    with suppress(FileNotFoundError):  # it had been saved before
        _mark(run, part).rmdir()


def mark_unsaved(run: Path, parts: Sequence[str]) -> None:
    """Until it is saved for the first time a part has a mark: where it is missing then, nothing was lost."""
    for part in parts:
        _mark(run, part).mkdir(exist_ok=True)


def is_unsaved(run: Path, part: str) -> bool:
    return _mark(run, part).exists()


def _mark(run: Path, part: str) -> Path:
    return run / f".{part}.unsaved"


def _replace(target: Path, draft: Path) -> None:
    """A folder cannot be renamed over one with files in it: the old one waits aside until the new one has its name."""
    aside = _aside(target)
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    draft.rename(target)
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(run: Path) -> None:
    """After a kill between the two renames of a part that was written again: the old one is whole, and is there."""
    for aside in run.glob("checkpoint-*/.*.old"):
        target = aside.with_name(aside.stem[1:])
        if not target.exists():
            with suppress(FileNotFoundError):  # another process was faster
                aside.rename(target)


def write_file(path: Path, content: Any) -> None:
    with _named(path):
        if path.suffix == ".safetensors":
            _write_tensors(path, content)
        elif path.suffix == ".json":
            path.write_text(json.dumps(content, indent=2))
        else:
            _write_state(path, content)
        _sync(path)


def _write_tensors(path: Path, tensors: Any) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its text has the system's reason
        raise OSError(errno.EIO, str(error)) from error


def _write_state(path: Path, state: Any) -> None:
    """Into a file of our own: of one that torch opens by itself it does not tell why a write failed."""
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # raised while the archive was closed, after the write that failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def replace_text(path: Path, text: str) -> None:
    """A small file that is the old or the new one, whole, whenever the process is killed: a resume reads it."""
    draft = _draft(path)
    try:
        with _named(path):
            draft.write_text(text)
            _sync(draft)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # of a full disk


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of writing, unlike one of opening, does not say of which file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _sync(path: Path) -> None:
    """Onto the disk: a rename must not outlive the data it promises."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def verify(run: Path, step: int, part: str, workers: int | None) -> None:
    """Raise Damaged, naming the file, unless the part is whole and of a run with so many workers."""
    folder = folder_of(run, step) / part
    name = f"{folder.parent.name}/{part}"
    stored, files = _manifest(folder)
    if stored != workers:  # the step was being written again with another number of workers
        raise Damaged(f"{name} is of a run with {stored} workers, other parts of one with {workers}")
    for file, (size, digest) in files.items():
        path = folder / file
        if not path.exists() or path.stat().st_size != size:
            found = path.stat().st_size if path.exists() else "no"
            raise Damaged(f"{name}/{file} is truncated: {found} bytes of {size}")
        if _hash(path) != digest:
            raise Damaged(f"{name}/{file} is damaged: its content is not what was written")


def _manifest(folder: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The run's number of workers, and the size and hash of each file of this part."""
    try:
        stored = json.loads((folder / "manifest.json").read_text())
        files = {name: (int(size), str(digest)) for name, (size, digest) in stored["files"].items()}
        return int(stored["workers"]), files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # absent, or other JSON than ours
        raise Damaged(f"{folder.parent.name}/{folder.name} is missing or has no manifest") from error


def load_part(run: Path, step: int, part: str) -> Files:
    """Every file of a verified part; what else lies in its folder is not ours."""
    folder = folder_of(run, step) / part
    return {name: _read(folder / name) for name in _manifest(folder)[1]}


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return torch.load(path, weights_only=True, map_location="cpu")


def parts_in(run: Path, step: int) -> list[str]:
    """The parts of a step, whole or not, by worker."""
    names = (path.name for path in folder_of(run, step).glob("worker-*"))
    return sorted(filter(PART.fullmatch, names), key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def workers_of(run: Path, step: int) -> int | None:
    """How many workers the run had at this step, by the first part that tells."""
    return next((workers for workers in manifests_in(run, step).values()), None)


def manifests_in(run: Path, step: int) -> dict[str, int]:
    """The parts of a step that have a manifest, each with the number of workers that its run had."""
    found = dict[str, int]()
    for part in parts_in(run, step):
        with suppress(Damaged):  # told when it is verified
            found[part] = _manifest(folder_of(run, step) / part)[0]
    return found


def agree(listings: list[list[int]]) -> int:
    """The newest step that all have, or an error that says who lacks which."""
    common = set.intersection(*map(set, listings))
    if common:
        return max(common)
    having = (f"process {i} has {', '.join(map(str, steps)) or 'none'}" for i, steps in enumerate(listings))
    raise UserError(f"no checkpoint that all have: {'; '.join(having)}: copy a missing one, or start anew")


def drop_others(run: Path, parts: Sequence[str], kept: Sequence[int]) -> None:
    """Drop these parts of all steps but the kept ones."""
    for step in steps_in(run):
        if step not in kept:
            drop(run, step, parts)


def drop_strangers(run: Path, workers: Container[int], kept: Sequence[int]) -> None:
    """Drop the parts of workers that the run no longer has: of all steps but the kept ones, which have them still."""
    for step in steps_in(run):
        if step not in kept:
            drop(run, step, [part for part in parts_in(run, step) if int(part.split("-")[1]) not in workers])


def drop(run: Path, step: int, parts: Sequence[str]) -> None:
    """Drop these parts of a step, and what was begun of them."""
    folder = folder_of(run, step)
    for part in parts:
        for path in (_draft(folder / part), _aside(folder / part), folder / part):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # other processes have parts in it still, or were faster
        folder.rmdir()
