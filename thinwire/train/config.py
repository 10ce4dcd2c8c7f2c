"""What a run is: a strict schema of plain dataclasses, read from TOML, changed by dotted overrides."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from thinwire.train.errors import UserError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LARGEST_VOCABULARY = 2**24  # beyond any tokenizer's: an embedding of that size would not fit anywhere


def _key(
    default: Any,
    comment: str,
    *,
    local: bool = False,
    choices: tuple[str, ...] = (),
    least: float = -math.inf,
    below: float = math.inf,
) -> Any:
    """A config key. A local key belongs to one machine, so workers may differ in it."""
    metadata = {"comment": comment, "local": local, "choices": choices, "least": least, "below": below}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Model:
    kind: str = _key(
        "auto", "llama, resnet (images) or hf; auto goes by the data", choices=("auto", "llama", "resnet", "hf")
    )
    preset: str = _key("1M", "shape: 1M 5M 12M 35M 100M 135M 200M; resnet: tiny 20 18")
    path: str = _key("", "hf: a config.json, a model folder or a model name", local=True)
    context: int = _key(128, "tokens of one sequence", least=2)
    layers: int = _key(0, "blocks; 0 = the preset's", least=0)
    width: int = _key(0, "size of the residual stream; 0 = the preset's", least=0)
    heads: int = _key(0, "attention heads; 0 = the preset's", least=0)
    hidden: int = _key(0, "size inside SwiGLU; 0 = the preset's", least=0)
    tied: bool = _key(True, "input and output embeddings are one tensor")


@dataclass
class Data:
    kind: str = _key(
        "auto",
        "stdlib, text, tokens (.bin .npy), hf, digits or images (.npz); auto goes by the files",
        choices=("auto", "stdlib", "text", "tokens", "hf", "digits", "images"),
    )
    files: list[str] = _key([], "files and globs; empty = Python's own standard library", local=True)
    dataset: str = _key("", "hf: a dataset's name or local path", local=True)
    column: str = _key("text", "hf: the column that holds the text")
    tokenizer: str = _key("byte", "byte, bpe (trained on the spot), or an HF tokenizer's name or path")
    vocabulary: int = _key(
        0,
        "number of tokens; 0 = 4096 for bpe, the largest one found for .bin and .npy",
        least=0,
        below=LARGEST_VOCABULARY,
    )
    dtype: str = _key("uint16", ".bin: type of one token", choices=("uint8", "uint16", "uint32", "int32", "int64"))
    holdout: float = _key(0.025, "share of the data, its last stretch, that is only evaluated", least=0, below=1)
    cap: int = _key(16_000_000, "stdlib: bytes of text at the most", least=1000)
    cache: str = _key("", "folder for trained tokenizers; empty = the user's cache folder", local=True)


@dataclass
class Optimizer:
    name: str = _key("adamw", "adamw, adopt, muon or sgd", choices=("adamw", "adopt", "muon", "sgd"))
    lr: float = _key(3e-3, "peak learning rate", least=0)
    betas: list[float] = _key([0.9, 0.95], "decay of the first and of the second moment", least=0, below=1)
    eps: float = _key(1e-8, "added to the root of the second moment", least=0)
    weight_decay: float = _key(0.1, "decoupled weight decay, on matrices only", least=0)
    momentum: float = _key(0.0, "sgd: momentum (muon takes 0.95 where this is 0)", least=0)


@dataclass
class Schedule:
    name: str = _key("cosine", "cosine, wsd (warm up, stay, decay) or constant", choices=("cosine", "wsd", "constant"))
    warmup: int = _key(20, "steps of linear warm-up", least=0)
    final: float = _key(0.05, "cosine: last learning rate as a share of the peak", least=0)
    decay: float = _key(0.1, "wsd: share of the steps, the last ones, that decay (1 - sqrt)", least=0)


@dataclass
class Train:
    batch: int = _key(8, "sequences (or images) of one worker in one micro-batch", local=True, least=1)
    accumulate: int = _key(1, "micro-batches of one step", local=True, least=1)
    clip: float = _key(1.0, "largest norm of a worker's gradient; 0 = none", least=0)
    precision: str = _key("fp32", "fp32, or bf16 (autocast, weights stay fp32)", choices=("fp32", "bf16"))
    device: str = _key("auto", "auto, cpu, cuda or cuda:N", local=True)
    compile: bool = _key(False, "torch.compile", local=True)
    graphs: bool = _key(True, "capture the hosted replicas' work as one CUDA graph, where a GPU hosts it", local=True)
    offload: bool = _key(False, "outer state in host memory", local=True)
    inside: str = _key(
        "none", "torchrun: each GPU a worker (none), or each node (ddp, fsdp)", choices=("none", "ddp", "fsdp")
    )
    eval_every: int = _key(50, "steps between evaluations of the consensus; 0 = at the end only", least=0)
    eval_batches: int = _key(16, "held-out batches of one evaluation", least=1)
    checkpoint_every: int = _key(100, "steps between checkpoints; 0 = at the end only", least=0)
    keep: int = _key(3, "checkpoints kept; at least 2 where several processes write them", least=1)
    wait: int = _key(600, "seconds to wait for a silent peer", local=True, least=1)


@dataclass
class Logging:
    every: int = _key(10, "steps between exchanges of losses and timings among processes", least=1)
    tensorboard: bool = _key(True, "write TensorBoard events", local=True)
    wandb: str = _key("", "W&B project; empty = no W&B", local=True)
    report: bool = _key(True, "write report.html at the end", local=True)


@dataclass
class Config:
    steps: int = _key(300, "optimizer steps of each worker", least=1)
    workers: int = _key(4, "workers (replicas) in all", least=1)
    seed: int = _key(0, "seed of the initial weights and of the data order", least=0, below=2**32)
    parameters: int = _key(0, "trainable parameters; the run fills it in")
    method: dict[str, Any] = field(default_factory=lambda: {"name": "desloc"})
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    logging: Logging = field(default_factory=Logging)


SECTIONS = tuple(f.name for f in fields(Config) if dataclasses.is_dataclass(f.default_factory))


def keys() -> dict[str, dataclasses.Field[Any]]:
    """Every dotted key but the method's, which are those of its function."""
    top = {f.name: f for f in fields(Config) if f.name not in (*SECTIONS, "method")}
    return top | {f"{section}.{f.name}": f for section in SECTIONS for f in fields(getattr(Config(), section))}


def load(path: Path, start: Config | None = None) -> Config:
    """A config file, checked key by key; what it does not name stays as in `start`."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read config {path}: {error}") from error
    config = start or Config()
    for key, value in _flatten(table):
        assign(config, key, value)
    return config


def _flatten(table: dict[str, Any]) -> list[tuple[str, Any]]:
    """Dotted keys and values; the method's name first, as its other keys depend on it."""
    pairs = []
    for key, value in table.items():
        if key in (*SECTIONS, "method"):
            if not isinstance(value, dict):
                raise UserError(f"{key} is a section: write [{key}] and its keys below it")
            pairs += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            pairs.append((key, value))
    return sorted(pairs, key=lambda pair: pair[0] != "method.name")


def assign(config: Config, key: str, value: Any) -> None:
    """Set one dotted key."""
    key = full_name(key, config)
    section, _, name = key.rpartition(".")
    if section == "method":
        from thinwire.train.methods import set_method_key

        set_method_key(config.method, name, value)
        return
    owner = getattr(config, section) if section else config
    setattr(owner, name, _checked(key, value))


def full_name(key: str, config: Config) -> str:
    """The dotted name; the bare last part will do where only one section has it."""
    from thinwire.train.methods import method_keys

    if key.rpartition(".")[0] == "method":  # refused, if need be, where it is set: by the method's name
        return key
    known = [*keys(), *(f"method.{name}" for name in method_keys(config.method["name"])), "method.name"]
    found = [name for name in known if key in (name, name.rpartition(".")[2])]
    if key in found or len(found) == 1:
        return key if key in found else found[0]
    if found:
        raise UserError(f"config key {key!r} is in several sections: write one of {', '.join(found)}")
    hint = nearest(key, known, otherwise="thinwire train --print-config lists them")
    raise UserError(f"unknown config key {key!r}: {hint}")


def _checked(key: str, value: Any) -> Any:
    section, _, name = key.rpartition(".")
    owner = type(getattr(Config(), section)) if section else Config
    kind, meta = get_type_hints(owner)[name], keys()[key].metadata
    value = convert(key, value, kind)
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"{key} = {value!r}: {nearest(str(value), meta['choices'])}")
    if kind in (int, float, list[float]):
        for number in value if isinstance(value, list) else [value]:
            _check_range(key, number, meta["least"], meta["below"])
    if isinstance(value, list) and kind == list[float] and len(value) != len(_get(Config(), key)):
        raise UserError(f"{key} = {value}: must be {len(_get(Config(), key))} numbers")
    return value


def _check_range(key: str, value: float, least: float, below: float) -> None:
    if not math.isfinite(value):
        raise UserError(f"{key} = {value}: must be a finite number")
    if value < least:
        raise UserError(f"{key} = {value}: must be {least} or more")
    if value >= below:
        raise UserError(f"{key} = {value}: must be below {below}")


def convert(key: str, value: Any, kind: Any) -> Any:
    """The value as the type a key has; whole numbers may stand for reals and for texts, one text for a list of it."""
    if kind in (list[str], list[float]):
        items = value if isinstance(value, list) else str(value).split(",")
        return [convert(key, item, kind.__args__[0]) for item in items if item != ""]
    if kind is float and (isinstance(value, str) or type(value) is int):
        value = _number(key, value)
    if kind is str and type(value) is int:  # a preset named 20, a folder named 2026
        value = str(value)
    if type(value) is not kind:
        raise UserError(f"{key} = {value!r}: must be of type {kind.__name__}")
    return value


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"{key} = {value!r}: must be a number") from error


def override(config: Config, text: str, *, local_only: bool = False) -> None:
    """Apply `key=value` from the command line; the value is TOML, or text where it is not."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{text!r}: write key=value, for example optimizer.lr=1e-3")
    name = full_name(key.strip(), config)
    local = name in keys() and keys()[name].metadata["local"]
    if local_only and not local:
        mine = [k for k, f in keys().items() if f.metadata["local"]]
        raise UserError(
            f"--local {name}: all workers must agree on it (use --set on each); local keys: {', '.join(mine)}"
        )
    assign(config, name, parse_value(value.strip()))


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def shared(config: Config) -> dict[str, Any]:
    """What all workers must agree on: every key that is not local, as the run resolved it."""
    local = {name for name, f in keys().items() if f.metadata["local"]}
    flat = {name: _get(config, name) for name in keys() if name not in local}
    return flat | {f"method.{name}": repr(value) for name, value in config.method.items()}


def _get(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)
