"""The orthonormal DCT-II of the blocks of a tensor, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sqrt

import torch
from torch import Tensor

from .base import on_host

STEP = 1 << 20  # values worked on at once on a CPU: what stays in its caches, with all that is made on the way


@dataclass(frozen=True)
class Blocks:
    """A tensor read as a matrix and cut into `down` x `across` blocks of `high` x `wide`.

    An axis shorter than `chunk` is taken whole, a longer one is padded with zeros to a multiple of `chunk`.

    >>> blocks = Blocks.of(torch.Size([100, 3, 3]), 64)
    >>> blocks.down, blocks.across, blocks.high, blocks.wide
    (2, 1, 64, 9)
    """

    rows: int
    columns: int
    high: int
    wide: int

    @classmethod
    def of(cls, shape: torch.Size, chunk: int) -> Blocks:
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape.numel() // rows if rows else 0
        if rows == 1 and columns % chunk == 0:  # a vector without padding is a matrix of its rows, which stacks well
            return cls(columns // chunk, chunk, 1, chunk)
        return cls(rows, columns, max(1, min(rows, chunk)), max(1, min(columns, chunk)))

    @property
    def down(self) -> int:
        return -(-self.rows // self.high)

    @property
    def across(self) -> int:
        return -(-self.columns // self.wide)

    @property
    def count(self) -> int:
        return self.down * self.across

    @property
    def shape(self) -> torch.Size:
        """Of the coefficients: one block a row."""
        return torch.Size([self.count, self.high * self.wide])

    @property
    def real(self) -> int:
        """Values of a block that are not padding, where all blocks have as many."""
        return min(self.rows, self.high) * min(self.columns, self.wide)

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts large blocks before small ones, and those that stack side by side."""
        return -self.high * self.wide, -self.real, -self.high, self.columns, self.rows % self.high

    def stacks(self, other: Blocks) -> bool:
        """Whether this matrix with the other one below it is again such a matrix."""
        same = (self.columns, self.high, self.wide) == (other.columns, other.high, other.wide)
        return same and self.rows % self.high == 0

    def parts(self) -> Iterator[tuple[int, Blocks]]:
        """The blocks without padding, those padded on the right, those below, and the corner: where each begins.

        >>> [(at, part.rows, part.columns) for at, part in Blocks.of(torch.Size([100, 70]), 64).parts()]
        [(0, 64, 64), (64, 64, 6), (4480, 36, 64), (4544, 36, 6)]
        """
        down, across = self.rows // self.high * self.high, self.columns // self.wide * self.wide
        for top, rows in ((0, down), (down, self.rows - down)):
            for left, columns in ((0, across), (across, self.columns - across)):
                part = Blocks(rows, columns, self.high, self.wide)
                if self.rows == 1 and columns == across:  # of a vector: a matrix of its rows, as above
                    part = Blocks(rows * columns // self.wide, self.wide, 1, self.wide)
                yield top * self.columns + left, part

    def strips(self, device: torch.device) -> list[Strip]:
        """The tensor in whole rows of blocks: a few at a time on a CPU, all at once elsewhere."""
        if not self.count:
            return []
        step = max(1, STEP // (self.high * self.across * self.wide)) if device.type == "cpu" else self.down
        return [Strip(self, at, min(at + step, self.down)) for at in range(0, self.down, step)]


@dataclass(frozen=True)
class Strip:
    """Some rows of blocks: `first` to `last` of the `down` there are."""

    blocks: Blocks
    first: int
    last: int

    @property
    def mine(self) -> slice:
        """Which blocks of the tensor, counted row by row."""
        return slice(self.first * self.blocks.across, self.last * self.blocks.across)

    @property
    def size(self) -> int:
        """Values of the strip, its padding included."""
        return (self.last - self.first) * self.blocks.across * self.blocks.high * self.blocks.wide

    def forward(self, tensor: Tensor, room: Tensor) -> Tensor:
        """The matrix -> coefficients (blocks of the strip, high * wide), in `room` (2 or more, size)."""
        b = self.blocks
        values, half = room[0].view(-1, b.high, b.wide), room[1].view(-1, b.high, b.wide)
        target = values.view(-1, b.across, b.high, b.wide).transpose(1, 2)
        target.copy_(self._padded(self._rows(tensor)).view(target.shape))
        torch.mm(room[0].view(-1, b.wide), cosines(b.wide, tensor.device).T, out=room[1].view(-1, b.wide))
        if b.high == 1:
            return half.flatten(1)
        left = cosines(b.high, tensor.device)
        return torch.bmm(left.expand(len(half), -1, -1), half, out=values).flatten(1)

    def inverse(self, coefficients: Tensor, tensor: Tensor, room: Tensor) -> None:
        """Coefficients (blocks of the strip, high * wide), maybe room[0], -> the strip's part of the matrix."""
        wide, half = self.blocks.wide, room[1]
        torch.mm(coefficients.view(-1, wide), cosines(wide, tensor.device), out=half.view(-1, wide))
        self._inverse_down(half, tensor, room)

    def inverse_of_some(self, index: Tensor, values: Tensor, tensor: Tensor, room: Tensor) -> None:
        """As `inverse`, of entries (blocks of the strip, n), ascending by index; those at one place are added up.

        Waves across are added up row by row: a matrix product would multiply zeros nearly always.
        """
        b, count = self.blocks, len(index) * self.blocks.high
        row, first = index // b.wide, torch.arange(0, count, b.high, device=index.device)[:, None]
        lengths = torch.bincount((row + first).view(-1), minlength=count)
        starts, across = lengths.cumsum(0).sub_(lengths).to(index.dtype), (index - row * b.wide).view(-1)
        waves, sizes = cosines(b.wide, tensor.device), values.view(-1)
        half = torch.nn.functional.embedding_bag(across, waves, starts, mode="sum", per_sample_weights=sizes)
        self._inverse_down(half, tensor, room)

    def _inverse_down(self, half: Tensor, tensor: Tensor, room: Tensor) -> None:
        """What is left when the blocks are transformed back across."""
        b, padded = self.blocks, self._rows(tensor).numel() < self.size
        half = half.view(-1, b.high, b.wide)
        if b.high == 1:
            self._put(half, tensor)
        elif padded or b.high % 2:
            left = cosines(b.high, tensor.device).T.expand(len(half), -1, -1)
            self._put(torch.bmm(left, half, out=room[0].view(half.shape)), tensor)
        else:
            self._mirrored(half, tensor, room[0].view(2, len(half), b.high // 2, b.wide))

    def _mirrored(self, half: Tensor, tensor: Tensor, room: Tensor) -> None:
        """As `_inverse_down`, by half the multiplications: even waves are the same from both ends, odd ones negated."""
        b, middle = self.blocks, self.blocks.high // 2
        for parity in (0, 1):
            waves = cosines(b.high, tensor.device)[parity::2, :middle].T
            torch.bmm(waves.expand(len(half), -1, -1), half[:, parity::2], out=room[parity])
        there = self._rows(tensor).view(-1, b.high, b.across, b.wide).transpose(1, 2)
        even, odd = (x.view(-1, b.across, middle, b.wide) for x in room)
        torch.add(even, odd, out=there[:, :, :middle])
        there[:, :, middle:] = torch.sub(even, odd, out=even).flip(2)

    def inverse_of_few(self, index: Tensor, values: Tensor, tensor: Tensor, room: Tensor) -> None:
        """As `inverse`, of k coefficients of each block, no more than its shorter side, and where they are.

        Each is a wave down times a wave across: one product of k of both, not two of whole blocks. `room`: (3, size).
        """
        b, k = self.blocks, index.shape[1]
        down, across = room[0, : index.numel() * b.high], room[1, : index.numel() * b.wide]
        torch.index_select(cosines(b.high, tensor.device), 0, (index // b.wide).view(-1), out=down.view(-1, b.high))
        torch.index_select(cosines(b.wide, tensor.device), 0, (index % b.wide).view(-1), out=across.view(-1, b.wide))
        down.view(-1, b.high).mul_(values.reshape(-1, 1))
        whole = room[2].view(-1, b.high, b.wide)
        self._put(torch.bmm(down.view(-1, k, b.high).mT, across.view(-1, k, b.wide), out=whole), tensor)

    def _put(self, values: Tensor, tensor: Tensor) -> None:
        """Values (blocks of the strip, high, wide), without the padding, into the matrix."""
        b, target = self.blocks, self._rows(tensor)
        across = values.view(-1, b.across, b.high, b.wide).transpose(1, 2)
        if target.numel() == values.numel():
            target.view(across.shape).copy_(across)
        else:
            target.copy_(across.reshape(-1, b.across * b.wide)[: len(target), : b.columns])

    def _rows(self, tensor: Tensor) -> Tensor:
        b = self.blocks
        return tensor[self.first * b.high : self.last * b.high]

    def _padded(self, part: Tensor) -> Tensor:
        right, below = -self.blocks.columns % self.blocks.wide, -len(part) % self.blocks.high
        return torch.nn.functional.pad(part, (0, right, 0, below)) if right or below else part


@lru_cache(maxsize=256)
@on_host
def cosines(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II matrix, fp32 (frequency, place), worked out in double precision."""
    rows = [
        [sqrt((1 if k == 0 else 2) / size) * cos(pi * ((2 * n + 1) * k % (4 * size)) / (2 * size)) for n in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32).to(device)


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """fp32 matrix products, whatever precision the user has chosen for training."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
