"""The k values of largest magnitude in each row, ties to the lower index: the same on every device.

Magnitudes are compared as the integers that a float's bits are, with the index below them in one number, so that
no two are equal and nothing depends on how a sort or a top-k treats ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def largest(rows: Tensor, k: int) -> Tensor:
    """fp32 (rows, width) -> int64 (rows, k)."""
    width = rows.shape[1]
    if k == width:
        return torch.arange(width, device=rows.device).expand(rows.shape)
    find = _narrowed if width % LANES == 0 and 2 * k * LANES <= width else _direct
    step = max(1, STEP.get(rows.device.type, 1 << 26) // width)
    pieces = [find(piece.view(torch.int32) & 0x7FFFFFFF, k) for piece in rows.split(step)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _narrowed(sizes: Tensor, k: int) -> Tensor:
    """The k largest lie in the k runs of LANES values with the largest maxima: only these are searched."""
    count = sizes.shape[1] // LANES
    lanes = sizes.view(len(sizes), count, LANES)
    runs = LAST - _largest(_keyed(lanes.amax(2), torch.arange(count, device=sizes.device)), k)
    rows = torch.arange(0, len(sizes) * count, count, device=sizes.device)[:, None]
    close = lanes.view(-1, LANES).index_select(0, (rows + runs).view(-1)).view(len(sizes), -1)
    index = runs[:, :, None] * LANES + torch.arange(LANES, device=sizes.device)
    return _indices(_keyed(close, index.view(len(sizes), -1)), k)


def _direct(sizes: Tensor, k: int) -> Tensor:
    return _indices(_keyed(sizes, torch.arange(sizes.shape[1], device=sizes.device)), k)


def _ragged(buffer: Tensor, group: Group) -> Tensor:
    """Rows of unequal length: what lies behind a row's end comes last, and so do the entries a row does not keep."""
    lane = torch.arange(group.width, device=buffer.device)
    where = group.starts[:, None] + lane.minimum(group.counts[:, None] - 1)
    sizes = buffer[where].view(torch.int32) & 0x7FFFFFFF
    keys = _keyed(sizes, lane).where(lane < group.counts[:, None], -1)
    best = keys.topk(group.most, 1).values
    keep = torch.arange(group.most, device=buffer.device) < group.keeps[:, None]
    return (LAST - (best & LAST)).where(keep, LAST + 1).sort(1).values


def _keyed(sizes: Tensor, index: Tensor) -> Tensor:
    return (sizes.to(torch.int64) << 16) | (LAST - index)


def _largest(keys: Tensor, k: int) -> Tensor:
    return keys.topk(k, 1, sorted=False).values & LAST


def _indices(keys: Tensor, k: int) -> Tensor:
    return (LAST - _largest(keys, k)).sort(1).values
