"""Top-k of a row held in registers: narrow down the bits of the k-th largest magnitude, then compact in index order."""

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
    values = buffer.new_empty(total)
    padded = triton.next_power_of_2(width)
    table = (chunks.starts, chunks.counts, chunks.keeps, chunks.ends)
    _chosen[(len(chunks.starts),)](buffer, *table, index, values, padded, num_warps=min(16, max(1, padded // 1024)))
    return index, values


@triton.jit
def magnitude(x):
    """The bits of |x|, which are ordered as |x| is; the very last NaN is left free as a bound."""
    return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFE)


@triton.jit
def _narrow(size, k, low, held, high, first, second):
    """`low` is reached by `held`, k or more, `high` by fewer: the same again after a look at two bounds in between."""
    counts = tl.sum((size >= first).to(tl.int32) + ((size >= second).to(tl.int32) << 16))
    many, few = counts & 0xFFFF, counts >> 16
    below = tl.where(many > k, second, tl.where(many == k, first + 1, first))
    above = tl.where(few > k, high, second + 1)  # reached by k alone: found
    held = tl.where(few >= k, few, tl.where(many >= k, many, held))
    return tl.where(few >= k, second, tl.where(many >= k, first, low)), held, tl.where(few >= k, above, below)


@triton.jit
def kth(size, k):
    """The k-th largest of magnitudes, or anything down to the next smaller one, and how many reach it; of zeros at
    least k + 1."""
    high = tl.max(size) + 1
    # most often the k-th is smaller than the largest by a quarter to a half
    first, second = tl.maximum(high - (1 << 23), 0), tl.maximum(high - (1 << 21), 0)
    low, held, high = _narrow(size, k, 0, k + 1, high, first, second)
    while high - low > 1:
        third = (high - low + 1) // 3
        low, held, high = _narrow(size, k, low, held, high, low + third, high - third)
    return low, held


@triton.jit
def chosen_of_line(size, k):
    """int32 [n] magnitudes, -1 for none -> which are the k largest, and the place of each among them."""
    edge, held = kth(size, k)
    more = (size > edge).to(tl.int32)
    same = (size == edge).to(tl.int32)
    spare = k - tl.sum(more)
    seen = tl.cumsum(more + (same << 16), 0)
    ties = seen >> 16
    mine = (more > 0) | ((same > 0) & (ties <= spare))
    return mine, (seen & 0xFFFF) + tl.minimum(ties, spare) - 1


@triton.jit
def chosen_of_tile(size, order, k, S: tl.constexpr):
    """As above for (S, S), S up to 64, whose indices `order` ascend column by column; what lies in a tile is not put
    into a line again."""
    edge, held = kth(size, k)
    below, last = -1, S * S  # of equal ones those up to `last`
    while (held > k) & (last - below > 1):
        middle = (below + last) // 2
        enough = tl.sum(((size > edge) | ((size == edge) & (order <= middle))).to(tl.int32)) >= k
        below, last = tl.where(enough, below, middle), tl.where(enough, middle, last)
    mine = (size > edge) | ((size == edge) & (order <= last))
    # how many there are up to each value of its column, by a product with a triangle of ones
    triangle = (tl.arange(0, S)[:, None] >= tl.arange(0, S)[None, :]).to(tl.bfloat16)
    within = tl.dot(triangle, mine.to(tl.bfloat16))
    column = tl.sum(mine.to(tl.int32), 0)
    before = tl.cumsum(column, 0) - column - 1
    return mine, (within + before.to(tl.float32)[None, :]).to(tl.int32)


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
