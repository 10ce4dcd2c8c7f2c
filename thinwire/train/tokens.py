"""Text to tokens: bytes as they are, a BPE trained on the spot and cached, or a HF tokenizer."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from thinwire.train.config import Data
from thinwire.train.errors import UserError

Tokens = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Encoded:
    """A text as tokens, the size of their vocabulary, and the tokenizer.json that made them, where one did."""

    tokens: Tokens
    vocabulary: int
    tokenizer: Path | None = None


def encode(text: bytes, config: Data) -> Encoded:
    if config.tokenizer == "byte":
        return Encoded(np.frombuffer(text, dtype=np.uint8), 256)
    cached = cache_folder(config) / f"{_name(text, config)}.npz"
    return _cached(cached) or _make(text, config, cached)


def _name(text: bytes, config: Data) -> str:
    """Of all that decides the tokens: of a tokenizer on disk that is what the file holds, not what it is called."""
    name = hashlib.blake2b(text, digest_size=12)
    name.update(f"{config.tokenizer} {config.vocabulary}".encode())
    if config.tokenizer != "bpe" and (file := _file(config.tokenizer)):
        name.update(file.read_bytes())
    return name.hexdigest()


def _cached(path: Path) -> Encoded | None:
    """What an earlier run made; a power loss may have left half of it."""
    trained = path.with_suffix(".json")
    if not trained.exists():
        return None
    try:
        with np.load(path) as stored:
            return Encoded(stored["tokens"], int(stored["vocabulary"]), trained)
    except (FileNotFoundError, BadZipFile, EOFError, KeyError, ValueError):
        return None


def cache_folder(config: Data) -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"
    folder = Path(config.cache).expanduser() if config.cache else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache: cannot keep the tokenizer in {folder} ({error.strerror})") from error
    return folder


def _make(text: bytes, config: Data, path: Path) -> Encoded:
    tokenizer = _train_bpe(text, config) if config.tokenizer == "bpe" else _load(config.tokenizer)
    made = Encoded(*_tokenize(text, tokenizer), path.with_suffix(".json"))
    # renamed when complete: another process may look for it at the same time
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(tokenizer.to_str(), encoding="utf-8")
        part.replace(path.with_suffix(".json"))
        with part.open("wb") as file:
            np.savez(file, tokens=made.tokens, vocabulary=made.vocabulary)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # of a full disk
    return made


def _tokenize(text: bytes, tokenizer: Any) -> tuple[Tokens, int]:
    # made for single sentences many a tokenizer cuts, fills up and frames what it is given: here that is a whole text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = text.decode(errors="replace").splitlines(keepends=True)
    groups = ["".join(pieces[at : at + 1000]) for at in range(0, len(pieces), 1000)]
    vocabulary = max(tokenizer.get_vocab().values(), default=0) + 1  # not their count: some numbers may have no token
    kind = np.uint16 if vocabulary <= 2**16 else np.uint32
    encoded = tokenizer.encode_batch(groups, add_special_tokens=False)
    return np.concatenate([np.array(e.ids, dtype=kind) for e in encoded]), vocabulary


def mark_of(tokenizer: Path) -> str:
    """The same for tokenizers that give every token the same number, whichever version of the library wrote them."""
    vocabulary = _load(str(tokenizer)).get_vocab()
    return hashlib.blake2b(repr(sorted(vocabulary.items())).encode(), digest_size=8).hexdigest()


def _train_bpe(text: bytes, config: Data) -> Any:
    tokenizers = _library()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=config.vocabulary or 4096,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text.decode(errors="replace").splitlines(keepends=True), trainer)
    return tokenizer


def _load(name: str) -> Any:
    """A tokenizer.json, a folder that holds one, or a name on the hub."""
    tokenizers, file = _library(), _file(name)
    try:
        return tokenizers.Tokenizer.from_file(str(file)) if file else tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception for a bad file and for a missing name
        raise UserError(f"data.tokenizer = {name!r}: not byte, bpe, a tokenizer.json, nor a name that loads") from error


def _file(name: str) -> Path | None:
    """The tokenizer.json of a name that stands for one, or for a folder that holds one."""
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.is_file() else None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokenizer needs tokenizers: pip install tokenizers (or data.tokenizer = 'byte')"
        ) from error
    return tokenizers
