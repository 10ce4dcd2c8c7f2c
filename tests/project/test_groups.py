"""Tests that use several processes stay together on one test worker, so that no two of them run side by side."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("project")
def test_the_groups_of_tests_hold(request: pytest.FixtureRequest) -> None:
    """A pytest that does not know how pytest-xdist names a group would let all of them run anywhere, without a word."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("all tests run in one process")
    assert request.node.nodeid.endswith("@project")
