"""How a buffer is cut into the chunks that a top-k selects from: worked out once per layout and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .base import Layout, on_host

Streams = list[tuple[int, int]]  # of the indices of a payload: how many, and their bits


@dataclass(frozen=True)
class Group:
    """The chunks whose indices need the same number of bits, one per row of a matrix."""

    bits: int
    width: int  # values in the longest row
    most: int  # values kept in the row that keeps most
    total: int  # values kept in all rows
    starts: Tensor  # int64 (rows): where each row begins in the buffer
    counts: Tensor  # int64 (rows): values in each row
    keeps: Tensor  # int64 (rows): values kept of each row
    span: tuple[int, int] | None  # buffer[span] is the matrix; None: rows of unequal length, or lying apart
    picked: Tensor | None  # the rows of that matrix that are ours; None: all
    kept: Tensor | None  # int64 (total): the entries of (rows, most) that are kept; None: all


@dataclass(frozen=True)
class Chunks:
    """All chunks of a layout, in order; int64 (chunks) each."""

    starts: Tensor  # where each begins in the buffer
    counts: Tensor  # its values
    keeps: Tensor  # those kept
    tensors: Tensor  # whose it is

    @cached_property
    def ends(self) -> Tensor:
        """One past the last value kept of each, among all that are kept."""
        return self.keeps.cumsum(0)

    def __getitem__(self, mine: Tensor) -> Chunks:
        return Chunks(self.starts[mine], self.counts[mine], self.keeps[mine], self.tensors[mine])

    def to(self, device: torch.device) -> Chunks:
        return Chunks(*(x.to(device) for x in (self.starts, self.counts, self.keeps, self.tensors)))


@dataclass(frozen=True, eq=False)
class Cut:
    """Indices kept are in the order of the chunks, but in a payload those of a group lie together."""

    chunks: Chunks
    groups: tuple[Group, ...]
    values: Layout  # the values kept of each tensor, side by side
    order: Tensor | None  # from the order of the groups to that of the chunks; None: the same

    @property
    def streams(self) -> Streams:
        return [(group.total, group.bits) for group in self.groups]

    @cached_property
    def width(self) -> int:
        """Values in the longest chunk."""
        return max((group.width for group in self.groups), default=0)

    @cached_property
    def origin(self) -> Tensor:
        """int64 (values kept): where in the buffer the chunk of each begins."""
        return self.chunks.starts.repeat_interleave(self.chunks.keeps)

    @cached_property
    def back(self) -> Tensor | None:
        """From the order of the chunks to that of the groups."""
        return None if self.order is None else self.order.argsort()

    def join(self, found: Sequence[Tensor]) -> Tensor:
        """The indices [..., kept] of each group -> those of all chunks."""
        if not found:
            return self.origin
        index = torch.cat(list(found), -1)
        return index if self.order is None else index[..., self.order]

    def split(self, index: Tensor) -> list[Tensor]:
        """The other way."""
        index = index if self.back is None else index[self.back]
        return list(index.split([group.total for group in self.groups])) if self.groups else []


@lru_cache(maxsize=64)
@on_host
def cut(layout: Layout, chunk: int, k: int, device: torch.device) -> Cut:
    """A full chunk has `chunk` values and keeps `k`; one with fewer real ones as large a part, but at least one."""
    chunks = _chunks(layout, chunk, k)
    bits = torch.tensor([(int(n) - 1).bit_length() for n in range(1, chunk + 1)])[chunks.counts - 1]
    kind = torch.where(chunks.counts < chunk, 16 - bits, -chunks.keeps)
    parts = [chunks[kind == which] for which in kind.unique().tolist()]
    groups = tuple(_group(part, layout, device) for part in parts)
    owners = torch.cat([p.tensors.repeat_interleave(p.keeps) for p in parts]) if parts else chunks.tensors
    kept = torch.zeros(len(layout.shapes), dtype=torch.int64).index_add_(0, chunks.tensors, chunks.keeps)
    ordered = bool((owners.diff() >= 0).all())
    order = None if ordered else owners.sort(stable=True).indices.to(device)
    return Cut(chunks.to(device), groups, Layout(tuple(torch.Size([n]) for n in kept.tolist())), order)


@lru_cache(maxsize=256)
def counted(layout: Layout, chunk: int, k: int) -> tuple[Streams, Layout]:
    """How many indices of how many bits `cut` gives, and its values: numbers alone, for rows of any size.

    >>> counted(Layout((torch.Size([130]),), 64), 64, 4)
    ([(8, 6), (1, 1)], Layout(shapes=(torch.Size([9]),), align=1, blocks=None))
    """
    streams: dict[int, tuple[int, int]] = {}
    kept = []
    for which, size in enumerate(layout.sizes):
        width = chunk if layout.blocks is None else layout.shapes[which][1]
        kept.append(0)
        for count, held in ((size // width, width), (1, size % width)):
            if count * held:
                keep = _keep(held, held if layout.blocks is None else layout.blocks[which], chunk, k)
                bits = (held - 1).bit_length()
                kind = 16 - bits if held < chunk else -keep
                streams[kind] = (streams.get(kind, (0, 0))[0] + count * keep, bits)
                kept[-1] += count * keep
    return list(streams.values()), Layout(tuple(torch.Size([n]) for n in kept))


def _keep(held: int, real: int, chunk: int, k: int) -> int:
    """Values kept of a chunk that holds so many, `real` of which are not padding."""
    if k == chunk:  # everything is everything: without the coefficients of its padding a block would be lost
        return held
    return min(real, max(1, (2 * real * k + chunk) // (2 * chunk)))


def _chunks(layout: Layout, chunk: int, k: int) -> Chunks:
    starts, counts, keeps, tensors = [], [], [], []
    for which, (at, size, shape) in enumerate(zip(layout.offsets, layout.sizes, layout.shapes, strict=True)):
        width = chunk if layout.blocks is None else shape[1]
        assert 0 < width <= chunk
        steps = torch.arange(0, size, width)
        starts.append(at + steps)
        counts.append((size - steps).clamp_(max=width))
        held = (width, size % width or width)  # of all chunks, and of the last
        real = held if layout.blocks is None else (layout.blocks[which],) * 2
        keeps.append(torch.full_like(steps, _keep(held[0], real[0], chunk, k)))
        keeps[-1][-1:] = _keep(held[1], real[1], chunk, k)
        tensors.append(torch.full_like(steps, which))
    empty = [torch.empty(0, dtype=torch.int64)]
    return Chunks(*(torch.cat(found or empty) for found in (starts, counts, keeps, tensors)))


def _group(chunks: Chunks, layout: Layout, device: torch.device) -> Group:
    width, most = int(chunks.counts.max()), int(chunks.keeps.max())
    span, picked = _span(chunks, layout, width)
    kept = None
    if int(chunks.keeps.min()) < most:
        kept = (torch.arange(most) < chunks.keeps[:, None]).view(-1).nonzero().view(-1).to(device)
    return Group(
        bits=(width - 1).bit_length(),
        width=width,
        most=most,
        total=int(chunks.keeps.sum()),
        starts=chunks.starts.to(device),
        counts=chunks.counts.to(device),
        keeps=chunks.keeps.to(device),
        span=span,
        picked=None if picked is None else picked.to(device),
        kept=kept,
    )


def _span(chunks: Chunks, layout: Layout, width: int) -> tuple[tuple[int, int] | None, Tensor | None]:
    """The stretch of the buffer that is the group's matrix as it lies there, and its rows, if there is one."""
    first, last = int(chunks.starts[0]), int(chunks.starts[-1]) + width
    even = int(chunks.counts.min()) == width and bool((chunks.keeps == chunks.keeps[0]).all())
    if even and last - first == width * len(chunks.starts):
        return (first, last), None
    if even and layout.align == width:  # the few rows of other groups in between are cheaper to read than to skip
        return (first, last), (chunks.starts - first) // width
    return None, None
