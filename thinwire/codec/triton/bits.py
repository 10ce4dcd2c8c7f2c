"""Packing integers of 1 to 16 bits: each byte, and each integer, is put together by itself."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = 1024


def pack(values: Tensor, bits: int, size: int) -> Tensor:
    """Integers [n] -> uint8 [size]."""
    out = torch.empty(size, dtype=torch.uint8, device=values.device)
    if size:
        _pack[(triton.cdiv(size, STEP),)](values, out, values.numel(), size, bits, STEP)
    return out


def unpack(payload: Tensor, count: int, bits: int) -> Tensor:
    """uint8 [size] or (payloads, size) -> int32 [count] or (payloads, count)."""
    out = torch.empty(*payload.shape[:-1], count, dtype=torch.int32, device=payload.device)
    if out.numel():
        grid = (triton.cdiv(count, STEP), out.numel() // count)
        _unpack[grid](payload, out, count, payload.shape[-1], payload.stride(0), bits, STEP)
    return out


@triton.jit
def _pack(values, out, count, size, BITS: tl.constexpr, STEP: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    first = byte * 8 // BITS
    total = tl.zeros((STEP,), tl.int32)
    for place in tl.static_range(7 // BITS + 2):
        shift = ((first + place) * BITS - byte * 8).to(tl.int32)
        value = tl.load(values + first + place, mask=(first + place < count) & (shift < 8), other=0).to(tl.int32)
        total |= tl.where(shift >= 0, value << tl.maximum(shift, 0), value >> tl.maximum(-shift, 0))
    tl.store(out + byte, (total & 255).to(tl.uint8), mask=byte < size)


@triton.jit
def _unpack(payload, out, count, size, apart, BITS: tl.constexpr, STEP: tl.constexpr):
    payload += tl.program_id(1).to(tl.int64) * apart
    out += tl.program_id(1).to(tl.int64) * count
    which = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    byte = which * BITS >> 3
    total = tl.zeros((STEP,), tl.int32)
    for place in tl.static_range(3):
        total |= tl.load(payload + byte + place, mask=byte + place < size, other=0).to(tl.int32) << (8 * place)
    value = (total >> (which * BITS & 7).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(out + which, value, mask=which < count)
