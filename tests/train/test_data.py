"""Shards, splits and every kind of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.train import data
from thinwire.train.config import Config
from thinwire.train.data import Shard, Windows
from thinwire.train.errors import UserError


def windows(count: int, context: int = 4) -> Windows:
    return Windows(np.arange(count * context + 1), context)


def firsts(shard: Shard, count: int) -> list[int]:
    """Which examples come: the first token of example i is 4 i."""
    return [int(x[0, 0]) // 4 for x, _ in (shard.next(1) for _ in range(count))]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_shards_of_one_epoch_are_everything_once(workers: int) -> None:
    examples = windows(24)
    seen = [firsts(Shard(examples, w, workers, seed=5), 24 // workers) for w in range(workers)]
    assert sorted(sum(seen, [])) == list(range(24))


def test_each_epoch_has_an_order_of_its_own() -> None:
    both = firsts(Shard(windows(16), 0, 1, seed=1), 32)
    assert sorted(both[:16]) == sorted(both[16:]) == list(range(16))
    assert both[:16] != both[16:]


def test_a_resumed_shard_repeats_and_skips_nothing() -> None:
    whole = firsts(Shard(windows(16), 1, 2, seed=3), 12)
    first = Shard(windows(16), 1, 2, seed=3)
    before = firsts(first, 5)
    second = Shard(windows(16), 1, 2, seed=3)
    second.load_state_dict(first.state_dict())
    assert before + firsts(second, 7) == whole


def test_another_number_of_workers_goes_on_behind_what_was_used() -> None:
    before = [Shard(windows(24), w, 2, seed=3) for w in range(2)]
    used = sum((firsts(shard, 3) for shard in before), [])
    after = [Shard(windows(24), w, 3, seed=3) for w in range(3)]
    for shard in after:
        shard.load_state_dict(before[0].state_dict())
    assert sorted(used + sum((firsts(shard, 6) for shard in after), [])) == list(range(24))


def test_a_shard_may_change_its_place_again_and_again() -> None:
    moved, beyond, plain = (Shard(windows(16), worker, 2, seed=3) for worker in (0, 0, 1))
    for place in (5, 3, 1):
        moved.take_place(place)
    beyond.take_place(3)
    again = Shard(windows(16), 0, 2, seed=3)
    for place in (2, 3):
        again.take_place(place)
    assert firsts(moved, 8) == firsts(plain, 8)
    assert firsts(again, 8) == firsts(beyond, 8)


def test_targets_are_one_token_further_on() -> None:
    x, y = windows(3).take([1, 2])
    assert x.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]] and torch.equal(y, x + 1)


def loaded(files: list[str] | None = None, **keys: object) -> tuple[Config, data.Dataset]:
    config = Config()
    config.model.context = 8
    config.data.files = files or []
    for key, value in keys.items():
        setattr(config.data, key, value)
    data.resolve(config)
    return config, data.load(config)


def test_the_default_is_pythons_own_source_text() -> None:
    config, dataset = loaded(cap=50_000)
    assert (config.data.kind, config.model.kind, dataset.vocabulary) == ("stdlib", "llama", 256)
    assert 0 < len(dataset.held) < len(dataset.train)
    assert not [path for path in data.stdlib_files() if "test" in path.parts or "site-packages" in path.parts]


def test_text_files_and_globs(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name * 200)
    config, dataset = loaded([str(tmp_path / "*.txt")], holdout=0.1)
    assert config.data.kind == "text"
    assert bytes(dataset.train.take([0])[0][0].tolist()) == b"a" * 8
    assert bytes(dataset.held.take([0])[0][0].tolist()) == b"b" * 8, "the last stretch is held out"


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_tokens_are_mapped(tmp_path: Path, suffix: str) -> None:
    tokens, path = np.arange(500, dtype=np.uint16), tmp_path / f"tokens.{suffix}"
    tokens.tofile(path) if suffix == "bin" else np.save(path, tokens)
    config, dataset = loaded([str(path)])
    assert (config.data.kind, dataset.vocabulary) == ("tokens", 500)
    assert isinstance(dataset.train.tokens, np.memmap)
    assert dataset.train.take([1])[0].tolist() == [list(range(8, 16))]
    with pytest.raises(UserError, match="token 499"):
        loaded([str(path)], vocabulary=100)


def test_bpe_is_trained_once(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "t.txt").write_text("the cat sat on the mat, the cat sat.\n" * 80)
    settings = {"tokenizer": "bpe", "vocabulary": 270, "cache": str(tmp_path / "cache")}
    _, first = loaded([str(tmp_path / "t.txt")], **settings)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    _, second = loaded([str(tmp_path / "t.txt")], **settings)
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} and len(made) == 2
    assert first.vocabulary <= 270 and np.array_equal(first.train.tokens, second.train.tokens)
    trained = next(path for path in made if path.suffix == ".json")
    _, third = loaded([str(tmp_path / "t.txt")], tokenizer=str(trained), cache=str(tmp_path / "other"))
    assert np.array_equal(first.train.tokens, third.train.tokens), "a tokenizer.json is an HF tokenizer"


def test_digits_and_npz_are_images(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    config, digits = loaded(kind="digits")
    assert (config.model.kind, digits.channels, digits.vocabulary) == ("resnet", 1, 10)
    pictures = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "i.npz", images=pictures, labels=np.arange(40) % 5)
    _, dataset = loaded([str(tmp_path / "i.npz")], holdout=0.25)
    x, y = dataset.train.take([7])
    assert (dataset.channels, dataset.vocabulary, len(dataset.held), int(y)) == (3, 5, 10, 2)
    assert x.shape == (1, 3, 6, 6) and float(x[0, 1, 2, 3]) == pytest.approx(pictures[7, 2, 3, 1] / 255)


def test_classes_that_are_held_out_whole_are_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", images=np.zeros((40, 6, 6)), labels=np.arange(40) // 10)
    _, dataset = loaded([str(tmp_path / "i.npz")], holdout=0.25)
    assert dataset.vocabulary == 4, "labels are sorted: the last class is in the held-out part alone"


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"images": np.zeros((4, 6)), "labels": np.arange(4)}, "height, width"),
        ({"images": np.zeros((4, 6, 6)), "labels": np.arange(3)}, "one whole number"),
        ({"images": np.zeros((4, 6, 6)), "labels": np.eye(4, dtype=int)}, "one whole number"),
        ({"images": np.zeros((4, 6, 6)), "labels": np.array([0, 1, -1, 0])}, "one whole number"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, object], said: str) -> None:
    np.savez(tmp_path / "i.npz", **arrays)
    with pytest.raises(UserError, match=said):
        loaded([str(tmp_path / "i.npz")])


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.npy", b""), ("a.npz", b""), ("a.bin", b""), ("a.txt", b""), ("a.npy", b"text\n"), ("a.npz", b"text\n")],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        loaded([str(tmp_path / name)], tokenizer="bpe")


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(-1, 500))
    with pytest.raises(UserError, match="negative"):
        loaded([str(tmp_path / "t.npy")])


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat.\n" * 80)
    with pytest.raises(UserError, match=r"data\.cache"):
        loaded([str(tmp_path / "t.txt")], tokenizer="bpe", cache=str(tmp_path / "t.txt"))


@pytest.mark.parametrize(("model", "kind"), [("resnet", "stdlib"), ("llama", "digits")])
def test_a_model_for_other_data_is_refused(model: str, kind: str) -> None:
    config = Config()
    config.model.kind, config.data.kind = model, kind
    with pytest.raises(UserError, match="cannot train on"):
        data.resolve(config)
