"""What all tables share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codec.base import Codec
from ..codec.dense import Float32
from ..codec.statistics import Statistics
from ..fragments import resolve
from ..replica import View, buffers, params
from ..rule import Overwrite, Rule
from ..schedule import Every
from ..table import Method, Sync

Fragments = Sequence[Sequence[str]]


def table(name: str, *rows: Sync, every: int) -> Method:
    """The rows, and one more for BatchNorm's statistics, which is empty in a model without any.

    >>> from thinwire import Average
    >>> print(table("mine", Sync(params, Every(8), Average()), every=8))
    mine: 2 rows (what | when | how it is applied | how it is written)
    params   every 8  Average()    Float32()
    buffers  every 8  Overwrite()  Statistics()
    """
    return Method(name, (*rows, Sync(buffers, Every(every), Overwrite(), Statistics())))


@dataclass(frozen=True)
class Fragment:
    """One fragment of the model, given by names or patterns; all fragments together must name each parameter once."""

    number: int
    fragments: tuple[tuple[str, ...], ...]

    def among(self, names: list[str]) -> list[str]:
        return resolve(self.fragments, names)[self.number]

    def __call__(self, name: str) -> bool:
        return name in self.among([name])

    def __str__(self) -> str:
        return f"fragment {self.number + 1} of {len(self.fragments)}"


def views_of(fragments: Fragments | None) -> list[View]:
    """The parameters as one view, or one view per fragment."""
    if fragments is None:
        return [params]
    if not fragments or not _are_lists_of_names(fragments):
        raise ValueError(
            f"fragments are lists of names or patterns of parameters, as of tw.by_layer(model, 3), not {fragments!r}"
        )
    frozen = tuple(tuple(fragment) for fragment in fragments)
    return [params.where(Fragment(number, frozen)) for number in range(len(frozen))]


def _are_lists_of_names(fragments: Any) -> bool:
    listed = isinstance(fragments, (list, tuple)) and all(isinstance(names, (list, tuple)) for names in fragments)
    return listed and all(isinstance(name, str) for names in fragments for name in names)


def parameter_rows(
    fragments: Fragments | None, every: int, delay: int, rule: Rule, codec: Codec | None, feedback: float | None = None
) -> list[Sync]:
    """One row per fragment; fragment p of P is offset by p * every // P."""
    views, when = views_of(fragments), Every(every, delay=delay)
    return [
        Sync(view, replace(when, offset=p * every // len(views)), rule, Float32() if codec is None else codec, feedback)
        for p, view in enumerate(views)
    ]
