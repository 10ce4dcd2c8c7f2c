"""Images: scikit-learn's bundled digits, and `.npz` files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from thinwire.train.config import Data
from thinwire.train.data import Dataset, Images, find
from thinwire.train.errors import UserError

Array = np.ndarray[Any, np.dtype[Any]]

FAR = 20  # from 0 to 1: resized and standardised images leave it too, those that were never scaled are at 255
CLASSES = 2**20  # more than any set of images has: a layer of that size would not fit anywhere


def load_images(data: Data) -> Dataset:
    """All images, the last ones held out; an .npz may bring its own held-out set (`x_test`, `y_test`)."""
    arrays = _digits() if data.kind == "digits" else _npz(find(data.files))
    train = _images(arrays["x_train"], arrays["y_train"])
    if "x_test" in arrays:
        _refuse_holdout(data)
        held = _images(arrays["x_test"], arrays["y_test"])
        _refuse_unequal(train.images.shape[1:], held.images.shape[1:])
    else:
        cut = len(train) - int(len(train) * data.holdout)
        held = Images(train.images[cut:], train.labels[cut:])
        train = Images(train.images[:cut], train.labels[:cut])
    # of both: files sorted by label have classes that are held out whole
    classes = int(torch.cat((train.labels, held.labels)).max()) + 1
    return Dataset(train, held, vocabulary=classes, channels=train.images.shape[1])


def _refuse_holdout(data: Data) -> None:
    if data.holdout != Data().holdout:  # the default stands in every run's config.toml
        raise UserError("data.holdout is for images without x_test, and this file brings its own: leave it out")


def _refuse_unequal(train: torch.Size, held: torch.Size) -> None:
    """Images to train on and held-out ones, each (channels, height, width)."""
    if train != held:
        shapes = f"{tuple(train)} in x_train, {tuple(held)} in x_test"
        raise UserError(f"images must have one (channels, height, width), not {shapes}")


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
    try:
        with np.load(files[0]) as stored:
            arrays = {{"images": "x_train", "labels": "y_train"}.get(name, name): stored[name] for name in stored.files}
    except (ValueError, EOFError, BadZipFile, AttributeError, TypeError) as error:  # each from another kind of file
        raise UserError(f"{files[0]} is not an .npz file: write it with numpy.savez") from error
    missing = {"x_train", "y_train"} - set(arrays)
    if missing:
        raise UserError(
            f"{files[0]} must hold images and labels (or x_train and y_train); it has {', '.join(sorted(arrays))}"
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(f"{files[0]} has one of x_test and y_test: write both, or neither")
    return arrays


def _images(x: Any, y: Any) -> Images:
    shape, kind = np.shape(x), np.asarray(y).dtype
    if len(shape) not in (3, 4) or not all(shape):
        raise UserError(f"images must be (count, height, width) or (count, height, width, channels), not {shape}")
    if np.size(y) != shape[0] or kind.kind not in "iu" or np.min(y) < 0:
        raise UserError(f"labels must be one whole number from 0 an image: {np.shape(y)} {kind} for {shape[0]} images")
    if np.max(y) >= CLASSES:
        raise UserError(f"the largest label is {np.max(y)}: number the classes 0, 1, 2 and so on")
    _refuse_unscaled(np.asarray(x))
    return Images(_planes(np.asarray(x)), torch.from_numpy(np.asarray(y).astype(np.int64)).flatten())


def _refuse_unscaled(x: Array) -> None:
    """Of whole numbers only uint8 says what its largest value is; floats have none but the one agreed on."""
    if x.dtype != np.uint8 and x.dtype.kind not in "bf":
        raise UserError(f"images of type {x.dtype}: write uint8 of 0 to 255, or floats of 0 to 1")
    low, high = x.min(), x.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        raise UserError("images hold NaN or infinite values: write floats of 0 to 1")
    if x.dtype.kind == "f" and max(-low, high) > FAR:
        raise UserError(f"images of {low:.3g} to {high:.3g}: write uint8 of 0 to 255, or floats of 0 to 1")


def _planes(x: Array) -> Tensor:
    """(count, height, width) or (count, height, width, channels) to (count, channels, height, width) in 0..1."""
    plain = torch.from_numpy(x.astype(np.float32))  # of any float type and byte order, which torch does not take
    scaled = plain / 255 if x.dtype == np.uint8 else plain
    return scaled.unsqueeze(1) if x.ndim == 3 else scaled.permute(0, 3, 1, 2).contiguous()
