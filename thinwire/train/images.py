"""Images: scikit-learn's bundled digits, and `.npz` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.train.config import Data
from thinwire.train.data import Dataset, Images, find
from thinwire.train.errors import UserError


def load_images(data: Data) -> Dataset:
    """All images, the last ones held out; an .npz may bring its own held-out set (`x_test`, `y_test`)."""
    arrays = _digits() if data.kind == "digits" else _npz(find(data.files))
    train = _images(arrays["x_train"], arrays["y_train"])
    if "x_test" in arrays:
        held = _images(arrays["x_test"], arrays["y_test"])
    else:
        cut = len(train) - int(len(train) * data.holdout)
        held = Images(train.images[cut:], train.labels[cut:])
        train = Images(train.images[:cut], train.labels[:cut])
    return Dataset(train, held, vocabulary=int(train.labels.max()) + 1, channels=train.images.shape[1])


def _digits() -> dict[str, Any]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("data.kind = 'digits' needs scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    return {"x_train": digits.images / 16, "y_train": digits.target}


def _npz(files: list[Path]) -> dict[str, Any]:
    """Arrays `x_train`, `y_train` (or `images`, `labels`), and perhaps `x_test`, `y_test`."""
    if len(files) > 1:
        raise UserError("data.kind = 'images' takes one .npz file")
    with np.load(files[0]) as stored:
        arrays = {{"images": "x_train", "labels": "y_train"}.get(name, name): stored[name] for name in stored.files}
    missing = {"x_train", "y_train"} - set(arrays)
    if missing:
        raise UserError(
            f"{files[0]} must hold images and labels (or x_train and y_train); it has {', '.join(sorted(arrays))}"
        )
    return arrays


def _images(x: Any, y: Any) -> Images:
    return Images(_planes(torch.from_numpy(np.asarray(x))), torch.from_numpy(np.asarray(y)).long().flatten())


def _planes(x: Tensor) -> Tensor:
    """(count, height, width) or (count, height, width, channels) to (count, channels, height, width) in 0..1."""
    scaled = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    return scaled.unsqueeze(1) if x.ndim == 3 else scaled.permute(0, 3, 1, 2).contiguous()
