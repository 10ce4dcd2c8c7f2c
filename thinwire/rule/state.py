"""A rule's state, and what rules do with buffers."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor

from ..codec.base import STRIP

State = MutableMapping[str, Tensor | None]


def buffer(state: State, name: str) -> Tensor:
    value = state[name]
    assert value is not None, name
    return value


def strips(*buffers: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """On a CPU, pieces that stay in its cache from one operation to the next: half the memory traffic."""
    return [buffers] if buffers[0].is_cuda else zip(*(buffer.split(STRIP) for buffer in buffers), strict=True)
