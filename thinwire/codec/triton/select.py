"""Top-k of a row held in registers: bisect the bits of the k-th largest magnitude, then compact in index order."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def largest(rows: Tensor, k: int) -> Tensor:
    """fp32 (rows, width) -> int64 (rows, k), ascending; ties to the lower index."""
    count, width = rows.shape
    index = torch.empty(count, k, dtype=torch.int64, device=rows.device)
    padded = triton.next_power_of_2(width)
    if count:
        _largest[(count,)](rows, index, width, k, padded, num_warps=4 if padded <= 4096 else 16)
    return index


@triton.jit
def chosen(size, k):
    """int32 [n] magnitudes as bits, -1 for none -> which are the k largest, and the place of each among them."""
    edge = 0
    bit = 30
    while bit >= 0:
        trial = edge | (1 << bit)
        count = tl.sum((size >= trial).to(tl.int32))
        edge = tl.where(count >= k, trial, edge)
        bit = tl.where(count == k, -1, bit - 1)  # nothing lower can matter
    more = (size > edge).to(tl.int32)
    same = (size == edge).to(tl.int32)
    spare = k - tl.sum(more)
    seen = tl.cumsum(more + (same << 16), 0)
    ties = seen >> 16
    mine = (more > 0) | ((same > 0) & (ties <= spare))
    return mine, (seen & 0xFFFF) + tl.minimum(ties, spare) - 1


@triton.jit
def _largest(rows, index, width, k, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    x = tl.load(rows + row * width + lane, mask=lane < width, other=0.0)
    size = tl.where(lane < width, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    mine, place = chosen(size, k)
    tl.store(index + row * k + place, lane.to(tl.int64), mask=mine)
