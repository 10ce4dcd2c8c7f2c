"""The mean of what several workers sent, straight to where it belongs."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cut import Cut

LANES = 256


@dataclass(frozen=True)
class Places:
    """Where the entries of each chunk go: entry i to base + i // side * stride + i % side."""

    base: Tensor  # int64 (chunks)
    stride: Tensor  # int64 (chunks)
    side: int
    owner: Tensor  # int32 (entries): the chunk of each
    ends: Tensor  # int64 (chunks): one past the last entry of each
    most: int  # entries of the chunk that has most

    @classmethod
    def of(cls, base: Tensor, stride: Tensor, side: int, keeps: Tensor) -> Places:
        owner = torch.repeat_interleave(keeps).to(torch.int32)
        return cls(base, stride, side, owner, keeps.cumsum(0), int(keeps.max()) if len(keeps) else 0)


@lru_cache(maxsize=64)
def rows(cut: Cut) -> Places:
    """Of chunks that lie in a buffer as they are."""
    starts = cut.chunks.starts
    return Places.of(starts, torch.zeros_like(starts), max(1, cut.width), cut.chunks.keeps)


def merge(index: Tensor, values: Tensor, weights: Tensor, senders: bool, places: Places, out: Tensor) -> Tensor:
    """Entries (workers, entries), ascending in a chunk, with weights (workers, chunks or 1) -> their mean, over those
    that sent an entry or over all, in `out`, which holds zeros."""
    workers, entries = index.shape
    if entries:
        table = (places.owner, places.ends, places.base, places.stride)
        step = 0 if weights.shape[1] == 1 else 1
        numbers = (entries, weights.shape[1], step, places.side)
        sizes = (workers, places.most.bit_length(), LANES)
        grid = (triton.cdiv(entries, LANES), workers)
        # a fused multiply-add would round once where torch rounds twice
        _merge[grid](index, values, weights, *table, out, *numbers, senders, *sizes, enable_fp_fusion=False)
    return out


@triton.jit
def _merge(
    index, values, weights, owner, ends, base, stride, out, entries, row, step, side,
    SENDERS: tl.constexpr, WORKERS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(1)
    each = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = each < entries
    chunk = tl.load(owner + each, mask=there, other=0)
    start = tl.load(ends + chunk - 1, mask=there & (chunk > 0), other=0)
    end = tl.load(ends + chunk, mask=there, other=0)
    at = tl.load(index + worker.to(tl.int64) * entries + each, mask=there, other=0)
    total = tl.zeros((LANES,), tl.float32)
    heard = tl.zeros((LANES,), tl.float32)
    everyone = tl.zeros((LANES,), tl.float32)
    earlier = tl.zeros((LANES,), tl.int32)
    theirs = tl.zeros((LANES,), tl.int64)
    for other in range(WORKERS):  # in rank order
        low, high = start, end
        for _ in tl.static_range(STEPS):  # a binary search for the first index that is not lower
            middle = (low + high) // 2
            lower = tl.load(index + theirs + middle, mask=there & (low < high), other=2147483647) < at
            low, high = tl.where(lower, middle + 1, low), tl.where(lower, high, middle)
        sent = there & (low < end)
        sent = sent & (tl.load(index + theirs + low, mask=sent, other=-1) == at)
        weight = tl.load(weights + other * row + step * chunk, mask=there, other=0.0)
        total += tl.load(values + theirs + low, mask=sent, other=0.0) * weight
        heard += tl.where(sent, weight, 0.0)
        everyone += weight
        earlier += tl.where(sent & (other < worker), 1, 0)
        theirs += entries
    over = heard if SENDERS else everyone
    mean = tl.div_rn(total, tl.where(over > 0, over, 1.0))
    to = tl.load(base + chunk, mask=there, other=0) + (at // side) * tl.load(stride + chunk, mask=there, other=0)
    tl.store(out + to + at % side, mean, mask=there & (earlier == 0))  # the first that sent an entry writes it
