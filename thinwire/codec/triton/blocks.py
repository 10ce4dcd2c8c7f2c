"""Int8 and E3M0: each value is read once; scales, codes and what they say are written once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # blocks of 128 values that one program works on


def write_int8(values: Tensor, scales: Tensor, codes: Tensor, own: Tensor | None) -> None:
    """fp32 (rows, 128) -> scales fp32 (rows), codes uint8 (rows, 128) and, if wanted, own fp32 (rows, 128)."""
    grid, out = _grid(values), values if own is None else own
    # a fused multiply-add would round once where torch rounds twice
    _int8[grid](values, scales, codes.view(torch.int8), out, len(values), own is not None, ROWS, enable_fp_fusion=False)


def write_e3m0(values: Tensor, scales: Tensor, codes: Tensor, own: Tensor | None) -> None:
    """fp32 (rows, 128) -> scales uint8 (rows), codes uint8 (rows, 64) and, if wanted, own fp32 (rows, 128)."""
    grid, out = _grid(values), values if own is None else own
    _e3m0[grid](values, scales, codes, out, len(values), own is not None, ROWS)


def read_e3m0(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    _read_e3m0[_grid(out)](scales, codes, out, len(out), ROWS)


def _grid(values: Tensor) -> tuple[int]:
    return (triton.cdiv(len(values), ROWS),)


@triton.jit
def _int8(values, scales, codes, own, count, OWN: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    real = (row < count)[:, None]
    x = tl.load(values + at, mask=real, other=0.0)
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    top = tl.where(top > 7.888609052210118e-31, top, 0.0)  # 2^-100
    scale = tl.div_rn(top, 127.0 + tl.zeros_like(top))
    inverse = tl.where(top > 0, tl.div_rn(127.0 + tl.zeros_like(top), top), 0.0)
    level = x * inverse[:, None]
    floor = tl.floor(level)
    over = level - floor
    odd = (floor.to(tl.int32) & 1) == 1
    level = tl.where((over > 0.5) | ((over == 0.5) & odd), floor + 1, floor)  # to nearest, halves to even
    level = tl.minimum(tl.maximum(level, -127.0), 127.0)
    tl.store(scales + row, scale, mask=row < count)
    tl.store(codes + at, level.to(tl.int8), mask=real)
    if OWN:
        tl.store(own + at, level * scale[:, None], mask=real)


@triton.jit
def level(nibble):
    """The bits of the float that a code is in a block with e = 0."""
    code = nibble & 7
    size = tl.where(code > 0, (code + 120) << 23, 0)
    return tl.where(code > 0, size | ((nibble & 8) << 28), 0).to(tl.float32, bitcast=True)


@triton.jit
def _e3m0(values, scales, codes, own, count, OWN: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    real = (row < count)[:, None]
    bits = tl.load(values + at, mask=real, other=0.0).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    top = tl.minimum(tl.max(size, 1) >> 23, 254)
    top = tl.where(top >= 7, top, 0)  # dense.LEAST
    base = tl.where(top > 0, top, 1 << 20) - 7
    code = ((size + (0x800000 - 0x3504F4)) >> 23) - base[:, None]
    nibble = tl.minimum(tl.maximum(code, 0), 7) | ((bits >> 28) & 8)
    low, high = tl.split(tl.reshape(nibble, (ROWS, 64, 2)))
    half = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(scales + row, top.to(tl.uint8), mask=row < count)
    tl.store(codes + half, (low | (high << 4)).to(tl.uint8), mask=real)
    if OWN:
        tl.store(own + at, level(nibble) * (top << 23).to(tl.float32, bitcast=True)[:, None], mask=real)


@triton.jit
def _read_e3m0(scales, codes, out, count, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    half = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    real = (row < count)[:, None]
    byte = tl.load(codes + half, mask=real, other=0).to(tl.int32)
    scale = (tl.load(scales + row, mask=row < count, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    pair = tl.join(level(byte & 15), level(byte >> 4))
    at = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, tl.reshape(pair, (ROWS, 128)) * scale[:, None], mask=real)
