"""What a codec is: one flat fp32 buffer in, one flat uint8 payload out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..spelling import of_attributes
from .pages import fresh

STRIP = 1 << 19  # values: several buffers of it stay in a cache, and calls cost little beside it
Weight = float | Tensor  # one number for a whole payload, or one per value of the buffer
Made = TypeVar("Made")


def on_host(make: Callable[..., Made]) -> Callable[..., Made]:
    """What it makes from nothing is made in host memory, whatever device is the user's default."""

    @wraps(make)
    def made(*args: Any) -> Made:
        with torch.device("cpu"):
            return make(*args)

    return made


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a row lie in its flat buffer.

    Each tensor starts at a multiple of `align`, so that no block of a codec holds values of two tensors.
    The gaps hold zeros, always. With `blocks` every tensor is (blocks, values of a block), and a codec that
    selects does so within each block; `blocks` says how many values of each tensor's blocks stand for real ones.

    >>> Layout((torch.Size([3]), torch.Size([2, 2])), align=4).offsets
    (0, 4)
    """

    shapes: tuple[torch.Size, ...]
    align: int = 1
    blocks: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return self._hash  # layouts are keys of many caches, and may have thousands of shapes

    @cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.align, self.blocks))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Values in each tensor."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Values each tensor takes up in the buffer, its gap included."""
        return tuple(-(-size // self.align) * self.align for size in self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        starts, at = [], 0
        for span in self.spans:
            starts.append(at)
            at += span
        return tuple(starts)

    @cached_property
    def total(self) -> int:
        return sum(self.spans)

    @cached_property
    def values(self) -> int:
        """Values that mean something: the buffer without its gaps."""
        return sum(self.sizes)

    def zeros(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return fresh(self.total)
        return torch.zeros(self.total, dtype=torch.float32, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One view per tensor, in the tensor's own shape."""
        return [
            buffer[at : at + size].view(shape)
            for at, size, shape in zip(self.offsets, self.sizes, self.shapes, strict=True)
        ]

    def values_of(self, tensor: int, first: int, last: int) -> slice:
        """Where those values of a tensor lie."""
        return slice(self.offsets[tensor] + first, self.offsets[tensor] + last)

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """The buffer cut into pieces that stay in a CPU's cache from one operation to the next."""
        return tuple(
            Strip(slice(start, min(start + STRIP, self.total)), _overlaps(self, start, start + STRIP))
            for start in range(0, self.total, STRIP)
        )

    def parts(self, count: int) -> list[Part]:
        """The buffer in `count` contiguous parts that cut no block; some may be empty."""
        return _parts(self, count)


@dataclass(frozen=True)
class Strip:
    """`buffer[span]`; `pieces` are (tensor, first, last) of the values of each tensor in it."""

    span: slice
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Part:
    """One worker's share of a buffer: `buffer[start:stop]`, itself laid out as pieces of tensors."""

    start: int
    stop: int
    layout: Layout


@lru_cache(maxsize=256)
def _parts(layout: Layout, count: int) -> list[Part]:
    blocks = layout.total // layout.align
    edges = [blocks * i // count * layout.align for i in range(count + 1)]
    return [Part(a, b, Layout(_pieces(layout, a, b), layout.align)) for a, b in zip(edges, edges[1:], strict=False)]


def _pieces(layout: Layout, start: int, stop: int) -> tuple[torch.Size, ...]:
    return tuple(torch.Size([last - first]) for _, first, last in _overlaps(layout, start, stop))


def _overlaps(layout: Layout, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """(tensor, first, last) of the values of each tensor that lie in the buffer from `start` to `stop`."""
    found, tensor = [], max(0, bisect_right(layout.offsets, start) - 1)
    while tensor < len(layout.sizes) and layout.offsets[tensor] < stop:
        at = layout.offsets[tensor]
        first, last = max(0, start - at), min(layout.sizes[tensor], stop - at)
        if last > first:
            found.append((tensor, first, last))
        tensor += 1
    return tuple(found)


class Codec(ABC):
    """HOW a message is written. Codecs have no state: what a codec drops is kept by the row, not here.

    `lossless`  decoding gives back the very bits
    `coarse`    drops or coarsens values, so it may carry differences only, never absolute values
    `align`     values each tensor is padded to in the buffer this codec reads
    `second`    the codec of the second leg when more than two workers meet; None: payloads are gathered

    >>> import thinwire as tw
    >>> codec, layout = tw.BFloat16(), tw.Layout((torch.Size([3]),))
    >>> payload = codec.encode(torch.tensor([1.0, -2.0, 3.14159]), layout)
    >>> len(payload), codec.size(layout), codec.decode(payload, layout).tolist()
    (6, 6, [1.0, -2.0, 3.140625])
    """

    lossless: bool = False
    coarse: bool = True
    align: int = 1

    @property
    def linear(self) -> bool:
        """Whether payloads may be summed on the way (an all-reduce)."""
        return False

    @property
    def second(self) -> Codec | None:
        return None

    @abstractmethod
    def size(self, layout: Layout) -> int:
        """Bytes of a payload, exactly."""

    @abstractmethod
    def encode(self, buffer: Tensor, layout: Layout) -> Tensor:
        """fp32 [layout.total] -> uint8 [size(layout)]; `buffer` is left as it was."""

    @abstractmethod
    def decode(self, payload: Tensor, layout: Layout) -> Tensor:
        """uint8 [size(layout)] -> fp32 [layout.total], a new buffer with zeros in the gaps."""

    def decode_all(self, payloads: Tensor, layout: Layout) -> Tensor:
        """uint8 (payloads, size(layout)) -> fp32 (payloads, layout.total)."""
        return torch.stack([self.decode(payload, layout) for payload in payloads])

    def encode_with_own(self, buffer: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The payload, and the buffer as the others will read it: `decode(encode(buffer))`, to the bit."""
        payload = self.encode(buffer, layout)
        return payload, self.decode(payload, layout)

    def merge(self, payloads: Sequence[Tensor], weights: Sequence[Weight], layout: Layout) -> Tensor:
        """The weighted mean of the decoded payloads, summed in the order given, in fp32.

        A value that nobody has (all weights 0) is 0.
        """
        total = layout.zeros(payloads[0].device)
        for payload, weight in zip(payloads, weights, strict=True):
            total.add_(self.decode(payload, layout).mul_(weight))
        return divide_by_weights(total, weights)

    def __repr__(self) -> str:
        return of_attributes(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def divide_by_weights(total: Tensor, weights: Sequence[Weight]) -> Tensor:
    """`total / sum(weights)` in place; 0 where nobody has any weight."""
    weight = sum(weights[1:], start=weights[0])
    if isinstance(weight, Tensor):
        return total.div_(weight.where(weight > 0, 1.0))
    return total.div_(weight) if weight > 0 else total.zero_()
