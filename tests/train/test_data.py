"""Shards, splits and every kind of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.train import config as configs
from thinwire.train import data, toml
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
    config.data.files = files or []
    for key, value in keys.items():
        setattr(config.data, key, value)
    data.resolve(config)
    config.model.context = 8
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


def test_a_glob_is_what_the_files_that_it_finds_are(tmp_path: Path) -> None:
    for number in range(2):
        np.arange(300, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    config, dataset = loaded([str(tmp_path / "*")])
    assert (config.data.kind, dataset.vocabulary) == ("tokens", 300)


@pytest.mark.parametrize("other", ["crlf.txt", "images.npz", "none"])
def test_tokens_among_other_files_are_refused_where_the_kind_is_not_set(tmp_path: Path, other: str) -> None:
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "ok.bin")
    (tmp_path / other).write_bytes(b"text\r\n" * 50)
    with pytest.raises(UserError, match=r"several kinds .*\.bin.*: set data\.kind"):
        loaded([str(tmp_path / "ok.bin"), str(tmp_path / other)])
    config, _ = loaded([str(tmp_path / "*")], kind="text")
    assert config.data.kind == "text"


def test_a_name_may_hold_what_means_something_in_a_glob(tmp_path: Path) -> None:
    (tmp_path / "[br]ack.txt").write_text("a" * 200)
    assert data.find([str(tmp_path / "[br]ack.txt")]) == [tmp_path / "[br]ack.txt"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.txt").write_text("a" * 200)
    assert data.find(["~/x.txt"]) == data.find(["~/*.txt"]) == [tmp_path / "x.txt"]


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder: write '.*/\*'"):
        data.find([str(tmp_path)])


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


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("to be or not to be " * 50)
    with pytest.raises(UserError, match="data.vocabulary = 10: .* use 256 or more"):
        loaded([str(tmp_path / "t.txt")], tokenizer="bpe", vocabulary=10)


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
        ({"images": np.zeros((4, 6, 6)), "labels": np.array([0, 1, 10**9, 0])}, "largest label is 1000000000"),
        (
            {"images": np.zeros((4, 6, 6)), "labels": np.full(4, 2**63, np.uint64)},
            "largest label is 9223372036854775808",
        ),
        ({"images": np.full((4, 6, 6), 255), "labels": np.arange(4)}, "images of type int64: write uint8"),
        ({"images": np.full((4, 6, 6), 255, np.uint16), "labels": np.arange(4)}, "images of type uint16: write uint8"),
        ({"images": np.full((4, 6, 6), 255.0), "labels": np.arange(4)}, "images of 255 to 255: write uint8"),
        ({"images": np.linspace(-30, 1, 144).reshape(4, 6, 6), "labels": np.arange(4)}, "images of -30 to 1: write"),
        ({"images": np.full((4, 6, 6), 100, ">f4"), "labels": np.arange(4)}, "images of 100 to 100: write uint8"),
        ({"images": np.full((4, 6, 6), np.nan), "labels": np.arange(4)}, "NaN or infinite values: write floats"),
        ({"images": np.full((4, 6, 6), np.inf), "labels": np.arange(4)}, "NaN or infinite values: write floats"),
        ({"images": np.zeros((4, 6, 6), complex), "labels": np.arange(4)}, "images of type complex128: write uint8"),
        ({"images": np.zeros((4, 0, 6)), "labels": np.arange(4)}, r"not \(4, 0, 6\)"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, object], said: str) -> None:
    np.savez(tmp_path / "i.npz", **arrays)
    with pytest.raises(UserError, match=said):
        loaded([str(tmp_path / "i.npz")])


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"x_test": np.zeros((2, 6, 6))}, "one of x_test and y_test"),
        ({"y_test": np.zeros(2, int)}, "one of x_test and y_test"),
        ({"x_test": np.zeros((2, 6, 5)), "y_test": np.zeros(2, int)}, r"\(1, 6, 6\) in x_train, \(1, 6, 5\) in x_test"),
        ({"x_test": np.zeros((2, 6, 6, 3)), "y_test": np.zeros(2, int)}, r"\(3, 6, 6\) in x_test"),
    ],
)
def test_held_out_images_unlike_the_others_are_refused(tmp_path: Path, held: dict[str, object], said: str) -> None:
    np.savez(tmp_path / "i.npz", x_train=np.zeros((4, 6, 6)), y_train=np.arange(4), **held)
    with pytest.raises(UserError, match=said):
        loaded([str(tmp_path / "i.npz")])


@pytest.mark.parametrize("kind", ["u1", "?", "<f2", ">f4", ">f8", "longdouble"])
@pytest.mark.parametrize("numbered", ["<i8", ">i4", ">u2"])
def test_images_of_any_byte_order_and_float_type(tmp_path: Path, kind: str, numbered: str) -> None:
    """torch takes neither a foreign byte order nor a long double."""
    pictures = np.zeros((4, 6, 6), kind)
    pictures[2, 3, 1] = 255 if kind == "u1" else 1
    np.savez(tmp_path / "i.npz", images=pictures, labels=np.arange(4).astype(numbered))
    _, dataset = loaded([str(tmp_path / "i.npz")])
    x, y = dataset.train.take([2])
    assert x.dtype == torch.float32 and (float(x[0, 0, 3, 1]), float(x.sum()), y.tolist()) == (1.0, 1.0, [2])


@pytest.mark.parametrize("bad", [255.0, np.nan])
def test_held_out_images_are_checked_too(tmp_path: Path, bad: float) -> None:
    held = {"x_test": np.full((2, 6, 6), bad), "y_test": np.arange(2)}
    np.savez(tmp_path / "i.npz", x_train=np.zeros((4, 6, 6)), y_train=np.arange(4), **held)
    with pytest.raises(UserError, match="write .*floats of 0 to 1"):
        loaded([str(tmp_path / "i.npz")])


def test_a_share_to_hold_out_is_refused_beside_held_out_images(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((4, 6, 6)), "y_train": np.arange(4)}
    np.savez(tmp_path / "i.npz", **arrays, x_test=np.zeros((2, 6, 6)), y_test=np.arange(2))
    with pytest.raises(UserError, match=r"data\.holdout is for images without x_test.*: leave it out"):
        loaded([str(tmp_path / "i.npz")], holdout=0.25)


def test_held_out_images_of_their_own(tmp_path: Path) -> None:
    held = {"x_test": np.ones((3, 6, 6), bool), "y_test": np.arange(3)}
    np.savez(tmp_path / "i.npz", x_train=np.zeros((4, 6, 6)), y_train=np.arange(4), **held)
    _, dataset = loaded([str(tmp_path / "i.npz")])
    assert (len(dataset.train), len(dataset.held), float(dataset.held.take([2])[0].max())) == (4, 3, 1.0)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.npy", b""), ("a.npz", b""), ("a.bin", b""), ("a.txt", b""), ("a.npy", b"text\n"), ("a.npz", b"text\n")],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        loaded([str(tmp_path / name)], tokenizer="bpe" if name == "a.txt" else "byte")


def test_a_junk_npy_is_not_answered_with_what_no_setting_allows(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"text\n" * 9)
    with pytest.raises(UserError, match="a.npy") as refused:
        loaded([str(tmp_path / "a.npy")])
    assert "allow_pickle" not in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["to be", None, "or not"], "row 1 of column 'text' is None, not text: filter such rows out"),
        ([1, 2], "row 0 of column 'text' is int, not text: .*choose another data.column"),
        ([["to", "be"]], "row 0 of column 'text' is list, not text"),
    ],
)
def test_rows_of_a_dataset_that_are_no_text_are_named(tmp_path: Path, rows: list[object], said: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match=said) as refused:
        loaded(dataset=str(tmp_path / "rows"))
    assert "\n" not in str(refused.value)


def test_a_dataset_may_be_a_file_or_a_folder_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "to be"}\n{"text": "or not to be"}\n' * 20)
    tokens = [loaded(dataset=str(tmp_path / "rows" / name))[1].train.tokens for name in ("a.jsonl", "")]
    assert tokens[0].tobytes().startswith(b"to be\n\nor not to be\n\nto be") and np.array_equal(*tokens)


def test_a_dataset_without_a_split_to_train_on_is_refused_with_what_it_has(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["to be"]})
    datasets.DatasetDict({"test": rows, "validation": rows}).save_to_disk(tmp_path / "rows")
    with pytest.raises(UserError, match="no split 'train', only 'test', 'validation'"):
        loaded(dataset=str(tmp_path / "rows"))


@pytest.mark.parametrize("largest", [np.int64(2**40), np.uint64(2**63), np.uint32(2**24)])
def test_tokens_beyond_any_vocabulary_are_refused(tmp_path: Path, largest: np.integer) -> None:
    np.save(tmp_path / "t.npy", np.array([1, 2, largest] * 40, dtype=largest.dtype))
    with pytest.raises(UserError, match=f"largest token is {largest}: was another data.dtype meant"):
        loaded([str(tmp_path / "t.npy")], vocabulary=0)


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


# a key, a value that it does not have by itself, and the settings beside it under which nothing looks at it
IGNORED = [
    ("model.width", 64, {"data.kind": "digits"}),
    ("model.layers", 2, {"data.kind": "digits"}),
    ("model.tied", False, {"data.kind": "digits"}),
    ("model.tied", False, {"model.kind": "hf"}),
    ("model.preset", "35M", {"model.kind": "hf"}),
    ("model.path", "/nonexist", {}),
    ("model.path", "/nonexist", {"data.kind": "digits"}),
    ("data.files", "/nonexist.txt", {"data.kind": "stdlib"}),
    ("data.files", "/nonexist.txt", {"data.kind": "digits"}),
    ("data.files", "/nonexist.txt", {"data.dataset": "hfds"}),
    ("data.dataset", "hfds", {"data.kind": "stdlib"}),
    ("data.column", "body", {}),
    ("data.tokenizer", "bpe", {"data.kind": "tokens"}),
    ("data.tokenizer", "bpe", {"data.kind": "digits"}),
    ("data.vocabulary", 300, {"data.kind": "stdlib"}),
    ("data.vocabulary", 300, {"data.kind": "digits"}),
    ("optimizer.momentum", 0.9, {}),
    ("optimizer.momentum", 0.9, {"optimizer.name": "adopt"}),
]


def configured(pairs: dict[str, object]) -> Config:
    config = Config()
    for key, value in pairs.items():
        configs.assign(config, key, value)
    return config


@pytest.mark.parametrize(("key", "value", "beside"), IGNORED)
def test_a_key_that_would_be_ignored_is_refused(key: str, value: object, beside: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"{key} is for .*: leave it out") as refused:
        data.resolve(configured({**beside, key: value}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("beside", [beside for _, _, beside in IGNORED])
def test_a_config_that_names_every_key_with_its_default_is_taken(tmp_path: Path, beside: dict[str, object]) -> None:
    """As --print-config writes it, and every run."""
    path = tmp_path / "config.toml"
    path.write_text(toml.dump(configured(beside)))
    config = configs.load(path)
    data.resolve(config)
    path.write_text(toml.dump(config))
    data.resolve(configs.load(path))


@pytest.mark.parametrize(
    "pairs",
    [
        {"model.kind": "hf", "model.path": "config.json", "model.context": 64},
        {"model.width": 64, "model.tied": False, "data.cap": 5000},
        {"data.kind": "digits", "model.preset": "20"},
        {"data.dataset": "hfds", "data.column": "body", "data.tokenizer": "bpe", "data.cache": "/tmp/cache"},
        {"data.kind": "tokens", "data.files": "a.bin", "data.dtype": "uint32", "data.vocabulary": 300},
        {"optimizer.name": "muon", "optimizer.momentum": 0.9, "optimizer.betas": [0.8, 0.9], "optimizer.eps": 1e-6},
        {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "schedule.final": 0.2},
        {"schedule.name": "wsd", "schedule.decay": 0.2, "schedule.final": 0.2, "optimizer.betas": [0.8, 0.9]},
        {"schedule.name": "constant", "schedule.warmup": 3},
    ],
)
def test_a_key_that_is_looked_at_is_taken(pairs: dict[str, object]) -> None:
    data.resolve(configured(pairs))


def test_every_key_that_is_told_apart_is_one() -> None:
    known = configs.keys()
    for key, (decider, values) in data.USED_FOR.items():
        assert key in known and set(values) < set(known[decider].metadata["choices"])
