"""Kernels for CUDA. They give the bits that the torch operations beside them give, in fewer passes over memory;
products of matrices alone may differ by rounding."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch


def usable(device: torch.device) -> bool:
    """Whether kernels can run there: on a GPU of CUDA, where triton is installed."""
    return device.type == "cuda" and _installed()


@lru_cache(maxsize=1)
def _installed() -> bool:
    return torch.version.cuda is not None and find_spec("triton") is not None
