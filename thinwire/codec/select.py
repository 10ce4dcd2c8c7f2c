"""The k values of largest magnitude in each row, ties to the lower index: the same on every device.

Magnitudes are compared as the integers that a float's bits are, with the index below them in one number, so that
no two are equal and nothing depends on how a sort or a top-k treats ties.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .crew import share
from .cut import Cut, Group
from .triton import usable

REGISTERS = 1 << 14  # values that a kernel can hold
LANES = 16  # values whose maximum is looked at first
LAST = 0xFFFF
STEP = {"cpu": 1 << 20}  # values worked on at once: what stays in a CPU's caches, and bounds the memory on a GPU


def chosen(buffer: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """The indices kept, chunk by chunk, ascending within a chunk, and the values there."""
    if usable(buffer.device) and 0 < cut.width <= REGISTERS:
        from .triton import select as kernels

        return kernels.chosen(buffer, cut.chunks, cut.values.total, cut.width)
    index = cut.join([select(buffer, group) for group in cut.groups])
    return index, buffer[cut.origin + index]


def select(buffer: Tensor, group: Group) -> Tensor:
    """int64 [group.total]: the indices kept, row by row, ascending within a row."""
    if group.span is None:
        found = _ragged(buffer, group)
    else:
        found = largest(buffer[slice(*group.span)].view(-1, group.width), group.most)
        found = found if group.picked is None else found[group.picked]
    return found.reshape(-1) if group.kept is None else found.reshape(-1)[group.kept]


def largest(rows: Tensor, k: int, room: Tensor | None = None) -> Tensor:
    """fp32 (rows, width) -> int64 (rows, k); `room`: as much memory to work in, where there is some."""
    width = rows.shape[1]
    if k == width:
        return torch.arange(width, device=rows.device).expand(rows.shape)
    index = torch.empty(len(rows), k, dtype=torch.int64, device=rows.device)
    step = max(1, STEP.get(rows.device.type, 1 << 26) // width)

    def work(share: Iterator[int]) -> None:
        memory = rows.new_empty(min(step, len(rows)), width) if room is None else room
        for at in share:
            mine = rows[at : at + step].view(torch.int32)
            sizes = memory.view(-1, width)[: len(mine)].view(torch.int32)
            index[at : at + step] = _largest(torch.bitwise_and(mine, 0x7FFFFFFF, out=sizes), k)

    share(range(0, len(rows), step), work, rows.device)
    return index


def _largest(sizes: Tensor, k: int) -> Tensor:
    width = sizes.shape[1]
    narrow = width % LANES == 0 and 2 * k * LANES <= width
    keys = _close(sizes, k) if narrow else _keyed(sizes, torch.arange(width, device=sizes.device))
    return _places(keys.topk(k, 1, sorted=False).values).sort(1).values


def _close(sizes: Tensor, k: int) -> Tensor:
    """The keys of a few values of each row, the k largest among them; a row that has fewer than others ends in -1.

    The k largest lie in the k runs of LANES values with the largest maxima, and none is smaller than these maxima.
    """
    rows, count = len(sizes), sizes.shape[1] // LANES
    lanes = sizes.view(rows, count, LANES)
    best = _keyed(lanes.amax(2), torch.arange(count, device=sizes.device)).topk(k, 1, sorted=False).values
    runs, least = _places(best), (best.amin(1, keepdim=True) >> 16).to(torch.int32)
    first = torch.arange(0, rows * count, count, device=sizes.device)[:, None]
    close = lanes.view(-1, LANES).index_select(0, (first + runs).view(-1))
    found = (close.view(rows, -1) >= least).view(-1).nonzero().view(-1)
    index = runs.view(-1).index_select(0, found // LANES) * LANES + found % LANES
    counts = torch.bincount(found // (k * LANES), minlength=rows)
    return _padded(_keyed(close.view(-1).index_select(0, found), index), counts)


def _padded(values: Tensor, counts: Tensor) -> Tensor:
    """So many values of each row, side by side -> a matrix, with -1 where a row has no more."""
    lane = torch.arange(int(counts.max()), device=values.device)
    return values.new_full((len(counts), len(lane)), -1).masked_scatter_(lane < counts[:, None], values)


def _ragged(buffer: Tensor, group: Group) -> Tensor:
    """Rows of unequal length: what lies behind a row's end comes last, and so do the entries a row does not keep."""
    lane = torch.arange(group.width, device=buffer.device)
    where = group.starts[:, None] + lane.minimum(group.counts[:, None] - 1)
    sizes = buffer[where].view(torch.int32) & 0x7FFFFFFF
    keys = _keyed(sizes, lane).where(lane < group.counts[:, None], -1)
    best = keys.topk(group.most, 1).values
    keep = torch.arange(group.most, device=buffer.device) < group.keeps[:, None]
    return _places(best).where(keep, LAST + 1).sort(1).values


def _keyed(sizes: Tensor, index: Tensor) -> Tensor:
    return (sizes.to(torch.int64) << 16).bitwise_or_(LAST - index)


def _places(keys: Tensor) -> Tensor:
    return LAST - (keys & LAST)
