"""Top-k of a row held in registers: bisect the bits of the k-th largest magnitude, then compact in index order."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cut import Chunks


def chosen(buffer: Tensor, chunks: Chunks, total: int, width: int) -> tuple[Tensor, Tensor]:
    """Of each chunk the values of largest magnitude, ties to the lower index: indices int32 [total], values fp32."""
    index = torch.empty(total, dtype=torch.int32, device=buffer.device)
    values = torch.empty(total, device=buffer.device)
    padded = triton.next_power_of_2(width)
    table = (chunks.starts, chunks.counts, chunks.keeps, chunks.keeps.cumsum(0))
    _chosen[(len(chunks.starts),)](buffer, *table, index, values, padded, num_warps=min(16, max(1, padded // 1024)))
    return index, values


@triton.jit
def magnitude(x):
    """The bits of |x|, which are ordered as |x| is; the very last NaN is left free as a bound."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)


@triton.jit
def kth(size, k):
    """The k-th largest of magnitudes, or anything down to the next smaller one."""
    high = tl.max(size) + 1  # fewer than k reach it
    low = tl.maximum(high - (2 << 23), 0)  # most often k are within a factor of 4 of the largest
    low = tl.where(tl.sum((size >= low).to(tl.int32)) >= k, low, 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((size >= middle).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle + 1, middle))
    return low


@triton.jit
def chosen_of_line(size, k):
    """int32 [n] magnitudes, -1 for none -> which are the k largest, and the place of each among them."""
    edge = kth(size, k)
    more = (size > edge).to(tl.int32)
    same = (size == edge).to(tl.int32)
    spare = k - tl.sum(more)
    seen = tl.cumsum(more + (same << 16), 0)
    ties = seen >> 16
    mine = (more > 0) | ((same > 0) & (ties <= spare))
    return mine, (seen & 0xFFFF) + tl.minimum(ties, spare) - 1


@triton.jit
def chosen_of_tile(size, k, S: tl.constexpr):
    """As above for (S, S), S up to 64, line by line; what lies in a tile already is not put into a line again."""
    edge = kth(size, k)
    more = (size > edge).to(tl.int32)
    same = (size == edge).to(tl.int32)
    spare = k - tl.sum(more)
    # counts up to each value of its line, both in one number, by a product with a triangle of ones
    triangle = (tl.arange(0, S)[:, None] <= tl.arange(0, S)[None, :]).to(tl.bfloat16)
    within = tl.dot((more + 128 * same).to(tl.bfloat16), triangle).to(tl.int32)
    line = tl.sum(more + (same << 16), 1)
    before = (tl.cumsum(line, 0) - line)[:, None]
    ties = (before >> 16) + (within >> 7)
    mine = (more > 0) | ((same > 0) & (ties <= spare))
    return mine, (before & 0xFFFF) + (within & 127) + tl.minimum(ties, spare) - 1


@triton.jit
def _chosen(buffer, starts, counts, keeps, ends, index, values, PADDED: tl.constexpr):
    chunk = tl.program_id(0)
    lane = tl.arange(0, PADDED)
    k = tl.load(keeps + chunk).to(tl.int32)
    here = lane < tl.load(counts + chunk)
    x = tl.load(buffer + tl.load(starts + chunk) + lane, mask=here, other=0.0)
    mine, place = chosen_of_line(tl.where(here, magnitude(x), -1), k)
    place += tl.load(ends + chunk) - k
    tl.store(index + place, lane, mask=mine)
    tl.store(values + place, x, mask=mine)
