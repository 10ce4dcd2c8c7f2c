"""The ResNet of bench/quality_resnet.py on random images: it reads, it trains, it says what it promises."""

from __future__ import annotations

import gzip
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import quality_resnet  # noqa: E402

import thinwire as tw  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A few random images, as the package has them."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 64), ("t10k", 20)):
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (count,), dtype=torch.uint8, generator=generator)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
            raw = bytes([0, 0, 8, values.ndim]) + sizes + values.numpy().tobytes()
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(raw))
    return tmp_path


def test_images_are_read(folder: Path) -> None:
    images, labels, held, answers = quality_resnet.read_images(folder, "cpu")
    assert images.shape == (64, 1, 28, 28) and held.shape == (20, 1, 28, 28)
    pixels = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    assert torch.allclose(images[0, 0, 0, :3] * 0.353 + 0.286, torch.tensor(list(pixels[:3])) / 255)
    assert labels.dtype == answers.dtype == torch.long


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "words.gz").write_bytes(gzip.compress(b"words"))
    with pytest.raises(ValueError, match="no idx file of bytes"):
        quality_resnet.read_idx(tmp_path / "words.gz")


@pytest.mark.parametrize("variant", ["consensus", "mean", "paper"])
def test_every_variant_takes_a_round(variant: str, folder: Path) -> None:
    base = quality_resnet.resnet(0, widths=(4, 8), blocks=1)
    method = tw.decoupled_momentum(2, variant=variant)  # type: ignore[arg-type]
    found = quality_resnet.train(method, 2, 4, 8, 0, quality_resnet.read_images(folder, "cpu"), base)
    assert found["bytes_sent"] > 0 and math.isfinite(found["loss"]) and 0 <= found["accuracy"] <= 1
