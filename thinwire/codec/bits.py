"""Integers of 1 to 16 bits, packed into bytes and read back: lowest bit first, no bit between two values."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from .triton import usable


def packed(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take.

    >>> packed(3, 12)
    5
    """
    return -(-count * bits // 8)


def pack(values: Tensor, bits: int) -> Tensor:
    """Integers [n] in 0 .. 2**bits - 1 -> uint8 [packed(n, bits)]; with 0 bits nothing.

    >>> pack(torch.tensor([0xABC, 0xDEF]), 12).tolist() == [0xBC, 0xFA, 0xDE]
    True
    """
    assert 0 <= bits <= 16
    if usable(values.device) and bits:
        from .triton import bits as kernels

        return kernels.pack(values, bits, packed(values.numel(), bits))
    group, width = _period(bits)
    rows = -(-values.numel() // group)
    padded = torch.zeros(rows * group, dtype=torch.int32, device=values.device)
    padded[: values.numel()] = values
    columns = padded.view(rows, group).unbind(1)
    out = torch.empty(rows, width, dtype=torch.uint8, device=values.device)
    for byte in range(width):
        out[:, byte] = _byte(columns, bits, byte)
    return out.view(-1)[: packed(values.numel(), bits)]


def unpack(payload: Tensor, count: int, bits: int) -> Tensor:
    """uint8 [..., packed(count, bits)] -> int32 [..., count], what `pack` was given.

    >>> unpack(pack(torch.tensor([5, 0, 6]), 3), 3, 3).tolist()
    [5, 0, 6]
    """
    assert 0 <= bits <= 16
    if usable(payload.device) and bits:
        from .triton import bits as kernels

        return kernels.unpack(payload, count, bits)
    group, width = _period(bits)
    rows = -(-count // group)
    padded = torch.nn.functional.pad(payload, (0, rows * width - payload.shape[-1]))
    columns = padded.unflatten(-1, (rows, width)).to(torch.int32).unbind(-1)
    out = torch.zeros(*payload.shape[:-1], rows, group, dtype=torch.int32, device=payload.device)
    for place in range(group if bits else 0):
        out[..., place] = _value(columns, bits, place)
    return out.flatten(-2)[..., :count]


def _period(bits: int) -> tuple[int, int]:
    """The fewest values that fill whole bytes, and those bytes: 12 bits are pairs in 3 bytes."""
    shared = gcd(bits, 8)
    return 8 // shared, bits // shared


def _byte(columns: tuple[Tensor, ...], bits: int, byte: int) -> Tensor:
    """Byte `byte` of each group: the bits of the values that overlap it."""
    first, last = 8 * byte // bits, (8 * byte + 7) // bits
    total = _shift(columns[first], bits * first - 8 * byte)
    for place in range(first + 1, last + 1):
        total = total | _shift(columns[place], bits * place - 8 * byte)
    return total & 0xFF


def _value(columns: tuple[Tensor, ...], bits: int, place: int) -> Tensor:
    """Value `place` of each group: the bits of the bytes that overlap it."""
    first, last = bits * place // 8, (bits * place + bits - 1) // 8
    total = _shift(columns[first], 8 * first - bits * place)
    for byte in range(first + 1, last + 1):
        total = total | _shift(columns[byte], 8 * byte - bits * place)
    return total & ((1 << bits) - 1)


def _shift(values: Tensor, by: int) -> Tensor:
    return values << by if by >= 0 else values >> -by
