"""Texts as tokens: tokenizers of all kinds, their cache, and a run's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import arguments_of, write_text
from thinwire.train.config import Data
from thinwire.train.tokens import Encoded, encode

tokenizers = pytest.importorskip("tokenizers")

WORDS = {"to": 0, "be": 1, "or": 2, "not": 3, "<s>": 4}
TEXT = b"to be or not to be\n" * 40
IDS = [0, 1, 2, 3, 0, 1] * 40


def by_words(words: dict[str, int]) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def encoded(folder: Path, tokenizer: Any, text: bytes = TEXT) -> Encoded:
    tokenizer.save(str(folder / "words.json"))
    return encode(text, Data(tokenizer=str(folder / "words.json"), cache=str(folder / "cache")))


def test_a_text_is_not_cut_filled_up_or_framed(tmp_path: Path) -> None:
    plain = by_words(WORDS)
    plain.enable_truncation(10)
    plain.enable_padding(length=500, pad_id=4)
    plain.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    assert encoded(tmp_path, plain).tokens.tolist() == IDS


def test_numbers_without_a_token_have_room(tmp_path: Path) -> None:
    made = encoded(tmp_path, by_words(WORDS | {"be": 70_000}))
    assert made.vocabulary == 70_001 and made.tokens.tolist() == [70_000 if i == 1 else i for i in IDS]


def test_another_tokenizer_of_the_same_name_is_another(tmp_path: Path) -> None:
    assert encoded(tmp_path, by_words(WORDS)).tokens.tolist() == IDS
    assert encoded(tmp_path, by_words(WORDS | {"be": 3, "not": 1})).tokens.tolist() == [0, 3, 2, 1, 0, 3] * 40


@pytest.mark.parametrize("suffix", ["npz", "json"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, suffix: str) -> None:
    first = encoded(tmp_path, by_words(WORDS))
    (cached,) = (tmp_path / "cache").glob(f"*.{suffix}")
    cached.unlink() if suffix == "json" else cached.write_bytes(cached.read_bytes()[:100])
    again = encoded(tmp_path, by_words(WORDS))
    assert np.array_equal(first.tokens, again.tokens) and again.tokenizer and again.tokenizer.exists()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    by_words(WORDS).save(str(tmp_path / "words.json"))
    assert encode(TEXT, Data(tokenizer="~/words.json", cache="~/cache")).tokens.tolist() == IDS
    assert list((tmp_path / "cache").iterdir())


@pytest.fixture
def bpe(tmp_path: Path) -> list[str]:
    more = {"data__tokenizer": "bpe", "data__vocabulary": 300, "data__cache": str(tmp_path / "cache")}
    return arguments_of(write_text(tmp_path), **more)


def test_the_model_comes_with_its_tokenizer(tmp_path: Path, thinwire, bpe: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    thinwire("train", *bpe, "--steps", 2, "--out", tmp_path / "run")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = loaded("def train(self):")["input_ids"]
    assert len(ids) < 16 and loaded.decode(ids) == "def train(self):"
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"] == len(loaded)


def test_a_text_that_has_changed_is_refused_where_bpe_learns_from_it(tmp_path: Path, thinwire, bpe: list[str]) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    thinwire("train", *bpe, "--steps", 6, "--stop-at", 3, "--out", run)
    before = text.read_text()
    text.write_text(before.replace("def ", "fed "))
    for more in ((), ("--workers", 2)):
        assert "another tokenizer" in thinwire("train", "--resume", run, *more, status=2).stderr
    text.write_text(before)
    thinwire("train", "--resume", run)
