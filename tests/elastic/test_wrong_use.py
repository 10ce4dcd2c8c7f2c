"""Mistakes in the use of `tw.Elastic` are said at once, in one line. Nothing here connects."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchft")

import thinwire as tw  # noqa: E402


def transport(**options: Any) -> tw.Elastic:
    return tw.Elastic("127.0.0.1:29510", **options)


def test_what_cannot_travel_is_named_when_it_is_handed_over() -> None:
    with pytest.raises(ValueError, match=r"carry\('rng'\): state\['seen'\] is a set: a state holds tensors"):
        transport().carry("rng", lambda: {"seen": {1, 2}}, print)


def test_a_newcomer_that_carries_other_things_is_told_which() -> None:
    newcomer = transport()
    newcomer.carry("schedule", dict, print)
    newcomer._refuse_other_extras({"schedule": {}})
    with pytest.raises(ValueError, match="the fleet hands on nothing, this worker schedule"):
        newcomer._refuse_other_extras({})


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_a_number_of_workers_is_a_whole_number(number: Any) -> None:
    with pytest.raises(ValueError, match="min_workers must be a whole number, at least 1"):
        transport(min_workers=number)
