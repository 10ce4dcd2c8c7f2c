"""The claims of the papers and of the goals, each judged from the results; what was not run is said to be so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Verdict = tuple[str, str]  # holds, does not hold, or not run; and the numbers


class NotRun(Exception):
    """A result that a claim needs is missing."""


@dataclass(frozen=True)
class Known:
    results: dict[str, dict[str, Any]]

    def loss(self, name: str) -> float:
        return float(self._get(name)["finished"])

    def bytes(self, name: str) -> int:
        return int(self._get(name)["bytes_sent"])

    def gap(self, name: str, to: str) -> float:
        """In percent of the loss."""
        return 100 * (self.loss(name) / self.loss(to) - 1)

    def fewer(self, name: str) -> float:
        result = self._get(name)
        return 4 * result["parameters"] * result["steps"] / result["bytes_sent"]

    def _get(self, name: str) -> dict[str, Any]:
        if name not in self.results:
            raise NotRun(name)
        return self.results[name]


@dataclass(frozen=True)
class Claim:
    text: str
    test: Callable[[Known], tuple[bool, str]]

    def judge(self, known: Known) -> Verdict:
        try:
            holds, numbers = self.test(known)
        except NotRun as missing:
            return "not run", f"{missing} is missing"
        return "holds" if holds else "does not hold", numbers


def gap_at_most(name: str, to: str, limit: float) -> Callable[[Known], tuple[bool, str]]:
    def test(known: Known) -> tuple[bool, str]:
        gap = known.gap(name, to)
        return gap <= limit, f"{gap:+.2f}% against {to}"

    return test


def gap_at_least(name: str, to: str, limit: float) -> Callable[[Known], tuple[bool, str]]:
    def test(known: Known) -> tuple[bool, str]:
        gap = known.gap(name, to)
        return gap >= limit, f"{gap:+.2f}% against {to}"

    return test


CLAIMS: list[Claim] = []
