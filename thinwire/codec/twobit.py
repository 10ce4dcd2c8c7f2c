"""Two bits a value: four levels, each the mean of the values it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .base import STRIP, Codec, Layout, Weight, on_host
from .bits import unpack
from .blocks import aligned, by_kernels, fill, gapless, gather, spread, squeeze
from .dense import Int8
from .triton import usable

WIDTH = 4096


class TwoBit(Codec):
    """Every value as one of four levels: bin = clamp(round((x - mean) / (1.5 sigma) + 2), 0, 3), sent as its mean.

    The table of 4 floats is one per tensor where tensors lie side by side (the values that a top-k selected).
    As a codec of a whole buffer it is one per block of 4096, so that the buffer can be cut at blocks.

    >>> layout = Layout((torch.Size([4]),))
    >>> TwoBit().decode(TwoBit().encode(torch.tensor([-1.0, 1.0, 1.0, -1.0]), layout), layout)
    tensor([-1.,  1.,  1., -1.])
    """

    align = WIDTH

    @property
    def second(self) -> Codec | None:
        return Int8()

    def size(self, layout: Layout) -> int:
        return 16 * _tables(layout) + sum(-(-size // 4) for size in layout.sizes)

    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        if usable(buffer.device) and layout.align == WIDTH:
            return self._encode_by_kernels(buffer, layout, None)
        return self._encode(buffer, layout)[0]

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        if usable(buffer.device) and layout.align == WIDTH:
            own = torch.empty_like(buffer)
            return self._encode_by_kernels(buffer, layout, own), own
        payload, bins, table = self._encode(buffer, layout)
        return payload, _look_up(bins, table, layout)

    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        if layout.align == 1:
            return self.decode_all(payload[None], layout)[0]
        if usable(payload.device):
            return self._merge_by_kernels([payload], [1.0], layout)
        table, codes = _split(payload, layout)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=payload.device)
        return _look_up(((codes[:, None] >> shifts) & 3).view(-1, WIDTH), table, layout)

    def decode_all(self, payloads: Tensor, layout: Layout) -> Tensor:
        if layout.align > 1:
            return super().decode_all(payloads, layout)
        table, codes = payloads.tensor_split([16 * _tables(layout)], 1)
        bins = unpack(codes, _quads(layout).total, 2)
        levels = aligned(table, torch.float32)
        return gather(levels.gather(1, bins + _first_levels(layout, payloads.device)), _quads(layout))

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        if layout.align == WIDTH and by_kernels(payloads, weights):
            return self._merge_by_kernels(payloads, weights, layout)
        return super().merge(payloads, weights, layout)

    def _encode_by_kernels(self, buffer: Tensor, layout: Layout, own: Tensor | None) -> Tensor:
        from .triton import twobit as kernels

        payload, head = torch.empty(self.size(layout), dtype=torch.uint8, device=buffer.device), 16 * _tables(layout)
        table, codes = payload[:head].view(torch.float32), payload[head:]
        if not gapless(layout, 4):
            codes = torch.empty(layout.total // 4, dtype=torch.uint8, device=buffer.device)
        kernels.write(buffer.view(-1, WIDTH), _rows(layout, buffer.device).counts, codes, table, own)
        if not gapless(layout, 4):
            squeeze(codes, layout, 4, payload[head:])
        return payload

    def _merge_by_kernels(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        from .triton import mean as kernels

        tables, codes = zip(*(_split(payload, layout) for payload in payloads), strict=True)
        out = torch.empty(layout.total, dtype=torch.float32, device=payloads[0].device)
        return kernels.mean("two-bit", codes, tables, weights, out, _rows(layout, out.device).counts)

    def _encode(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The payload, and what it says: a bin for each value (rows, 4096), the tables (tables, 4)."""
        padded, rows = _padded(layout), _rows(layout, buffer.device)
        values = buffer if layout.align == WIDTH else spread(buffer, padded)
        quantise = _quantise_in_strips if layout.align == WIDTH else _quantise
        bins, table = quantise(values.view(-1, WIDTH), rows)
        quads = bins.view(-1, 4).unbind(1)
        codes = quads[0] | quads[1] << 2 | quads[2] << 4 | quads[3] << 6
        payload = torch.empty(self.size(layout), dtype=torch.uint8, device=buffer.device)
        payload[: 16 * len(table)] = table.view(torch.uint8).view(-1)
        if layout.align == 1:
            payload[16 * len(table) :] = gather(codes, _bytes(layout))
        elif gapless(padded, 4):
            payload[16 * len(table) :] = codes
        else:
            squeeze(codes, padded, 4, payload[16 * len(table) :])
        return payload, bins, table

    def __repr__(self) -> str:
        return "TwoBit()"


@dataclass(frozen=True)
class _Rows:
    """Which values of the matrix (rows, 4096) are real, and which rows have a table together."""

    counts: Tensor  # int64 (rows): real values, the first ones of a row
    owner: Tensor  # int64 (rows): the table
    lengths: Tensor  # int64 (tables): rows
    sizes: Tensor  # fp32 (tables): real values

    def of_their_own(self, which: slice) -> _Rows:
        """Some rows, where each has a table of its own."""
        counts = self.counts[which]
        return _Rows(counts, torch.arange(len(counts), device=counts.device), counts.new_ones(()).expand_as(counts),
                     self.sizes[which])  # fmt: skip

    def real(self) -> Tensor:
        return torch.arange(WIDTH, device=self.counts.device) < self.counts[:, None]

    def sum(self, *values: Tensor) -> Tensor:
        """n times (rows, 4096) -> (n, tables): first in rows, then over the rows of a table, always in one order."""
        partial = torch.cat([x.sum(1, dtype=torch.float32) for x in values])
        lengths = self.lengths.repeat(len(values))
        return torch.segment_reduce(partial, "sum", lengths=lengths, unsafe=True).view(len(values), len(self.lengths))


def _quantise(values: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    real = rows.real()
    mean = rows.sum(values)[0] / rows.sizes
    offset = (values - mean[rows.owner, None]).where(real, 0.0)
    sigma = (rows.sum(offset * offset)[0] / (rows.sizes - 1).clamp_(min=1)).sqrt_()
    scale = (1.5 * sigma).where(sigma > 0, 1.0)
    bins = (offset / scale[rows.owner, None] + 2).round_().clamp_(0, 3).nan_to_num_().to(torch.uint8)
    masks = [(bins == level) & real for level in range(4)]
    totals = rows.sum(*(values.where(mine, 0.0) for mine in masks))
    return bins.mul_(real), (totals / rows.sum(*masks).clamp_(min=1)).T.contiguous()


def _quantise_in_strips(values: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """The same for rows with a table each, in pieces that stay in a cache: what is made on the way is many times x."""
    bins = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    table = values.new_empty(len(values), 4)
    for strip in _strips(len(values)):
        bins[strip], table[strip] = _quantise(values[strip], rows.of_their_own(strip))
    return bins, table


def _strips(rows: int) -> list[slice]:
    step = max(1, STRIP // WIDTH)
    return [slice(at, at + step) for at in range(0, rows, step)]


def _look_up(bins: Tensor, table: Tensor, layout: Layout) -> Tensor:
    rows = _rows(layout, bins.device)
    if layout.align != WIDTH:
        return gather(_levels(bins, table[rows.owner], rows.real()).view(-1), _padded(layout))
    values = table.new_empty(bins.shape)
    for strip in _strips(len(bins)):
        values[strip] = _levels(bins[strip], table[strip], rows.of_their_own(strip).real())
    return values.view(-1)


def _levels(bins: Tensor, levels: Tensor, real: Tensor) -> Tensor:
    return levels.gather(1, bins.to(torch.int64)).where(real, 0.0)


def _split(payload: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Of a buffer of blocks: the tables fp32 (tables, 4), and the codes with their gaps."""
    table, codes = payload.tensor_split([16 * _tables(layout)])
    return table.clone().view(torch.float32).view(-1, 4), fill(codes, _padded(layout), 4)


def _tables(layout: Layout) -> int:
    if layout.align == WIDTH:
        return layout.total // WIDTH
    return sum(size > 0 for size in layout.sizes)


@lru_cache(maxsize=64)
def _padded(layout: Layout) -> Layout:
    assert layout.align in (1, WIDTH), f"TwoBit() reads tensors side by side, or each from a multiple of {WIDTH} on"
    return Layout(layout.shapes, WIDTH)


@lru_cache(maxsize=64)
def _quads(layout: Layout) -> Layout:
    """Of the values as they are sent: four a byte, each tensor from a byte of its own on."""
    return Layout(layout.shapes, 4)


@lru_cache(maxsize=64)
def _bytes(layout: Layout) -> Layout:
    """Of the bytes of the matrix (rows, 4096) that are sent."""
    return Layout(tuple(torch.Size([-(-size // 4)]) for size in layout.sizes), WIDTH // 4)


@lru_cache(maxsize=64)
@on_host
def _first_levels(layout: Layout, device: torch.device) -> Tensor:
    """int64: for each value as it is sent, where its tensor's table begins."""
    spans = torch.tensor([span for span in _quads(layout).spans if span], dtype=torch.int64)
    return (4 * torch.repeat_interleave(spans)).to(device)


@lru_cache(maxsize=64)
@on_host
def _rows(layout: Layout, device: torch.device) -> _Rows:
    sizes = [size for size in layout.sizes if size]
    counts = [min(WIDTH, size - at) for size in sizes for at in range(0, size, WIDTH)]
    lengths = [1] * len(counts) if layout.align == WIDTH else [-(-size // WIDTH) for size in sizes]
    held = counts if layout.align == WIDTH else sizes
    made = [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (counts, lengths, held)]
    owner = torch.repeat_interleave(made[1])
    return _Rows(made[0], owner, made[1], made[2].to(torch.float32))
