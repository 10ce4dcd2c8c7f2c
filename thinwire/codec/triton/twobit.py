"""Two bits a value, one table for each 4096: values are read once; codes, tables and what they say written once."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WARPS = 8


def write(values: Tensor, counts: Tensor, codes: Tensor, table: Tensor, own: Tensor | None) -> None:
    """fp32 (rows, 4096), of which the first `counts` are real -> codes uint8 (rows, 1024), table fp32 (rows, 4) and,
    if wanted, own fp32 (rows, 4096)."""
    if len(values):
        tensors = (values, counts, codes, table, values if own is None else own)
        _write[(len(values),)](*tensors, own is not None, num_warps=WARPS, enable_fp_fusion=False)


@triton.jit
def _level(x, mine):
    """The mean of the values of one level; never -0.0, so that what is added to zeros stays as it is."""
    count = tl.sum(mine.to(tl.int32)).to(tl.float32)
    return tl.div_rn(tl.sum(tl.where(mine, x, 0.0)), tl.maximum(count, 1.0)) + 0.0


@triton.jit
def _write(values, counts, codes, table, own, OWN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, 1024)[:, None]
    place = tl.arange(0, 4)[None, :]
    size = tl.load(counts + row).to(tl.int32)
    here = byte * 4 + place < size
    x = tl.load(values + row * 4096 + byte * 4 + place, mask=here, other=0.0)
    offset = tl.where(here, x - tl.div_rn(tl.sum(x), size.to(tl.float32)), 0.0)
    sigma = tl.sqrt_rn(tl.div_rn(tl.sum(offset * offset), tl.maximum(size - 1, 1).to(tl.float32)))
    at = tl.div_rn(offset, tl.where(sigma > 0, 1.5 * sigma, 1.0) + tl.zeros_like(offset)) + 2.0
    # to nearest, halves to even; a NaN is in the lowest
    bins = tl.where(here, (at > 0.5).to(tl.int32) + (at >= 1.5).to(tl.int32) + (at > 2.5).to(tl.int32), 0)
    first, second = _level(x, here & (bins == 0)), _level(x, here & (bins == 1))
    third, fourth = _level(x, here & (bins == 2)), _level(x, here & (bins == 3))
    tl.store(codes + row * 1024 + tl.arange(0, 1024), tl.sum(bins << (place * 2), 1).to(tl.uint8))
    tl.store(table + row * 4, first)
    tl.store(table + row * 4 + 1, second)
    tl.store(table + row * 4 + 2, third)
    tl.store(table + row * 4 + 3, fourth)
    if OWN:
        said = tl.where(bins < 2, tl.where(bins == 0, first, second), tl.where(bins == 2, third, fourth))
        tl.store(own + row * 4096 + byte * 4 + place, tl.where(here, said, 0.0))
