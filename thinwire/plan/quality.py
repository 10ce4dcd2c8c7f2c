"""What a method is expected to cost in loss against DDP on the same tokens, from what was published, with its source.

These are the papers' numbers, not promises. Between published sizes they are interpolated in log(parameters), outside
the nearest is taken; another period adds what streaming DiLoCo lost from H = 30 to H = 100 at the same model size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_SIZES = (35e6, 100e6, 500e6, 1e9)
_DDP = (3.51, 3.19, 2.67, 2.49)  # C4, 2501.18512
_STREAMING_100 = (3.56, 3.22, 2.69, 2.50)
_STREAMING_30 = (3.53, 3.21, 2.67, 2.48)


@dataclass(frozen=True)
class Published:
    """Losses at `_SIZES` with 2 workers and period `every`, and nats that 4 or more workers add."""

    losses: tuple[float, float, float, float]
    every: int
    more_workers: float
    source: str


@dataclass(frozen=True)
class Quality:
    percent: float | None  # of the loss, more than DDP; None: no published number to compute it from
    source: str


_TWO_OR_MORE = "M = 4 costs .02 to .08 more"
_PUBLISHED = {
    "ddp": Published(_DDP, 1, 0.0, "the reference"),
    "diloco": Published((3.54, 3.21, 2.68, 2.49), 30, 0.05, f"Streaming DiLoCo, arXiv 2501.18512; {_TWO_OR_MORE}"),
    "streaming_diloco": Published(_STREAMING_30, 30, 0.05, f"Streaming DiLoCo, arXiv 2501.18512; {_TWO_OR_MORE}"),
    "eager_diloco": Published(
        (3.62, 3.27, 2.69, 2.50),
        30,
        0.25,
        "Eager updates, arXiv 2502.12996, 2 workers; 4 workers: thinwire's own 12M run, one seed",
    ),
    "sparseloco": Published(
        (3.54, 3.21, 2.68, 2.49), 30, 0.05, "SparseLoCo, arXiv 2508.15706: no worse than DiLoCo at H 15 to 250 (512M)"
    ),
    "decoupled_momentum": Published(
        (3.54, 3.21, 2.68, 2.49),
        8,  # at H = 128 it lies below DiLoCo at H = 512: no worse than four times the period
        0.05,
        "Decoupled momentum, arXiv 2510.03371: perplexity between DiLoCo's at H 128 and at H 512",
    ),
}

# Measured at one size or as another quantity: percent of the loss, the period it belongs to, and where it is from.
_FIXED = {
    "desloc": (0.4, 32, "DES-LOC, arXiv 2505.22549: perplexity within 1% of DDP at 700M, M = 4, Kx = 32"),
    "local_adam": (
        0.4,
        32,
        "DES-LOC, arXiv 2505.22549: on par with DES-LOC (zero-shot 51.8 and 51.6 at 1.7B)",
    ),
    "delayed_diloco": (
        2.2,
        30,
        "Eager updates, arXiv 2502.12996: 2.73 against 2.67 at 500M with a lower outer lr",
    ),
    "carry_diloco": (6.5, 30, "thinwire's own 12M run, M = 4, one seed: 3.723 against DDP's 3.495"),
}
_UNKNOWN = {
    "local_sgd": "DES-LOC, arXiv 2505.22549: zero-shot 50.7 against DDP's 53.8 at 1.7B, Kx = 256; no loss given",
    "demo": "DeMo, arXiv 2411.19870: no comparable number",
}


def quality(method: str, every: int, parameters: int, workers: int) -> Quality:
    """The expected cost of a method at this period, size and number of workers."""
    if method in _FIXED:
        percent, at, source = _FIXED[method]
        return Quality(round(percent + _period(every, at, parameters), 2), source)
    if method not in _PUBLISHED:
        return Quality(None, _UNKNOWN.get(method, "nothing published"))
    known = _PUBLISHED[method]
    reference = _at(_DDP, parameters)
    nats = _at(known.losses, parameters) - reference + (known.more_workers if workers >= 4 else 0.0)
    return Quality(round(100 * nats / reference + _period(every, known.every, parameters), 2), known.source)


def _at(losses: tuple[float, ...], parameters: int) -> float:
    return float(np.interp(math.log(parameters), np.log(_SIZES), losses))


def _period(every: int, at: int, parameters: int) -> float:
    """Percent that a longer period than the published one adds; a shorter one is not credited."""
    gap = _at(_STREAMING_100, parameters) - _at(_STREAMING_30, parameters)
    per_fold = 100 * gap / _at(_DDP, parameters) / math.log(100 / 30)
    return per_fold * math.log(max(every / at, 1.0))
