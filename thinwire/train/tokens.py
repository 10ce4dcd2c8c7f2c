"""Text to tokens: bytes as they are, a BPE trained on the spot and cached, or a HF tokenizer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.train.config import Data
from thinwire.train.errors import UserError

Tokens = np.ndarray[Any, np.dtype[Any]]


def encode(text: bytes, config: Data) -> tuple[Tokens, int]:
    """The tokens of a text and the size of their vocabulary."""
    if config.tokenizer == "byte":
        return np.frombuffer(text, dtype=np.uint8), 256
    name = hashlib.blake2b(text, digest_size=12)
    name.update(f"{config.tokenizer} {config.vocabulary}".encode())
    cached = cache_folder(config) / f"{name.hexdigest()}.npz"
    if not cached.exists():
        _write(cached, *_tokenize(text, config, cached.with_suffix(".json")))
    with np.load(cached) as stored:
        return stored["tokens"], int(stored["vocabulary"])


def cache_folder(config: Data) -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire"
    folder = Path(config.cache) if config.cache else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache: cannot keep the tokenizer in {folder} ({error.strerror})") from error
    return folder


def _write(path: Path, tokens: Tokens, vocabulary: int) -> None:
    # renamed when complete: another process may look for it at the same time
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, tokens=tokens, vocabulary=vocabulary)
    part.replace(path)


def _tokenize(text: bytes, config: Data, trained: Path) -> tuple[Tokens, int]:
    tokenizer = _train_bpe(text, config, trained) if config.tokenizer == "bpe" else _load(config.tokenizer)
    pieces = text.decode(errors="replace").splitlines(keepends=True)
    groups = ["".join(pieces[at : at + 1000]) for at in range(0, len(pieces), 1000)]
    vocabulary = tokenizer.get_vocab_size()
    kind = np.uint16 if vocabulary <= 2**16 else np.uint32
    return np.concatenate([np.array(e.ids, dtype=kind) for e in tokenizer.encode_batch(groups)]), vocabulary


def _train_bpe(text: bytes, config: Data, path: Path) -> Any:
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
    tokenizer.save(str(path))
    return tokenizer


def _load(name: str) -> Any:
    """A tokenizer.json, a folder that holds one, or a name on the hub."""
    tokenizers = _library()
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        return tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception for a bad file and for a missing name
        raise UserError(f"data.tokenizer = {name!r}: not byte, bpe, a tokenizer.json, nor a name that loads") from error


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokenizer needs tokenizers: pip install tokenizers (or data.tokenizer = 'byte')"
        ) from error
    return tokenizers
