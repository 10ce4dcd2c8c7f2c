"""Data: examples by number, and each worker's own, endless and resumable stream of them."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.report import words
from thinwire.train.config import LARGEST_VOCABULARY, Config
from thinwire.train.config import Data as DataConfig
from thinwire.train.errors import UserError
from thinwire.train.tokens import Encoded, Tokens, encode, mark_of

Batch = tuple[Tensor, Tensor]  # inputs, targets

TEXTS = ("stdlib", "text", "hf")  # the values of data.kind that go through a tokenizer

# A key that names what to train, or on what: the key that decides whether it is looked at, and the values of that for
# which it is. What only tunes one optimizer, schedule or kind of data may stand beside another: one line tries several.
USED_FOR = {
    "model.preset": ("model.kind", ("llama", "resnet")),
    "model.path": ("model.kind", ("hf",)),
    "model.layers": ("model.kind", ("llama",)),
    "model.width": ("model.kind", ("llama",)),
    "model.heads": ("model.kind", ("llama",)),
    "model.hidden": ("model.kind", ("llama",)),
    "model.tied": ("model.kind", ("llama",)),
    "data.files": ("data.kind", ("text", "tokens", "images")),
    "data.dataset": ("data.kind", ("hf",)),
    "data.column": ("data.kind", ("hf",)),
    "data.tokenizer": ("data.kind", TEXTS),
    "optimizer.momentum": ("optimizer.name", ("sgd", "muon")),
}

SUFFIXES = {"tokens": {".bin", ".npy"}, "images": {".npz"}}  # files that are not text, by data.kind


class Examples(Protocol):
    def __len__(self) -> int: ...

    def take(self, indices: list[int]) -> Batch: ...


@dataclass
class Windows:
    """Example i is the i-th stretch of `context` tokens; its targets are one token further on."""

    tokens: Tokens
    context: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def take(self, indices: list[int]) -> Batch:
        size = self.context
        rows = np.stack([self.tokens[i * size : (i + 1) * size + 1] for i in indices]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass
class Images:
    images: Tensor  # (count, channels, height, width), fp32 in 0..1
    labels: Tensor  # (count,)

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: list[int]) -> Batch:
        return self.images[indices], self.labels[indices]


@dataclass
class Dataset:
    train: Examples
    held: Examples
    vocabulary: int  # tokens, or classes of images
    channels: int = 0  # of images; 0 for text
    tokenizer: Path | None = None  # the tokenizer.json of a text that is not read as bytes

    def settings(self) -> dict[str, str]:
        """What the workers must agree on that no key says: files may differ, and bpe is learnt from them."""
        return {"tokenizer": mark_of(self.tokenizer)} if self.tokenizer else {}


class Shard:
    """One worker's stream: every M-th example of an order that is drawn anew for each epoch.

    `base` examples were used up before this shard began (by a run with another number of workers).
    """

    def __init__(self, examples: Examples, worker: int, workers: int, seed: int) -> None:
        if len(examples) < workers:
            raise UserError(
                f"the data has {len(examples)} examples for {words.workers(workers)}: "
                "use more data or a shorter context"
            )
        self.examples, self.worker, self.workers = examples, worker, workers
        self.seed = self.first_seed = seed
        self.base = self.taken = 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def next(self, count: int) -> Batch:
        first = self.base + self.worker
        indices = [self._index(first + (self.taken + i) * self.workers) for i in range(count)]
        self.taken += count
        return self.examples.take(indices)

    def give_back(self, count: int) -> None:
        """The last examples led to nothing: they come next again."""
        self.taken -= count

    def _index(self, position: int) -> int:
        epoch, at = divmod(position, len(self.examples))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        return int(self._order[at])

    def take_place(self, number: int) -> None:
        """Be the shard of that number; beyond the number of shards, one of another order of the same examples."""
        again, worker = divmod(number, self.workers)
        seed = self.first_seed + 7919 * again
        if (worker, seed) != (self.worker, self.seed):
            self.worker, self.seed, self._epoch = worker, seed, -1

    def state_dict(self) -> dict[str, int]:
        return {"base": self.base, "taken": self.taken, "workers": self.workers}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["workers"] == self.workers:
            self.base, self.taken = state["base"], state["taken"]
        else:  # go on behind all that the other number of workers has used
            self.base, self.taken = state["base"] + state["taken"] * state["workers"], 0


def resolve(config: Config) -> None:
    """Replace `auto` by what the data and the model ask for."""
    data, model = config.data, config.model
    if data.kind == "auto":
        data.kind = _kind(data, model.kind)
    images = data.kind in ("digits", "images")
    if model.kind == "auto":
        model.kind = "resnet" if images else "llama"
    if (model.kind == "resnet") != images:
        raise UserError(
            f"model.kind = {model.kind!r} cannot train on data.kind = {data.kind!r}: resnet is for digits and images"
        )
    _refuse_ignored(config)


def _refuse_ignored(config: Config) -> None:
    """Keys that nothing in this run would look at. A file written by --print-config or by a run names every key, so
    only a value other than the default is known to be asked for."""
    for key, (decider, values) in USED_FOR.items():
        chosen = attrgetter(decider)(config)
        if chosen not in values and attrgetter(key)(config) != attrgetter(key)(Config()):
            wanted = " or ".join(map(repr, values))
            raise UserError(f"{key} is for {decider} = {wanted}, not {chosen!r}: leave it out, or set {decider}")
    _refuse_ignored_by_tokenizer(config.data)


def _refuse_ignored_by_tokenizer(data: DataConfig) -> None:
    if data.vocabulary and data.kind != "tokens" and data.tokenizer != "bpe":
        raise UserError("data.vocabulary is for token files and for data.tokenizer = 'bpe': leave it out")
    if data.kind != "tokens" and data.tokenizer == "bpe" and 0 < data.vocabulary < 256:
        raise UserError(f"data.vocabulary = {data.vocabulary}: bpe has a token for each of 256 bytes: use 256 or more")


def _kind(data: DataConfig, model: str) -> str:
    if data.dataset:
        return "hf"
    if not data.files:
        return "digits" if model == "resnet" else "stdlib"
    suffixes = {path.suffix for path in find(data.files)}
    for kind, known in SUFFIXES.items():
        if suffixes <= known:
            return kind
        if suffixes & known:
            raise UserError(f"data.files are of several kinds ({', '.join(sorted(suffixes))}): set data.kind")
    return "text"


def load(config: Config) -> Dataset:
    """The data of a resolved config."""
    data = config.data
    if data.kind in ("digits", "images"):
        from thinwire.train.images import load_images

        return load_images(data)
    encoded = _mapped(data) if data.kind == "tokens" else encode(_text(data), data)
    tokens = encoded.tokens
    cut = len(tokens) - int(len(tokens) * data.holdout)
    windows = Windows(tokens[:cut], config.model.context), Windows(tokens[cut:], config.model.context)
    if not len(windows[0]):
        raise UserError(f"the data has {len(tokens)} tokens: too few for model.context = {config.model.context}")
    return Dataset(*windows, vocabulary=encoded.vocabulary, tokenizer=encoded.tokenizer)


def _text(data: DataConfig) -> bytes:
    if data.kind == "hf":
        return _hf(data)
    if data.kind == "stdlib":
        return b"\n".join(path.read_bytes() for path in stdlib_files())[: data.cap]
    text = b"\n".join(path.read_bytes() for path in find(data.files))
    if not text.strip():
        raise UserError(f"data.files = {', '.join(data.files)}: there is no text in them")
    return text


def find(patterns: list[str]) -> list[Path]:
    """The files that names and globs stand for, in the order given, each glob sorted."""
    if not patterns:
        raise UserError("data.files is empty: name the files to train on")
    return [path for pattern in patterns for path in _matching(os.path.expanduser(pattern))]


def _matching(pattern: str) -> list[Path]:
    if Path(pattern).is_file():  # a name may hold what means something in a glob
        return [Path(pattern)]
    if Path(pattern).is_dir():
        raise UserError(f"data.files: {pattern!r} is a folder: write {str(Path(pattern) / '*')!r} for the files in it")
    files = [path for name in sorted(glob.glob(pattern, recursive=True)) if (path := Path(name)).is_file()]
    if not files:
        raise UserError(f"data.files: no file matches {pattern!r}")
    return files


def stdlib_files() -> list[Path]:
    """Python's own source text, which every machine has; not its tests, nor what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in files if not skipped & set(path.parts)]


def _mapped(data: DataConfig) -> Encoded:
    arrays = [_map(path, data.dtype) for path in find(data.files)]
    tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if tokens.dtype.kind == "i" and any(tokens[at : at + 2**24].min() < 0 for at in range(0, len(tokens), 2**24)):
        raise UserError("data.files: there are negative tokens; was another data.dtype meant?")
    largest = max((int(tokens[at : at + 2**24].max()) for at in range(0, len(tokens), 2**24)), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise UserError(f"data.files: the largest token is {largest}: was another data.dtype meant?")
    if data.vocabulary and largest >= data.vocabulary:
        raise UserError(f"the data has token {largest}: data.vocabulary = {data.vocabulary} is too small")
    return Encoded(tokens, data.vocabulary or largest + 1)


def _map(path: Path, dtype: str) -> Tokens:
    try:
        tokens: Tokens = (
            np.lib.format.open_memmap(path, mode="r")
            if path.suffix == ".npy"
            else np.memmap(path, dtype=dtype, mode="r")
        )
    except (ValueError, EOFError) as error:
        raise UserError(f"cannot map {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(f"{path} must hold one row of whole numbers, not {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _hf(data: DataConfig) -> bytes:
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.kind = 'hf' needs datasets: pip install datasets") from error
    if not data.dataset:
        raise UserError("data.kind = 'hf' needs data.dataset: a name or a local path")
    try:
        stored = _stored(datasets, data.dataset)
        if isinstance(stored, dict) and "train" not in stored:
            raise ValueError(f"it has no split 'train', only {', '.join(map(repr, stored))}")
        column = (stored["train"] if isinstance(stored, dict) else stored)[data.column]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"cannot load data.dataset = {data.dataset!r}, column {data.column!r}: {error}") from error
    return "\n\n".join(_texts(column, data)).encode()


def _stored(datasets: Any, name: str) -> Any:
    """What `save_to_disk` wrote, else .jsonl, .csv or .parquet: a file, or a folder of them; else a name on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        return datasets.load_dataset(str(path.parent), data_files=path.name)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path) if path.is_dir() else name)


def _texts(column: Iterable[Any], data: DataConfig) -> Iterator[str]:
    for number, row in enumerate(column):
        if not isinstance(row, str):
            kind = "None" if row is None else type(row).__name__
            cure = "filter such rows out, or choose another data.column"
            raise UserError(f"data.dataset: row {number} of column {data.column!r} is {kind}, not text: {cure}")
        yield row
