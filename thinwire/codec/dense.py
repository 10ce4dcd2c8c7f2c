"""Codecs that carry every value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .base import Codec, Layout, Weight, on_host
from .blocks import Blocked, aligned, as_type, by_kernels
from .triton import usable

TINY = 2.0**-100  # a block with nothing larger is sent as zeros: dividing by its maximum would overflow
LEAST = 7  # the exponent, as a float has it, from which on all codes of a block are floats: one with less is zeros
TO_SQRT2 = 0x800000 - 0x3504F4  # added to a float's bits, carries into the exponent from a mantissa of sqrt(2) on


class Float32(Codec):
    """Every value as it is, 4 bytes each; the only codec whose payloads are summed on the way.

    >>> Float32().lossless
    True
    """

    lossless = True
    coarse = False

    @property
    def linear(self) -> bool:
        return True

    def size(self, layout: Layout) -> int:
        return 4 * layout.total

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return buffer.view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        return payload.clone().view(torch.float32)

    def decode_all(self, payloads: Tensor, layout: Layout) -> Tensor:
        return aligned(payloads, torch.float32)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        if not by_kernels(payloads, weights):
            return super().merge(payloads, weights, layout)
        return _mean(payloads, weights, layout, torch.float32)


class BFloat16(Codec):
    """Every value rounded to bfloat16, 2 bytes each; fine for absolute values too.

    >>> BFloat16().decode(BFloat16().encode(torch.ones(3), Layout((torch.Size([3]),))), Layout((torch.Size([3]),)))
    tensor([1., 1., 1.])
    """

    coarse = False

    @property
    def second(self) -> Codec | None:
        return self

    def size(self, layout: Layout) -> int:
        return 2 * layout.total

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return buffer.to(torch.bfloat16).view(torch.uint8)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        return as_type(payload, torch.bfloat16).float()

    def decode_all(self, payloads: Tensor, layout: Layout) -> Tensor:
        return aligned(payloads, torch.bfloat16).float()

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        if not by_kernels(payloads, weights):
            return super().merge(payloads, weights, layout)
        return _mean(payloads, weights, layout, torch.bfloat16)


class Int8(Blocked):
    """Every value as round(x / s), s = max|x| / 127 of its block of 128; 1.03 bytes a value.

    >>> layout = Layout((torch.Size([3]),), align=128)
    >>> buffer = layout.zeros(torch.device("cpu"))
    >>> buffer[:3] = torch.tensor([127.0, 3.2, -1.0])
    >>> Int8().decode(Int8().encode(buffer, layout), layout)[:3]
    tensor([127.,   3.,  -1.])
    """

    kind = "int8"
    scale = torch.float32
    per_byte = 1

    @property
    def second(self) -> Codec | None:
        return self

    def _write(self, values: Tensor, scales: Tensor, codes: Tensor, own: Tensor | None) -> None:
        if usable(values.device):
            from .triton import blocks as kernels

            return kernels.write_int8(values, scales, codes, own)
        top = values.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(1).view(torch.float32)
        top = top.where(top > TINY, 0.0)
        most = top.new_full((), 127.0)  # a number would be divided by as a product with its inverse on some devices
        scales.copy_(top / most)
        level = values * (most / top).where(top > 0, 0.0)[:, None]
        codes.view(torch.int8).copy_(level.round_().clamp_(-127, 127))
        if own is not None:
            self._read(scales, codes, own)

    def _read(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        torch.mul(codes.view(torch.int8), scales[:, None], out=out)

    def __repr__(self) -> str:
        return "Int8()"


class E3M0(Blocked):
    """Every value as a sign and one of 0, 2^(e-6) .. 2^e, e = floor(log2 max|x|) of its block of 128; half a byte.

    Rounding is to nearest in log space. Only the bits of a float are looked at, so that every device agrees.

    >>> layout = Layout((torch.Size([4]),), align=128)
    >>> buffer = layout.zeros(torch.device("cpu"))
    >>> buffer[:4] = torch.tensor([1.9, 1.4, -0.7, 0.001])
    >>> E3M0().decode(E3M0().encode(buffer, layout), layout)[:4]
    tensor([ 1.0000,  1.0000, -0.5000,  0.0000])
    """

    kind = "e3m0"
    scale = torch.uint8  # e + 127, the exponent as a float has it; 0: the block is all zeros
    per_byte = 2

    @property
    def second(self) -> Codec | None:
        return Int8()

    def _write(self, values: Tensor, scales: Tensor, codes: Tensor, own: Tensor | None) -> None:
        if usable(values.device):
            from .triton import blocks as kernels

            return kernels.write_e3m0(values, scales, codes, own)
        bits = values.view(torch.int32)
        size = bits & 0x7FFFFFFF
        top = (size.amax(1) >> 23).clamp_(max=254)
        top.mul_(top >= LEAST)
        scales.copy_(top)
        base = top.where(top > 0, 1 << 20)[:, None] - 7  # an all-zero block: below every code
        code = (size.add_(TO_SQRT2) >> 23).sub_(base).clamp_(0, 7)
        code |= (bits >> 28) & 8
        torch.bitwise_or(code[:, 0::2], code[:, 1::2] << 4, out=codes)
        if own is not None:
            self._read(scales, codes, own)

    def _read(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        if usable(out.device):
            from .triton import blocks as kernels

            return kernels.read_e3m0(scales, codes, out)
        pairs = levels(codes.device)[codes.to(torch.int32)].view(torch.float32)
        torch.mul(pairs, (scales.to(torch.int32) << 23).view(torch.float32)[:, None], out=out)

    def __repr__(self) -> str:
        return "E3M0()"


@lru_cache(maxsize=16)
@on_host
def levels(device: torch.device) -> Tensor:
    """int64 [256]: of each byte the two floats that its codes are in a block with e = 0."""
    level = torch.tensor([0.0] + [2.0**e for e in range(-6, 1)], dtype=torch.float32)
    level = torch.cat([level, 0.0 - level])
    byte = torch.arange(256)
    return torch.stack([level[byte & 15], level[byte >> 4]], 1).view(torch.int64).view(-1).to(device)


def _mean(payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout, kind: torch.dtype) -> Tensor:
    from .triton import mean as kernels

    out = torch.empty(layout.total, dtype=torch.float32, device=payloads[0].device)
    return kernels.mean("plain", [as_type(payload, kind) for payload in payloads], [], weights, out)
