"""Who holds which share of the data."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft")

from thinwire.elastic.epoch import Introduction, _allot  # noqa: E402


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([None, None], [0, 1]),
        ([2, None, 0, None], [2, 1, 0, 3]),
        ([0, 1, 1], [0, 1, 2]),  # the last was away, and came back to find its share given to another
        ([1, None, 1, None], [1, 0, 2, 3]),
    ],
)
def test_no_share_is_held_by_two(before: list[int | None], after: list[int]) -> None:
    members = [Introduction(str(i), slot, begun=slot is not None) for i, slot in enumerate(before)]
    _allot(members)
    assert [member.slot for member in members] == after
