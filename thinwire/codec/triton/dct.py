"""Blocks of S x S: transform and select in one pass; merge a few coefficients and transform back in another."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select import chosen

PRECISION = tl.constexpr("tf32x3")  # three products of the tensor cores: as exact as fp32, see bench/codecs.py


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
    """The k largest coefficients of each block: indices int64 (blocks, k) and values fp32 (blocks, k)."""
    index = torch.empty(len(table), k, dtype=torch.int64, device=buffer.device)
    values = torch.empty(len(table), k, device=buffer.device)
    if len(table):
        place = (table.base, table.stride, table.high, table.wide)
        _forward[(len(table),)](buffer, *place, cosines, index, values, k, len(cosines), num_warps=4)
    return index, values


def inverse(index: Tensor, values: Tensor, table: Table, cosines: Tensor, out: Tensor) -> None:
    """Entries (blocks, k) of one worker, put into the buffer `out`."""
    _launch(index[None], values[None], values, 0, 0, table, cosines, out)


def merge(index: Tensor, values: Tensor, weights: Tensor, senders: bool, table: Table, c: Tensor, out: Tensor) -> None:
    """Entries (workers, blocks, k) with weights (workers, blocks or 1): their mean, put into the buffer `out`."""
    step = 0 if weights.shape[1] == 1 else 1
    _launch(index, values, weights.contiguous(), step, 2 if senders else 1, table, c, out)


def _launch(
    index: Tensor, values: Tensor, weights: Tensor, step: int, rule: int, table: Table, c: Tensor, out: Tensor
) -> None:
    workers, blocks, k = index.shape
    if not blocks:
        return
    place = (table.base, table.stride, table.high, table.wide)
    sizes = (blocks, k, step)
    few = max(16, triton.next_power_of_2(k))
    _inverse[(blocks,)](index, values, weights, *place, c, out, *sizes, rule, workers, few, len(c), num_warps=4)


@triton.jit
def _forward(x, base, stride, high, wide, cosines, index, values, k, S: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    real = (i < tl.load(high + block)) & (j < tl.load(wide + block))
    tile = tl.load(x + tl.load(base + block) + i * tl.load(stride + block) + j, mask=real, other=0.0)
    across = tl.dot(tile, tl.load(cosines + j * S + i), input_precision=PRECISION)
    found = tl.reshape(tl.dot(tl.load(cosines + i * S + j), across, input_precision=PRECISION), (S * S,))
    mine, place = chosen(found.to(tl.int32, bitcast=True) & 0x7FFFFFFF, k)
    tl.store(index + block * k + place, tl.arange(0, S * S).to(tl.int64), mask=mine)
    tl.store(values + block * k + place, found, mask=mine)


@triton.jit
def _mean(
    at, mine, worker, index, values, weights, block, blocks, k, step,
    RULE: tl.constexpr, WORKERS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Of the entries `at` of one worker: the mean over workers in rank order; 0 if a worker before sent it too."""
    lane = tl.arange(0, K)
    total = tl.zeros((K,), tl.float32)
    heard = tl.zeros((K,), tl.float32)
    everyone = 0.0
    first = mine
    for other in range(WORKERS):
        entry = (other * blocks + block) * k + lane
        same = at[:, None] == tl.load(index + entry, mask=lane < k, other=-2)[None, :]
        value = tl.load(values + entry, mask=lane < k, other=0.0)
        weight = tl.load(weights + other * (1 + step * (blocks - 1)) + step * block)
        sent = tl.sum(same.to(tl.int32), 1) > 0
        total += tl.sum(tl.where(same, value[None, :], 0.0), 1) * weight
        heard += tl.where(sent, weight, 0.0)
        everyone += weight
        first = first & ((other >= worker) | (sent == 0))
    over = heard if RULE == 2 else tl.zeros((K,), tl.float32) + everyone
    return tl.where(first, tl.div_rn(total, tl.where(over > 0, over, 1.0)), 0.0)


@triton.jit
def _inverse(
    index, values, weights, base, stride, high, wide, cosines, out, blocks, k, step,
    RULE: tl.constexpr, WORKERS: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    lane = tl.arange(0, K)
    tile = tl.zeros((S, S), tl.float32)
    for worker in range(WORKERS):
        entry = (worker * blocks + block) * k + lane
        at = tl.load(index + entry, mask=lane < k, other=-1)
        if RULE == 0:
            value = tl.load(values + entry, mask=lane < k, other=0.0)
        else:
            value = _mean(at, lane < k, worker, index, values, weights, block, blocks, k, step, RULE, WORKERS, K)
        at = tl.maximum(at, 0)
        down = tl.load(cosines + (at // S)[None, :] * S + i)
        across = tl.load(cosines + (at % S)[:, None] * S + j) * value[:, None]
        tile = tl.dot(down, across, tile, input_precision=PRECISION)
    real = (i < tl.load(high + block)) & (j < tl.load(wide + block))
    tl.store(out + tl.load(base + block) + i * tl.load(stride + block) + j, tile, mask=real)
