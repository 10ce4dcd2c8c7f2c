"""The codec of BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Codec, Layout, Weight


class Statistics(Codec):
    """Float32, gathered: means and variances are averaged, counters (the 0-d tensors) taken by maximum.

    >>> Statistics().size(Layout((torch.Size([8]), torch.Size([]))))
    36
    """

    lossless = True
    coarse = False

    def size(self, layout: Layout) -> int:
        return 4 * layout.total

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return buffer.view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        return payload.clone().view(torch.float32)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        mean = super().merge(payloads, weights, layout)
        counters = [at for at, shape in zip(layout.offsets, layout.shapes, strict=True) if len(shape) == 0]
        taking_part = [self.decode(p, layout) for p, weight in zip(payloads, weights, strict=True) if _counts(weight)]
        mean[counters] = torch.stack([buffer[counters] for buffer in taking_part]).amax(0)
        return mean


def _counts(weight: Weight) -> bool:
    return bool(weight.any()) if isinstance(weight, Tensor) else weight > 0
