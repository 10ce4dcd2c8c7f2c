"""The claims of the papers and of the goals, each judged from the results; what was not run is said to be so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Verdict = tuple[str, str]  # holds, does not hold, or not run; and the numbers
Test = Callable[["Known"], tuple[bool, str]]
NOISE = 0.5  # percent that are taken for noise, since no run was repeated with another seed


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

    def best(self, prefix: str) -> str:
        """The run of least loss among those whose names begin so."""
        names = [name for name in self.results if name.startswith(prefix)]
        if not names:
            raise NotRun(f"{prefix} ..")
        return min(names, key=self.loss)

    def _get(self, name: str) -> dict[str, Any]:
        if name not in self.results:
            raise NotRun(name)
        return self.results[name]


@dataclass(frozen=True)
class Claim:
    text: str
    test: Test

    def judge(self, known: Known) -> Verdict:
        try:
            holds, numbers = self.test(known)
        except NotRun as missing:
            return "not run", f"{missing} is missing"
        return "holds" if holds else "does not hold", numbers


def gap_at_most(name: str, to: str, limit: float) -> Test:
    def test(known: Known) -> tuple[bool, str]:
        gap = known.gap(name, to)
        return gap <= limit, f"{gap:+.2f}% against {to}"

    return test


def gap_at_least(name: str, to: str, limit: float) -> Test:
    def test(known: Known) -> tuple[bool, str]:
        gap = known.gap(name, to)
        return gap >= limit, f"{gap:+.2f}% against {to}"

    return test


def same_at_half_the_bytes(every: int) -> Test:
    def test(known: Known) -> tuple[bool, str]:
        mine, other = f"desloc {every}", f"local adam {every}"
        gap, ratio = known.gap(mine, other), known.bytes(other) / known.bytes(mine)
        return abs(gap) <= NOISE and ratio >= 1.9, f"{gap:+.2f}%, {ratio:.2f}x fewer bytes"

    return test


def fewer_bytes(name: str, ddp: str, at_least: float) -> Test:
    def test(known: Known) -> tuple[bool, str]:
        fewer = known.fewer(name)
        return fewer >= at_least, f"{fewer:.0f}x fewer, {known.gap(name, ddp):+.1f}% against {ddp}"

    return test


def between_the_periods(name: str) -> Test:
    """At least 16x fewer bytes than DiLoCo at H = 128, with a loss between its own at 128 and at 512."""

    def test(known: Known) -> tuple[bool, str]:
        ratio = known.bytes("diloco 128") / known.bytes(name)
        losses = [known.loss(run) for run in ("diloco 128", name, "diloco 512")]
        return ratio >= 16 and losses == sorted(losses), f"{ratio:.0f}x fewer bytes; " + " < ".join(
            f"{loss:.3f}" for loss in losses
        )

    return test


def best_at_most(prefix: str, ddp: str, limit: float) -> Test:
    def test(known: Known) -> tuple[bool, str]:
        name = known.best(prefix)
        return known.gap(name, ddp) <= limit, f"best: {name}, {known.gap(name, ddp):+.1f}%"

    return test


_DESLOC = [
    Claim(f"DES-LOC equals Local Adam within noise at half the bytes, Kx = {every}", same_at_half_the_bytes(every))
    for every in (16, 32, 256)
] + [
    Claim("DES-LOC at Kx = 256 sends 170x less than DDP; the gap is stated", fewer_bytes("desloc 256", "ddp", 170)),
    Claim("moments that meet beat moments left local, Kx = 32", gap_at_least("states local 32", "desloc 32", NOISE)),
    Claim("resetting the moments is worse, Kx = 32", gap_at_least("states reset 32", "desloc 32", NOISE)),
    Claim("Nesterov on the mean drift beats the mean, Kx = 32", gap_at_most("desloc 32 nesterov", "desloc 32", 0)),
    Claim("newcomers, workers doubled half way: stable", gap_at_most("desloc 32, doubled, mean state", "desloc 32", 1)),
    Claim("the same with Muon inside", gap_at_most("muon desloc 32", "muon local 32", NOISE)),
]  # fmt: skip

_OVERLAP = [
    Claim("eager at M = 2 loses at most the published 2.3% against DiLoCo", gap_at_most("M2 eager", "M2 diloco", 2.3)),
    Claim("eager at M = 4 loses at most 3%", gap_at_most("M4 eager", "M4 diloco", 3)),
    Claim("delayed is clearly worse than eager, M = 2",
          gap_at_least("earlier M2 delayed .4", "earlier M2 eager .4", 2)),
    Claim("delayed is clearly worse than eager, M = 4",
          gap_at_least("earlier M4 delayed .4", "earlier M4 eager .4", 2)),
    Claim("goal, M = 2: half the published gap (1.15%), relay", gap_at_most("M2 relay .6", "M2 diloco .6", 1.15)),
    Claim("goal, M = 4: under 3%, relay", gap_at_most("M4 relay .6", "M4 diloco .6", 3)),
    Claim("the same at M = 8", gap_at_most("M8 relay .6", "M8 diloco .6", 3)),
    Claim("under 3% at M = 4 with answers a whole period old: carry", gap_at_most("M4 carry", "M4 diloco .6", 3)),
    Claim("the same, in fragments", gap_at_most("M4 relay, full delay", "M4 diloco .6", 3)),
    Claim("the same, with a forecast (`bench/forecast.py`)", gap_at_most("M4 forecast", "M4 diloco .6", 3)),
    Claim("keeping local progress beats streaming's mix, M = 4", gap_at_most("M4 relay .6", "M4 relay, mixed", 0)),
]  # fmt: skip

_BETWEEN = 'decoupled momentum, "{}": 16x fewer bytes than DiLoCo at H = 128, perplexity between H = 128 and 512'
_DECOUPLED = [
    Claim(_BETWEEN.format(variant), between_the_periods(f"decoupled 128 {variant}"))
    for variant in ("consensus", "mean")
]

_COMPOSED = [
    Claim("goal: within 1% of DDP at 1000x fewer bytes, M = 4, AdamW", best_at_most("1000x", "rate adamw 2e-3", 1)),
    Claim("the same, Muon", best_at_most("muon 1000x", "rate muon 4e-3", 1)),
    Claim("within 1% at 3000x, AdamW", best_at_most("3000x", "rate adamw 2e-3", 1)),
    Claim("within 1% at 3000x, Muon", best_at_most("muon 3000x", "rate muon 4e-3", 1)),
]

CLAIMS: list[Claim] = _DESLOC + _OVERLAP + _DECOUPLED + _COMPOSED
