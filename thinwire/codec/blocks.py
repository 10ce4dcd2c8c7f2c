"""What block codecs share: a buffer as a matrix of blocks, and payloads that leave out the gaps between tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .base import Codec, Layout, Weight, divide_by_weights
from .triton import usable

BLOCK = 128
STEP = 8192  # blocks worked on at once on a CPU: what stays in its caches


class Blocked(Codec):
    """Codes of fewer bits, and one scale for each block of 128 values of a tensor.

    A payload is all scales, then the codes of each tensor from a whole byte on; gaps are not sent. A piece of a
    buffer that is cut at blocks therefore has the scales and codes it has in the whole.
    """

    align = BLOCK
    kind: str  # what kernels call it
    scale: torch.dtype
    per_byte: int

    def size(self, layout: Layout) -> int:
        return self._head(layout) + sum(-(-size // self.per_byte) for size in layout.sizes)

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        return self._encode(buffer, layout, None)

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        own = torch.empty_like(buffer)
        return self._encode(buffer, layout, own), own

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        out = torch.empty(layout.total, dtype=torch.float32, device=payload.device)
        scales, codes = self._split(payload, layout)
        for rows in _steps(out):
            self._read(scales[rows], codes[rows], out.view(-1, BLOCK)[rows])
        return out

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        """As Codec.merge, but a stretch of all payloads at a time."""
        split = [self._split(payload, layout) for payload in payloads]
        if by_kernels(payloads, weights):
            return self._mean(split, weights, layout)
        total = layout.zeros(payloads[0].device)
        for rows in _steps(total):
            mine = total.view(-1, BLOCK)[rows]
            value = torch.empty_like(mine)
            for (scales, codes), weight in zip(split, weights, strict=True):
                self._read(scales[rows], codes[rows], value)
                mine.add_(value.mul_(weight.view(-1, BLOCK)[rows] if isinstance(weight, Tensor) else weight))
        return divide_by_weights(total, weights)

    def _mean(self, split: list[tuple[Tensor, Tensor]], weights: Sequence[Weight], layout: Layout) -> Tensor:
        from .triton import mean as kernels

        out = torch.empty(layout.total, dtype=torch.float32, device=split[0][0].device)
        codes = [code.view(-1).view(torch.int8 if self.per_byte == 1 else torch.uint8) for _, code in split]
        return kernels.mean(self.kind, codes, [scales for scales, _ in split], weights, out)

    def _split(self, payload: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The scales (blocks) and the codes (blocks, bytes) of a payload."""
        head = self._head(layout)
        scales = payload[:head].clone().view(self.scale)  # a copy is aligned, wherever the payload starts
        return scales, fill(payload[head:], layout, self.per_byte).view(len(scales), BLOCK // self.per_byte)

    def _encode(self, buffer: Tensor, layout: Layout, own: Tensor | None) -> Tensor:
        assert layout.align % BLOCK == 0, f"{self!r} reads a buffer of whole blocks of {BLOCK}"
        payload = torch.empty(self.size(layout), dtype=torch.uint8, device=buffer.device)
        head = self._head(layout)
        scales, codes = payload[:head].view(self.scale), payload[head:]
        if not gapless(layout, self.per_byte):
            codes = torch.empty(layout.total // self.per_byte, dtype=torch.uint8, device=buffer.device)
        for rows in _steps(buffer):
            mine = None if own is None else own.view(-1, BLOCK)[rows]
            self._write(buffer.view(-1, BLOCK)[rows], scales[rows], codes.view(-1, BLOCK // self.per_byte)[rows], mine)
        if not gapless(layout, self.per_byte):
            squeeze(codes, layout, self.per_byte, payload[head:])
        return payload

    def _head(self, layout: Layout) -> int:
        return layout.total // BLOCK * self.scale.itemsize

    @abstractmethod
    def _write(self, values: Tensor, scales: Tensor, codes: Tensor, own: Tensor | None) -> None:
        """fp32 (rows, 128) -> scales (rows), codes uint8 (rows, bytes) and, if wanted, own fp32 (rows, 128)."""

    @abstractmethod
    def _read(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """The other way."""


def _steps(buffer: Tensor) -> list[slice]:
    blocks = buffer.numel() // BLOCK
    step = STEP if buffer.device.type == "cpu" else max(1, blocks)
    return [slice(at, at + step) for at in range(0, blocks, step)]


@lru_cache(maxsize=256)
def runs(layout: Layout, per_byte: int) -> tuple[tuple[int, int], ...]:
    """The stretches of a code array with gaps that are sent, neighbours joined.

    >>> runs(Layout((torch.Size([4]), torch.Size([1]), torch.Size([1])), align=4), 2)
    ((0, 3), (4, 5))
    """
    found: list[tuple[int, int]] = []
    for at, size in zip(layout.offsets, layout.sizes, strict=True):
        first, last = at // per_byte, at // per_byte - (-size // per_byte)
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        elif size:
            found.append((first, last))
    return tuple(found)


def gapless(layout: Layout, per_byte: int) -> bool:
    stretches = runs(layout, per_byte)
    return not stretches or stretches == ((0, layout.total // per_byte),)


def squeeze(codes: Tensor, layout: Layout, per_byte: int, out: Tensor) -> None:
    """Codes with gaps -> codes without."""
    torch.cat([codes[first:last] for first, last in runs(layout, per_byte)], out=out)


def fill(codes: Tensor, layout: Layout, per_byte: int) -> Tensor:
    """Codes without gaps -> codes with zeros in the gaps."""
    if gapless(layout, per_byte):
        return codes
    out = torch.zeros(layout.total // per_byte, dtype=torch.uint8, device=codes.device)
    stretches = [out[first:last] for first, last in runs(layout, per_byte)]
    torch._foreach_copy_(stretches, list(codes.split([len(stretch) for stretch in stretches])))
    return out


@lru_cache(maxsize=64)
def _slots(layout: Layout, device: torch.device) -> Tensor:
    """int64 [layout.values]: where each value lies in the buffer."""
    pieces = [torch.arange(first, last, device=device) for first, last in runs(layout, 1)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)


def by_kernels(payloads: Sequence[Tensor], weights: Sequence[Weight]) -> bool:
    """Whether kernels take the mean: of payloads on a GPU, with one number each for a weight."""
    return usable(payloads[0].device) and not any(isinstance(weight, Tensor) for weight in weights)


def as_type(payload: Tensor, kind: torch.dtype) -> Tensor:
    """uint8 [bytes] -> the values; a payload that starts where this type may not is copied."""
    return (payload if payload.storage_offset() % kind.itemsize == 0 else payload.clone()).view(kind)


def aligned(payloads: Tensor, kind: torch.dtype) -> Tensor:
    """uint8 (payloads, bytes) -> (payloads, values): a copy, which starts where any type may."""
    copy = payloads.clone(memory_format=torch.contiguous_format).view(-1)
    return copy.view(kind).view(len(payloads), payloads.shape[1] // kind.itemsize)


def spread(values: Tensor, layout: Layout) -> Tensor:
    """Values that lie side by side -> a buffer of this layout."""
    if layout.total == layout.values:
        return values
    out = layout.zeros(values.device)
    out[_slots(layout, values.device)] = values
    return out


def gather(buffer: Tensor, layout: Layout) -> Tensor:
    """Buffers [..., total] of this layout -> their values side by side."""
    return buffer if layout.total == layout.values else buffer[..., _slots(layout, buffer.device)]
