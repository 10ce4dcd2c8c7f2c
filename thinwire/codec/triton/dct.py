"""Blocks of S x S: transform and select in one pass; transform back in another."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .merge import Places
from .select import chosen_of_tile, magnitude

PRECISION = tl.constexpr("tf32x3")  # three products of the tensor cores: as exact as fp32, see bench/codecs.py


def forward(buffer: Tensor, places: Places, cosines: Tensor) -> tuple[Tensor, Tensor]:
    """The largest coefficients of each block: indices int32 (blocks, k) and values fp32 (blocks, k)."""
    blocks, k = len(places.base), places.most
    index = torch.empty(blocks, k, dtype=torch.int32, device=buffer.device)
    values = torch.empty(blocks, k, device=buffer.device)
    _forward[(blocks,)](buffer, places.base, places.stride, cosines, index, values, k, len(cosines), num_warps=4)
    return index, values


def inverse(buffer: Tensor, places: Places, cosines: Tensor) -> None:
    """Coefficients, each block's where its values belong -> the values, in place."""
    _inverse[(len(places.base),)](buffer, places.base, places.stride, cosines, len(cosines), num_warps=4)


@triton.jit
def _forward(x, base, stride, cosines, index, values, k, S: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    tile = tl.load(x + tl.load(base + block) + i * tl.load(stride + block) + j)
    c = tl.load(cosines + i * S + j)
    found = tl.dot(c, tl.dot(tile, tl.trans(c), input_precision=PRECISION), input_precision=PRECISION)
    mine, place = chosen_of_tile(magnitude(found), k, S)
    tl.store(index + block * k + place, i * S + j, mask=mine)
    tl.store(values + block * k + place, found, mask=mine)


@triton.jit
def _inverse(x, base, stride, cosines, S: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    place = x + tl.load(base + block) + i * tl.load(stride + block) + j
    c = tl.load(cosines + i * S + j)
    across = tl.dot(tl.load(place), c, input_precision=PRECISION)
    tl.store(place, tl.dot(tl.trans(c), across, input_precision=PRECISION))
