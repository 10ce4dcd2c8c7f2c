"""Who holds which share of the data, and how many members it takes."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft")

from thinwire.elastic.epoch import Epoch, Introduction, _allot  # noqa: E402
from thinwire.transport import Local  # noqa: E402


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


def test_one_who_waits_for_more_has_all_the_members_wait() -> None:
    """A newcomer knows nobody from before the coordinator went, and must not train while the others wait for one."""
    old = [Introduction(id, slot, begun=True, sought=["a", "b", "gone"]) for slot, id in enumerate("ab")]
    newcomer = Introduction("n", 2, begun=False)
    assert Epoch(1, Local(), [newcomer]).wanted == 1
    assert Epoch(1, Local(), [*old, newcomer]).wanted == 4
    assert Epoch(1, Local(), [newcomer, Introduction("m", 3, begun=False, least=3)]).wanted == 3
