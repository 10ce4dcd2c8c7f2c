"""What travels beside a message: who sends it, what it weighs, and what the workers should have in common."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIXED = struct.Struct("<QddqB")


@dataclass
class Header:
    """`checksum` is that of the shared copy; `present` says which tensors this replica has this round."""

    size: int = 0
    weight: float = 0.0
    norm: float = 0.0
    checksum: int = 0
    equal: bool = False
    present: list[bool] = field(default_factory=list)

    def pack(self, length: int) -> bytes:
        bits = bytearray(-(-len(self.present) // 8))
        for i, there in enumerate(self.present):
            bits[i // 8] |= there << i % 8
        return (_FIXED.pack(self.size, self.weight, self.norm, self.checksum, self.equal) + bits).ljust(length, b"\0")

    @classmethod
    def unpack(cls, blob: bytes, tensors: int) -> Header:
        size, weight, norm, checksum, equal = _FIXED.unpack_from(blob)
        bits = blob[_FIXED.size :]
        return cls(size, weight, norm, checksum, bool(equal), [bool(bits[i // 8] >> i % 8 & 1) for i in range(tensors)])


def header_length(most_tensors: int) -> int:
    """Bytes of every header of a fleet, whose longest row has this many tensors.

    >>> header_length(100) - header_length(0)
    13
    """
    return _FIXED.size + -(-most_tensors // 8)


def checksum(buffer: Tensor) -> int:
    """Of the bits, the same on every device: the sum of the values read as integers, which wraps around."""
    if not buffer.is_contiguous():
        buffer = buffer.contiguous()
    raw = buffer.reshape(-1).view(torch.uint8)
    even = raw.numel() // 8 * 8
    words = raw[:even].view(torch.int64) if raw.data_ptr() % 8 == 0 else raw[:even].clone().view(torch.int64)
    return int(words.sum() + 31 * raw[even:].sum(dtype=torch.int64))  # a GPU is waited for once


def wrapped(number: int) -> int:
    """As 64 bits hold it: the checksums of a buffer's strips add up to its own, if all but the last are of whole words.

    >>> wrapped(2**63 + 5) == 5 - 2**63
    True
    """
    return (number + 2**63) % 2**64 - 2**63
