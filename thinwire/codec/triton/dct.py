"""Blocks of S x S: transform and select in one pass; merge a few coefficients and transform back in another."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select import chosen_of_tile, magnitude

PRECISION = tl.constexpr("tf32x3")  # three products of the tensor cores: as exact as fp32, see bench/codecs.py
LANES = 256
TOGETHER = 128  # entries of a block that are multiplied at once


@dataclass(frozen=True)
class Table:
    """Where each block lies in a buffer; int64 (blocks) each."""

    base: Tensor  # its first value
    stride: Tensor  # from one of its rows to the next
    high: Tensor  # its real rows
    wide: Tensor  # its real columns

    def __len__(self) -> int:
        return len(self.base)


def forward(buffer: Tensor, table: Table, cosines: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest coefficients of each block: indices int32 (blocks, k) and values fp32 (blocks, k)."""
    index = torch.empty(len(table), k, dtype=torch.int32, device=buffer.device)
    values = torch.empty(len(table), k, device=buffer.device)
    place = (table.base, table.stride, table.high, table.wide)
    _forward[(len(table),)](buffer, *place, cosines, index, values, k, len(cosines), num_warps=4)
    return index, values


def mean(index: Tensor, values: Tensor, weights: Tensor, senders: bool) -> Tensor:
    """Entries (workers, blocks, k), ascending in a block, with weights (workers, blocks or 1) -> fp32 (workers, blocks,
    k): the mean at the first worker that sent an index, 0 at the others."""
    workers, blocks, k = index.shape
    merged = torch.empty_like(values)
    step = 0 if weights.shape[1] == 1 else 1
    grid = (triton.cdiv(index.numel(), LANES),)
    sizes = (workers, k.bit_length(), LANES)
    # a fused multiply-add would round once where torch rounds twice
    _mean[grid](index, values, weights, merged, blocks, k, step, senders, *sizes, enable_fp_fusion=False)
    return merged


def inverse(index: Tensor, values: Tensor, table: Table, cosines: Tensor, out: Tensor) -> None:
    """Entries (workers, blocks, k), summed and put into the buffer `out`."""
    workers, blocks, k = index.shape
    place = (table.base, table.stride, table.high, table.wide)
    sizes = (workers, *_sizes(workers, k), len(cosines))
    _inverse[(blocks,)](index, values, *place, cosines, out, blocks, k, *sizes, num_warps=4)


def _sizes(workers: int, k: int) -> tuple[int, int]:
    """Workers looked at together, and entries of each: powers of two, and 16 at least, as products of matrices want."""
    few = max(16, triton.next_power_of_2(k))
    return min(triton.next_power_of_2(workers), max(1, TOGETHER // few)), few


@triton.jit
def _forward(x, base, stride, high, wide, cosines, index, values, k, S: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    real = (i < tl.load(high + block)) & (j < tl.load(wide + block))
    tile = tl.load(x + tl.load(base + block) + i * tl.load(stride + block) + j, mask=real, other=0.0)
    c = tl.load(cosines + i * S + j)
    found = tl.dot(c, tl.dot(tile, tl.trans(c), input_precision=PRECISION), input_precision=PRECISION)
    mine, place = chosen_of_tile(magnitude(found), k, S)
    tl.store(index + block * k + place, i * S + j, mask=mine)
    tl.store(values + block * k + place, found, mask=mine)


@triton.jit
def _mean(
    index, values, weights, merged, blocks, k, step,
    SENDERS: tl.constexpr, WORKERS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    each = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = each < WORKERS * blocks * k
    worker = each // (blocks * k)
    block = each // k % blocks
    at = tl.load(index + each, mask=there, other=0)
    total = tl.zeros((LANES,), tl.float32)
    heard = tl.zeros((LANES,), tl.float32)
    everyone = tl.zeros((LANES,), tl.float32)
    first = there
    for other in range(WORKERS):  # in rank order
        start = (other * blocks + block) * k
        low = tl.zeros((LANES,), tl.int32)
        high = tl.zeros((LANES,), tl.int32) + k
        for _ in tl.static_range(STEPS):  # a binary search for the first index that is not lower
            middle = (low + high) // 2
            lower = tl.load(index + start + middle, mask=there & (low < high), other=2147483647) < at
            low, high = tl.where(lower, middle + 1, low), tl.where(lower, high, middle)
        sent = there & (low < k)
        sent = sent & (tl.load(index + start + low, mask=sent, other=-1) == at)
        value = tl.load(values + start + low, mask=sent, other=0.0)
        weight = tl.load(weights + other * (1 + step * (blocks - 1)) + step * block, mask=there, other=0.0)
        total += value * weight
        heard += tl.where(sent, weight, 0.0)
        everyone += weight
        first = first & ((other >= worker) | (sent == 0))
    over = heard if SENDERS else everyone
    tl.store(merged + each, tl.where(first, tl.div_rn(total, tl.where(over > 0, over, 1.0)), 0.0), mask=there)


@triton.jit
def _entries(block, blocks, k, group, WORKERS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr):
    """Of a group of workers: where each entry lies, and whether there is one."""
    each = tl.arange(0, GROUP * K)
    worker = group * GROUP + each // K
    return (worker * blocks + block) * k + each % K, (worker < WORKERS) & (each % K < k)


@triton.jit
def _inverse(
    index, values, base, stride, high, wide, cosines, out, blocks, k,
    WORKERS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The sum of outer products of cosines, those of a group of workers at a time."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    tile = tl.zeros((S, S), tl.float32)
    for group in range((WORKERS + GROUP - 1) // GROUP):
        place, there = _entries(block, blocks, k, group, WORKERS, GROUP, K)
        at = tl.load(index + place, mask=there, other=0)
        value = tl.load(values + place, mask=there, other=0.0)
        down = tl.load(cosines + (at // S)[:, None] * S + j)
        across = tl.load(cosines + (at % S)[:, None] * S + j) * value[:, None]
        tile = tl.dot(tl.trans(down), across, tile, input_precision=PRECISION)
    real = (i < tl.load(high + block)) & (j < tl.load(wide + block))
    tl.store(out + tl.load(base + block) + i * tl.load(stride + block) + j, tile, mask=real)
