"""Codecs that carry every value."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Codec, Layout


class Float32(Codec):
    """Every value as it is, 4 bytes each; the only codec whose payloads are summed on the way.

    >>> Float32().lossless
    True
    """

    lossless = True
    coarse = False

    @property
    def linear(self) -> bool:
        return True

    def size(self, layout: Layout) -> int:
        return 4 * layout.total

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return buffer.view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        return payload.clone().view(torch.float32)

    def __repr__(self) -> str:
        return "Float32()"


class BFloat16(Codec):
    """Every value rounded to bfloat16, 2 bytes each; fine for absolute values too.

    >>> BFloat16().decode(BFloat16().encode(torch.ones(3), Layout((torch.Size([3]),))), Layout((torch.Size([3]),)))
    tensor([1., 1., 1.])
    """

    coarse = False

    @property
    def second(self) -> Codec | None:
        return self

    def size(self, layout: Layout) -> int:
        return 2 * layout.total

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return buffer.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        # a payload may start at an odd byte of a larger message; a copy is aligned
        return payload.clone().view(torch.bfloat16).float()

    def __repr__(self) -> str:
        return "BFloat16()"
