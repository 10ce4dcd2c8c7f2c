"""The discrete cosine transform of blocks of a tensor, and any codec on its coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .base import Codec, Layout, Weight
from .cosine import exact
from .fused import WIDEST, Fused
from .pages import fresh
from .plan import piece_plan, whole_plan
from .sparse import TopK
from .stream import Streamed
from .triton import usable
from .whole import Whole


class DCT(Codec):
    """`inner` on the orthonormal DCT-II of blocks: `chunk` x `chunk` of a matrix, rows of `chunk` of a vector.

    An axis shorter than `chunk` is taken whole, a longer one padded with zeros to a multiple of it; more than two
    axes are read as (first, rest). With `inner` a TopK(k), k of each full block are kept, whatever its own chunk, and
    of a block that is padded as large a part as its real values are; with k = everything, everything. With TwoBit
    values a tensor has a table for its full blocks, and one each for those at the right edge, below and in the corner.
    Payloads are merged as coefficients and transformed back once.

    >>> layout = Layout((torch.Size([2, 2]),), align=64)
    >>> codec, buffer = DCT(TopK(1)), layout.zeros(torch.device("cpu"))
    >>> buffer[:4] = 1.0
    >>> codec.decode(codec.encode(buffer, layout), layout)[:4].round(decimals=3)
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, inner: Codec, chunk: int = 64) -> None:
        if not isinstance(inner, Codec):
            raise ValueError(f"DCT writes its coefficients with a codec, as in DCT(TopK(32), 64), not with {inner!r}")
        check_chunk(chunk)
        if isinstance(inner, TopK):
            inner = TopK(inner.k, chunk * chunk, inner.values, inner.rule)
        self.inner, self.chunk = inner, chunk
        self.align = chunk

    def size(self, layout: Layout) -> int:
        return sum(way.size for way in self._ways(layout, torch.device("cpu")))

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        with exact(buffer.device):
            return torch.cat([way.encode(buffer) for way in self._ways(layout, buffer.device)])

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        own = _blank(layout, buffer.device)
        with exact(buffer.device):
            return torch.cat([way.encode_with_own(buffer, own) for way in self._ways(layout, buffer.device)]), own

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        out = _blank(layout, payload.device)
        parts = self._ways(layout, payload.device)
        with exact(out.device):
            for way, mine in zip(parts, payload.split([way.size for way in parts]), strict=True):
                way.decode(mine, out)
        return out

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        """As Codec.merge; a weight given per value must be the same throughout a tensor."""
        out = _blank(layout, payloads[0].device)
        parts = self._ways(layout, out.device)
        split = torch.stack(list(payloads)).split([way.size for way in parts], 1)
        heads = [_per_tensor(weight, layout) for weight in weights]
        with exact(out.device):
            for way, mine in zip(parts, split, strict=True):
                way.merge(mine, heads, out)
        return out

    def _ways(self, layout: Layout, device: torch.device) -> list[Streamed | Whole | Fused]:
        return ways(self.inner, self.chunk, layout, usable(device) and self.chunk <= WIDEST)

    def __repr__(self) -> str:
        return f"DCT({self.inner!r}, chunk={self.chunk})"


def check_chunk(chunk: int) -> None:
    if type(chunk) is not int or not 1 <= chunk <= 256:
        raise ValueError(f"DCT transforms blocks of 1 to 256 along an axis, not {chunk!r}")


@lru_cache(maxsize=64)
def ways(inner: Codec, chunk: int, layout: Layout, kernels: bool) -> list[Streamed | Whole | Fused]:
    """Top-k of full blocks goes strip by strip; what is left, and any other codec, by all coefficients at once.
    Kernels do top-k of any block."""
    if not isinstance(inner, TopK):
        return [Whole(inner, whole_plan(layout, chunk, inner.align))]
    full, rest = piece_plan(layout, chunk, True), piece_plan(layout, chunk, False)
    if kernels:
        return [Fused(inner, full, chunk), Fused(inner, rest, chunk)]
    return [Streamed(inner, full), Whole(inner, rest)]


def _blank(layout: Layout, device: torch.device) -> Tensor:
    """A buffer to be filled but for its gaps."""
    if device.type == "cpu":
        return fresh(layout.total)
    if layout.total > layout.values:
        return layout.zeros(device)
    return torch.empty(layout.total, dtype=torch.float32, device=device)


def _per_tensor(weight: Weight, layout: Layout) -> Weight:
    """One number per value -> one per tensor; that of an empty tensor means nothing."""
    if not isinstance(weight, Tensor):
        return weight
    first = torch.tensor(layout.offsets, dtype=torch.int64, device=weight.device)
    return weight[first.clamp_(max=max(0, layout.total - 1))] if layout.total else weight.new_zeros(len(layout.shapes))
