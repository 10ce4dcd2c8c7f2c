"""A table is written alike wherever it is made: that is how workers, and checkpoints, are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw

from .entries import ENTRIES, fleet_of, sgd, train


def begins(start: str, name: str) -> bool:
    return name.startswith(start)


class Begins:
    def __init__(self, start: str) -> None:
        self.start = start

    def __call__(self, name: str) -> bool:
        return name.startswith(self.start)


class Halves(tw.Codec):
    """A user's codec, which does not say what it is called."""

    coarse = False

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def size(self, layout: tw.Layout) -> int:
        return 2 * layout.total

    def encode(self, buffer: Tensor, layout: tw.Layout) -> Tensor:
        return buffer.half().view(torch.uint8)

    def decode(self, payload: Tensor, layout: tw.Layout) -> Tensor:
        return payload.clone().view(torch.float16).float()


class Plain(tw.Rule):
    """A user's rule, which does not either."""

    def init(self, x: tw.Live, scope: tw.Scope) -> dict[str, Any]:
        return {}

    def send(self, x: tw.Live, state: dict[str, Any], scope: tw.Scope) -> Tensor:
        return x.read()

    def recv(self, x: tw.Live, state: dict[str, Any], answer: tw.Reduced, scope: tw.Scope) -> None:
        x.write(answer.mean, answer.held)


def chosen(keep: Callable[[], Callable[[str], bool]]) -> tw.Method:
    return tw.table("mine", tw.Sync(tw.params.where(keep()), tw.Every(2), tw.Average()), every=2)


MINE: dict[str, tuple[Callable[[], tw.Method], str]] = {
    "partial": (lambda: chosen(lambda: partial(begins, "head")), "params where begins('head')  every 2"),
    "object": (lambda: chosen(lambda: Begins("head")), "params where Begins(start='head')  every 2"),
    "codec": (
        lambda: tw.table("mine", tw.Sync(tw.params, tw.Every(2), tw.Average(), Halves(exact=False)), every=2),
        "Average()    Halves(exact=False)",
    ),
    "rule": (lambda: tw.table("mine", tw.Sync(tw.params, tw.Every(2), Plain()), every=2), "Plain()      Float32()"),
}


@pytest.mark.parametrize("name", MINE)
def test_a_state_fits_the_same_table_made_again(name: str) -> None:
    make, said = MINE[name]
    assert said in str(make())
    fleet, again = fleet_of(make(), 2, sgd), fleet_of(make(), 2, sgd)
    again.load_state_dict(train(fleet, 3).state_dict())
    assert again.steps == 3


@pytest.mark.parametrize("name", ENTRIES)
def test_methods_are_equal_that_read_alike(name: str) -> None:
    method = ENTRIES[name].method
    assert copy.deepcopy(method) == method and hash(copy.deepcopy(method)) == hash(method)


def test_codecs_are_equal_that_write_alike() -> None:
    assert tw.TopK(3, 16, tw.BFloat16()) == tw.TopK(3, 16, tw.BFloat16()) != tw.TopK(3, 16, tw.Int8())
    assert tw.DCT(tw.TopK(3), 8) in {tw.DCT(tw.TopK(3), 8)} and tw.Int8() != "Int8()"
