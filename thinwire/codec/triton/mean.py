"""The weighted mean of dense payloads: each is read once and the mean written once, four payloads at a time."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..base import Weight
from .blocks import level

STEP = 2048  # values of a program: whole blocks of 128, and a part of one of 4096
TOGETHER = 4


def mean(
    kind: str,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    weights: Sequence[Weight],
    out: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """Payloads of a kind, each with a number for a weight: "plain" floats; "int8" and "e3m0" with the scale of each
    128 values; "two-bit" with the table of each 4096, and `counts`, how many of these are real."""
    size, numbers = out.numel(), [float(weight) for weight in weights]
    for at in range(0, len(codes) if size else 0, TOGETHER):
        count = min(TOGETHER, len(codes) - at)
        tensors = [*_some(codes, at, count), *_some(scales or codes, at, count), out if counts is None else counts]
        shares = [numbers[at + min(i, count - 1)] for i in range(TOGETHER)]
        ends = (at == 0, at + count == len(codes))
        # a fused multiply-add would round once where torch rounds twice
        grid = (triton.cdiv(size, STEP),)
        _mean[grid](*tensors, *shares, sum(numbers), out, size, kind, count, *ends, STEP, enable_fp_fusion=False)
    return out


def _some(tensors: Sequence[Tensor], at: int, count: int) -> list[Tensor]:
    """`count` tensors from `at` on, the last of them again and again until there are enough."""
    return [tensors[at + min(i, count - 1)] for i in range(TOGETHER)]


@triton.jit
def _value(codes, scales, counts, start, lane, there, KIND: tl.constexpr):
    """What a payload says from `start` on, which is a multiple of STEP."""
    if KIND == "plain":
        value = tl.load(codes + start + lane, mask=there, other=0).to(tl.float32)
    elif KIND == "int8":
        value = tl.load(codes + start + lane, mask=there, other=0).to(tl.float32)
        value = value * tl.load(scales + start // 128 + (lane >> 7), mask=there, other=0.0)
    elif KIND == "e3m0":
        byte = tl.load(codes + start // 2 + (lane >> 1), mask=there, other=0).to(tl.int32)
        scale = tl.load(scales + start // 128 + (lane >> 7), mask=there, other=0).to(tl.int32)
        value = level((byte >> ((lane & 1) * 4)) & 15) * (scale << 23).to(tl.float32, bitcast=True)
    else:
        table = start // 4096
        byte = tl.load(codes + start // 4 + (lane >> 2), mask=there, other=0).to(tl.int32)
        real = there & (start % 4096 + lane < tl.load(counts + table))
        value = tl.load(scales + table * 4 + ((byte >> ((lane & 3) * 2)) & 3), mask=real, other=0.0)
    return value


@triton.jit
def _mean(
    a, b, c, d, scale_a, scale_b, scale_c, scale_d, counts, weight_a, weight_b, weight_c, weight_d, over, out,
    size,
    KIND: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * STEP
    lane = tl.arange(0, STEP)
    there = start + lane < size
    total = tl.zeros((STEP,), tl.float32)
    if not FIRST:
        total = tl.load(out + start + lane, mask=there, other=0.0)
    total += _value(a, scale_a, counts, start, lane, there, KIND) * weight_a
    if COUNT > 1:
        total += _value(b, scale_b, counts, start, lane, there, KIND) * weight_b
    if COUNT > 2:
        total += _value(c, scale_c, counts, start, lane, there, KIND) * weight_c
    if COUNT > 3:
        total += _value(d, scale_d, counts, start, lane, there, KIND) * weight_d
    if LAST:
        total = tl.where(over > 0, tl.div_rn(total, over + tl.zeros_like(total)), 0.0)
    tl.store(out + start + lane, total, mask=there)
