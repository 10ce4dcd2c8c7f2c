"""The orthonormal DCT-II of the blocks of a tensor, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sqrt

import torch
from torch import Tensor

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

    def forward(self, tensor: Tensor) -> Tensor:
        """The matrix -> coefficients (blocks of the strip, high * wide)."""
        b = self.blocks
        part = self._padded(self._rows(tensor)).view(-1, b.high, b.across, b.wide).transpose(1, 2)
        found = product(part.reshape(-1, b.high, b.wide), cosines(b.wide, tensor.device).T)
        if b.high > 1:
            found = product(cosines(b.high, tensor.device), found)
        return found.flatten(1)

    def inverse(self, coefficients: Tensor, tensor: Tensor) -> None:
        """Coefficients (blocks of the strip, high * wide) -> the strip's part of the matrix."""
        b = self.blocks
        values = product(coefficients.view(-1, b.high, b.wide), cosines(b.wide, tensor.device))
        left, target = cosines(b.high, tensor.device).T, self._rows(tensor)
        if b.high == 1 or target.numel() < values.numel():
            return self.put(values if b.high == 1 else product(left, values), tensor)
        across = values.view(-1, b.across, b.high, b.wide).transpose(1, 2).reshape(-1, b.high, b.columns)
        torch.bmm(left.expand(len(across), -1, -1), across, out=target.view(across.shape))

    @property
    def size(self) -> int:
        """Values of the strip, its padding included."""
        return (self.last - self.first) * self.blocks.across * self.blocks.high * self.blocks.wide

    def places(self, index: Tensor) -> Tensor:
        """Indices (..., blocks of the strip, k) of coefficients -> where each goes if a block lies as in the matrix."""
        b = self.blocks
        block = torch.arange(index.shape[-2], device=index.device)[:, None]
        corner = block // b.across * (b.high * b.columns) + block % b.across * b.wide
        return ((index // b.wide).to(torch.int64) * (b.columns - b.wide) + index + corner).flatten(-2)

    def inverse_in_place(self, coefficients: Tensor, tensor: Tensor, room: Tensor) -> None:
        """As `inverse`, of coefficients at their `places`, without padding, by way of `room`: nothing is moved."""
        b, left = self.blocks, cosines(self.blocks.high, tensor.device).T
        torch.mm(coefficients.view(-1, b.wide), cosines(b.wide, tensor.device), out=room.view(-1, b.wide))
        across = room.view(-1, b.high, b.columns)
        torch.bmm(left.expand(len(across), -1, -1), across, out=self._rows(tensor).view(across.shape))

    def put(self, values: Tensor, tensor: Tensor) -> None:
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


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products of a batch; one side may be a single matrix, which is then not copied."""
    count = max(len(x) for x in (a, b) if x.dim() == 3)
    a, b = (x if x.dim() == 3 else x.expand(count, *x.shape) for x in (a, b))
    return torch.bmm(a, b)


@lru_cache(maxsize=256)
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
