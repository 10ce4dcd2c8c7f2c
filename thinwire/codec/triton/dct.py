"""The cosine transform of blocks: transform and select in one pass; put entries back and transform in another.

A tile is S x S; a block that is smaller lies in its corner, with zeros around. Programs stay and take block after
block, so that what all blocks need is read once. Tiles of coefficients are held transposed: that way no operand of
the tensor cores has to be turned.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .select import chosen_of_tile, magnitude

PRECISION = tl.constexpr("tf32x3")  # three products of the tensor cores: as exact as fp32, see bench/codecs.py
PUT = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")
# programs of a multiprocessor, loads under way, and what a program may have: as many registers as lets so many run
FORWARD = {"programs": 3, "stages": 1, "num_warps": 4, "maxnreg": 168}
SPREAD = {"programs": 3, "stages": 1, "num_warps": 4, "maxnreg": 168}
INVERSE = {"programs": 4, "stages": 3, "num_warps": 4}


@dataclass(frozen=True, eq=False)
class Tiles:
    """Where blocks lie in a buffer, and what each is."""

    base: Tensor  # int64 (blocks): the first value
    stride: Tensor  # int64 (blocks): from one row to the next
    about: Tensor  # int32 (blocks, 8): see `_about`
    cosines: Tensor  # fp32 (sizes, S, S): (frequency, place) of each size that there is
    full: bool  # whether each block is S x S, without padding
    most: int  # entries of the block that keeps most
    entries: int  # of all blocks


def forward(buffer: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The largest coefficients of each block: indices int32 [entries], ascending in a block, and values fp32."""
    index = torch.empty(tiles.entries, dtype=torch.int32, device=buffer.device)
    values = buffer.new_empty(tiles.entries)
    _launch(_forward, FORWARD, buffer, tiles, index, values, tiles.most)
    return index, values


def spread(index: Tensor, values: Tensor, weights: Tensor, senders: bool, tiles: Tiles, out: Tensor) -> None:
    """Entries (workers, entries) with weights (workers, blocks or 1) -> the blocks of their mean, over those that sent
    an entry or over all, in `out`, whatever it holds."""
    step = 0 if weights.shape[1] == 1 else 1
    sizes = (tiles.most, max(16, triton.next_power_of_2(tiles.most)), len(index), senders and len(index) > 1)
    _launch(_spread, SPREAD, out, tiles, index, values, weights, tiles.entries, weights.shape[1], step, *sizes)


def inverse(buffer: Tensor, tiles: Tiles) -> None:
    """Full blocks: coefficients, each block's where its values belong -> the values, in place."""
    _launch(_inverse, INVERSE, buffer, tiles)


def _launch(kernel, how: dict[str, int], buffer: Tensor, tiles: Tiles, *rest) -> None:
    blocks, side = len(tiles.base), tiles.cosines.shape[-1]
    if blocks:
        options = dict(how)
        grid = (min(blocks, options.pop("programs") * processors(buffer.device)),)
        table = (tiles.base, tiles.stride, tiles.about, tiles.cosines, blocks)
        kernel[grid](buffer, *table, *rest, tiles.full, side, options.pop("stages"), **options)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _about(about, block):
    """High, wide; rows and columns that are not padding; which cosines go with both; entries, and the first of them."""
    a = about + block * 8
    high, wide, rows, columns = tl.load(a), tl.load(a + 1), tl.load(a + 2), tl.load(a + 3)
    return high, wide, rows, columns, tl.load(a + 4), tl.load(a + 5), tl.load(a + 6), tl.load(a + 7)


@triton.jit
def _forward(
    x, base, stride, about, cosines, blocks, index, values, k,
    FULL: tl.constexpr, S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    wave = tl.load(cosines + j * S + i)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        place = x + tl.load(base + block) + i * tl.load(stride + block) + j
        if FULL:
            across = _product(tl.load(place), wave)
            found = _product(tl.trans(across), wave)  # (across, down)
            size, order, keep, first = magnitude(found), j * S + i, k, block * k
        else:
            high, wide, rows, columns, up, along, keep, first = _about(about, block)
            tile = tl.load(place, mask=(i < rows) & (j < columns), other=0.0)
            across = _product(tile, tl.load(cosines + along * (S * S) + j * S + i))
            found = _product(tl.trans(across), tl.load(cosines + up * (S * S) + j * S + i))
            size, order = tl.where((i < wide) & (j < high), magnitude(found), -1), j * wide + i
        mine, at = chosen_of_tile(size, order, keep, S)
        _put(index + first + at, order, mine)
        _put(values + first + at, found.to(tl.int32, bitcast=True), mine)


@triton.jit
def _spread(
    out, base, stride, about, cosines, blocks, index, values, weights, entries, row, step,
    K: tl.constexpr, PADDED: tl.constexpr, WORKERS: tl.constexpr, SENDERS: tl.constexpr,
    FULL: tl.constexpr, S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    each = tl.arange(0, PADDED)
    wave = tl.load(cosines + i * S + j)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        place = out + tl.load(base + block) + j * tl.load(stride + block) + i
        high, wide, rows, columns, up, along, keep, first = S, S, S, S, 0, 0, K, block * K
        if not FULL:
            high, wide, rows, columns, up, along, keep, first = _about(about, block)
        there = each < keep
        all_at, all_values, share = index + first + each, values + first + each, weights + step * block
        at_of, value_of = all_at, all_values
        turned = tl.zeros((S, S), tl.float32)  # the first product of the way back: (place across, frequency down)
        for worker in range(WORKERS):
            at = tl.load(at_of, mask=there, other=0)
            over = _over(at, all_at, share, there, entries, row, PADDED, WORKERS, SENDERS)
            value = tl.load(value_of, mask=there, other=0.0) * tl.load(share + worker * row)
            value = tl.div_rn(value, tl.where(over > 0, over, 1.0))
            at_of, value_of = at_of + entries, value_of + entries
            cosine = tl.load(cosines + along * (S * S) + (at % wide)[None, :] * S + i)
            lines = tl.trans((at // wide)[None, :] == i).to(tl.float32)
            head, rest = _halves(cosine * value[None, :])  # a product with ones and zeros needs no more
            turned = tl.dot(head, lines, tl.dot(rest, lines, turned, input_precision="tf32"), input_precision="tf32")
        if FULL:
            tl.store(place, _product(turned, wave))
        else:
            back = _product(turned, tl.load(cosines + up * (S * S) + i * S + j))
            tl.store(place, back, mask=(i < columns) & (j < rows))


@triton.jit
def _over(
    at, theirs, weights, there, entries, row, PADDED: tl.constexpr, WORKERS: tl.constexpr, SENDERS: tl.constexpr
):  # fmt: skip
    """What the sum of each entry is divided by: the weight of those that sent it, or of all."""
    heard = tl.zeros((PADDED, PADDED), tl.float32)
    everyone = tl.zeros((PADDED,), tl.float32)
    for other in range(WORKERS):
        weight = tl.load(weights + other * row)
        everyone += weight
        heard += tl.where(at[:, None] == tl.load(theirs, mask=there, other=-1)[None, :], weight, 0.0)
        theirs += entries
    if SENDERS:
        everyone = tl.sum(heard, 1)
    return everyone


@triton.jit
def _halves(x):
    """x as the nearest number that the tensor cores read exactly, and what is left."""
    head = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return head, x - head


@triton.jit
def _product(a, b):
    """a @ b by three products of the tensor cores: as exact as fp32."""
    a_head, a_rest = _halves(a)
    b_head, b_rest = _halves(b)
    small = tl.dot(a_head, b_rest, tl.dot(a_rest, b_head, input_precision="tf32"), input_precision="tf32")
    return tl.dot(a_head, b_head, small, input_precision="tf32")


@triton.jit
def _put(pointer, value, mask):
    """Stores a few int32 of a tile from where they are held; tl.store would sort all of them by address first."""
    operands = [pointer.to(tl.int64), value, mask.to(tl.int32)]
    tl.inline_asm_elementwise(PUT, "=r,l,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _inverse(x, base, stride, about, cosines, blocks, FULL: tl.constexpr, S: tl.constexpr, STAGES: tl.constexpr):
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    wave = tl.load(cosines + i * S + j)
    turned = tl.load(cosines + j * S + i)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        place = x + tl.load(base + block) + i * tl.load(stride + block) + j
        across = tl.dot(tl.load(place), wave, input_precision=PRECISION)
        tl.store(place, tl.dot(turned, across, input_precision=PRECISION))
