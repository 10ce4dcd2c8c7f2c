"""The claims of the papers and of the goals, each judged from the results; what was not run is said to be so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from known import Known, NotRun

Verdict = tuple[str, str]  # holds, holds on average, does not hold, or not run; and the numbers
Test = Callable[[Known], Verdict]


@dataclass(frozen=True)
class Claim:
    text: str
    test: Test

    def judge(self, known: Known) -> Verdict:
        try:
            return self.test(known)
        except NotRun as missing:
            return "not run", f"{missing} is missing"


def judged(gaps: list[float], allowed: Callable[[float], bool]) -> str:
    """Of each seed, and of their mean."""
    if all(allowed(gap) for gap in gaps):
        return "holds"
    return "holds on average" if allowed(fmean(gaps)) else "does not hold"


def said(gaps: list[float]) -> str:
    both = " and ".join(f"{gap:+.2f}%" for gap in gaps)
    return f"{both} (two seeds)" if len(gaps) > 1 else both


def gap_at_most(name: str, to: str, limit: float, lowest: bool = False) -> Test:
    """`lowest`: against the lowest point of the other's curve, as if it had been stopped there."""

    def test(known: Known) -> Verdict:
        gaps = known.gaps(name, to, lowest)
        return judged(gaps, lambda gap: gap <= limit), f"{said(gaps)} against {'the lowest of ' * lowest}{to}"

    return test


def gap_at_least(name: str, to: str, limit: float) -> Test:
    def test(known: Known) -> Verdict:
        gaps = known.gaps(name, to)
        return judged(gaps, lambda gap: gap >= limit), f"{said(gaps)} against {to}"

    return test


def gap_halved(name: str, than: str, to: str) -> Test:
    """What `than` loses against `to`, `name` loses at most half of."""

    def test(known: Known) -> Verdict:
        one, other = known.gap(name, to), known.gap(than, to)
        return judged([one - other / 2], lambda rest: rest <= 0), f"{one:+.2f}% instead of {other:+.2f}% against {to}"

    return test


def worse(name: str, than: str) -> Test:
    """By more than noise."""

    def test(known: Known) -> Verdict:
        gaps, noise = known.gaps(name, than), known.noise(name, than)
        return judged(gaps, lambda gap: gap > noise), f"{said(gaps)} against {than}; noise {noise:.2f}%"

    return test


def same(name: str, other: str, fewer_bytes: float = 1.0) -> Test:
    """Within noise, and with `fewer_bytes` times fewer bytes."""

    def test(known: Known) -> Verdict:
        gaps, noise = known.gaps(name, other), known.noise(name, other)
        ratio = known.bytes(other) / known.bytes(name)
        numbers = f"{said(gaps)}; noise {noise:.2f}%; {ratio:.2f}x fewer bytes"
        return judged(gaps, lambda gap: abs(gap) <= noise and ratio >= fewer_bytes), numbers

    return test


def fewer_bytes(name: str, ddp: str, at_least: float) -> Test:
    def test(known: Known) -> Verdict:
        fewer = known.fewer(name)
        numbers = f"{fewer:.0f}x fewer, {known.gap(name, ddp):+.1f}% against {ddp}"
        return "holds" if fewer >= at_least else "does not hold", numbers

    return test


def between_the_periods(name: str, prefix: str = "") -> Test:
    """At least 16x fewer bytes than DiLoCo at H = 128, with a loss between its own at 128 and at 512, or better."""

    def test(known: Known) -> Verdict:
        ratio = known.bytes(f"{prefix}diloco 128") / known.bytes(prefix + name)
        losses = [known.loss(prefix + run) for run in ("diloco 128", name, "diloco 512")]
        numbers = f"{ratio:.0f}x fewer bytes; 128, it, 512: " + ", ".join(f"{loss:.3f}" for loss in losses)
        return "holds" if ratio >= 16 and max(losses) == losses[2] else "does not hold", numbers

    return test


def best_at_most(prefix: str, ddp: str, limit: float) -> Test:
    """The best of the runs whose names begin so, against the best of DDP's."""

    def test(known: Known) -> Verdict:
        name, base = known.best(prefix), known.best(ddp)
        gap = known.gap(name, base)
        return "holds" if gap <= limit else "does not hold", f"best: {name}, {gap:+.1f}% against {base}"

    return test


_EQUAL = "DES-LOC equals Local Adam within noise at half the bytes, {}"


def _desloc(size: str, ddp: str) -> list[Claim]:
    """The claims of the paper, of the runs whose names begin with `size`; `ddp` has as many tokens as those at 256."""

    def name(run: str) -> str:
        return size + run

    return [
        *(
            Claim(_EQUAL.format(f"Kx = {every}"), same(name(f"desloc {every}"), name(f"local adam {every}"), 1.9))
            for every in (16, 32, 256)
        ),
        Claim("DES-LOC equals averaging all states within noise, Muon inside, Kx = 32",
              same(name("muon desloc 32"), name("muon local 32"))),
        Claim("the same with ADOPT, second beta .99", same(name("ADOPT .99 desloc 32"), name("ADOPT .99 local 32"))),
        Claim("DES-LOC at Kx = 256 sends 170x less than DDP; the gap is stated",
              fewer_bytes(name("desloc 256"), ddp, 170)),
        Claim("moments that meet beat moments left local, Kx = 32", worse(name("states local 32"), name("desloc 32"))),
        Claim("the same, Kx = 256", worse(name("states local 256"), name("desloc 256"))),
        Claim("resetting the moments is worse, Kx = 32", worse(name("states reset 32"), name("desloc 32"))),
        Claim("Nesterov on the mean drift beats the mean, Kx = 32",
              gap_at_most(name("desloc 32 nesterov"), name("desloc 32"), 0)),
        Claim("DES-LOC beats DiLoCo at its default momentum .9, Kx = 256",
              worse(name("diloco 256"), name("desloc 256"))),
        Claim("newcomers, workers doubled half way: stable (at most 1%)",
              gap_at_most(name("desloc 32, doubled, mean state"), name("desloc 32"), 1)),
        Claim("newcomers need the mean of the states, not those of one worker",
              worse(name("desloc 32, doubled, one state"), name("desloc 32, doubled, mean state"))),
    ]  # fmt: skip


def _published_overlap(size: str) -> list[Claim]:
    """Periods of 30 and 100 with the published outer step, of the runs whose names begin with `size`."""

    def name(run: str) -> str:
        return size + run

    return [
        Claim("published outer step (.4, .9): eager at H = 30, M = 2, loses at most the published 2.3%",
              gap_at_most(name("M2 H30 eager"), name("M2 H30 diloco .4"), 2.3)),
        Claim("the same at H = 100", gap_at_most(name("M2 H100 eager"), name("M2 H100 diloco .4"), 2.3)),
        Claim("the same at H = 30, M = 4, at most 3%", gap_at_most(name("M4 H30 eager"), name("M4 H30 diloco .4"), 3)),
        Claim("E3M0 costs eager less than 1%", gap_at_most(name("M2 H30 eager E3M0"), name("M2 H30 eager"), 1)),
        Claim("two phases of delay lose at most 1.5% more than one, as published",
              gap_at_most(name("M2 H30 eager, two phases"), name("M2 H30 eager"), 1.5)),
        Claim("one inner step of overlap loses less than 1%",
              gap_at_most(name("M2 H30 one inner step"), name("M2 H30 diloco .4"), 1)),
        Claim("delayed is clearly worse than eager, M = 2",
              gap_at_least(name("M2 H30 delayed"), name("M2 H30 eager"), 2)),
        Claim("a lower rate (.1) mends half of delayed's loss",
              gap_halved(name("M2 H30 delayed .1"), name("M2 H30 delayed"), name("M2 H30 diloco .4"))),
    ]  # fmt: skip


_BETWEEN = 'decoupled momentum, "{}", M = {}: 16x fewer bytes than DiLoCo at H = 128, loss between H = 128 and 512'


def _decoupled(size: str, tried: dict[int, tuple[str, ...]]) -> list[Claim]:
    """By the number of workers, the variants that were run, as their names end; four workers are not in a name."""
    return [
        Claim(_BETWEEN.format(variant, workers),
              between_the_periods(f"decoupled 128 {variant}", size + ("" if workers == 4 else f"M{workers} ")))
        for workers, variants in tried.items()
        for variant in variants
    ]  # fmt: skip


def _resnets(size: str, text: str) -> list[Claim]:
    return [
        Claim(f'"{variant}" for a {text} on Fashion-MNIST, M = {m}: the same',
              between_the_periods(variant, f"{size} M{m} "))
        for m in (2, 4, 8)
        for variant in ("consensus", "consensus, 256")
    ]  # fmt: skip


DESLOC = [
    *_desloc("", "ddp"),
    Claim(_EQUAL.format("Kx = 32, 100M tokens"), same("100M desloc 32", "100M local adam 32", 1.9)),
    Claim("DES-LOC equals Local Adam, ADOPT with its published beta of .9999 (which hardly learns here, DDP included)",
          same("ADOPT+AdamW desloc 32", "ADOPT+AdamW local 32")),
]  # fmt: skip

OVERLAP = [
    Claim("eager at M = 2 loses at most the published 2.3% against DiLoCo", gap_at_most("M2 eager", "M2 diloco", 2.3)),
    Claim("eager at M = 4 loses at most 3%", gap_at_most("M4 eager", "M4 diloco", 3)),
    *_published_overlap(""),
    Claim("the published 2.3%, the 35M shape, H = 30, M = 2", gap_at_most("35M M2 eager", "35M M2 diloco .4", 2.3)),
    Claim("the published outer step, H = 100, M = 4, at most 3%", gap_at_most("M4 H100 eager", "M4 H100 diloco .4", 3)),
    Claim("delayed is clearly worse than eager, M = 4", gap_at_least("M4 H30 delayed", "M4 H30 eager", 2)),
    Claim("a lower rate (.1) mends half of delayed's loss, M = 4",
          gap_halved("M4 H30 delayed .1", "M4 H30 delayed", "M4 H30 diloco .4")),
    Claim("a lower rate (.2) mends half of eager's loss, M = 4",
          gap_halved("M4 H30 eager .2", "M4 H30 eager", "M4 H30 diloco .4")),
    Claim("one inner step of overlap loses less than 1%, M = 4",
          gap_at_most("M4 H30 one inner step", "M4 H30 diloco .4", 1)),
    Claim("E3M0 costs eager less than 1%, M = 4", gap_at_most("M4 H30 eager E3M0", "M4 H30 eager", 1)),
    Claim("goal, M = 2: half the published gap (1.15%), relay", gap_at_most("M2 relay .6", "M2 diloco .6", 1.15)),
    Claim("the same, the 35M shape", gap_at_most("35M M2 relay", "35M M2 diloco .6", 1.15)),
    Claim("goal, M = 4: under 3%, relay", gap_at_most("M4 relay .6", "M4 diloco .6", 3)),
    Claim("the same at M = 8", gap_at_most("M8 relay .6", "M8 diloco .6", 3)),
    Claim("the same at M = 4 and 100M tokens", gap_at_most("100M relay .6", "100M diloco .6", 3)),
    Claim("under 3% at M = 4 with answers a whole period old: carry", gap_at_most("M4 carry", "M4 diloco .6", 3)),
    Claim("the same, in fragments", gap_at_most("M4 relay, full delay", "M4 diloco .6", 3)),
    Claim("the same, with a forecast (`bench/forecast.py`)", gap_at_most("M4 forecast", "M4 diloco .6", 3)),
    Claim("the same, with a forecast at M = 8", gap_at_most("M8 forecast", "M8 diloco .6", 3)),
    Claim("keeping local progress beats streaming's mix, M = 4", gap_at_most("M4 relay .6", "M4 relay, mixed", 0)),
    Claim("the same, both with momentum .6", gap_at_most("M4 relay .6", "M4 relay, mixed .6", 0)),
    Claim("the same at M = 8", gap_at_most("M8 relay .6", "M8 relay, mixed .6", 0)),
]  # fmt: skip

DECOUPLED = [
    *_decoupled("", {
        2: ("consensus", "consensus, 256", "mean", "paper"),
        4: ("consensus", "consensus, 256", "mean", "mean, 256", "paper"),
        8: ("consensus", "consensus, 256", "mean", "paper"),
    }),
    *_resnets("resnet", "ResNet"),
]  # fmt: skip

COMPOSED = [
    Claim("goal: within 1% of DDP at 1000x fewer bytes, M = 4, 25M tokens, AdamW",
          best_at_most("1000x", "rate adamw", 1)),
    Claim("the same, Muon", best_at_most("muon 1000x", "rate muon", 1)),
    Claim("goal at 50M tokens (2.9 passes), AdamW: sparse averaging every 4", gap_at_most(
        "50M sparse averaging, decay .9", "ddp", 1)),
    Claim("the same, Muon: two bits every 64", gap_at_most("muon 50M two bits 64", "muon 50M ddp", 1)),
    Claim("the same with an outer rate of 1.5 (`tw.two_bit_averaging`)",
          gap_at_most("muon 50M two bits 64, outer 1.5", "muon 50M ddp", 1)),
    Claim("goal at 100M tokens (5.8 passes), AdamW: sparseloco every 4",
          gap_at_most("100M sparseloco 4", "100M ddp", 1)),
    Claim("the same, against the lowest point of DDP's curve",
          gap_at_most("100M sparseloco 4", "100M ddp", 1, lowest=True)),
    Claim("goal at 100M tokens, Muon: two bits every 64", gap_at_most("muon 100M two bits 64", "muon 100M ddp", 1)),
    Claim("the same, against the lowest point of DDP's curve",
          gap_at_most("muon 100M two bits 64", "muon 100M ddp", 1, lowest=True)),
    Claim("the same at ten times the weight decay, where DDP does not overfit",
          gap_at_most("muon 100M two bits 64, decay 1", "muon 100M ddp, decay 1", 1)),
    Claim("the same, AdamW: sparseloco every 4", gap_at_most("100M sparseloco 4, decay 1", "100M ddp, decay 1", 1)),
    Claim("the same, AdamW: sparse averaging every 4",
          gap_at_most("100M sparse averaging, decay 1", "100M ddp, decay 1", 1)),

    Claim("goal at 25M tokens in four times as many steps, AdamW: sparse averaging every 4",
          best_at_most("steps 1000x", "steps rate adamw", 1)),
    Claim("the same, Muon: two bits every 64", best_at_most("steps muon 1000x", "steps rate muon", 1)),
    Claim("within 1% at 3000x, 25M tokens, AdamW", best_at_most("3000x", "rate adamw", 1)),
    Claim("the same, Muon", best_at_most("muon 3000x", "rate muon", 1)),
    Claim("within 1% at 3000x, 100M tokens, Muon: two bits every 192",
          gap_at_most("muon 100M two bits 192", "muon 100M ddp", 1)),
    Claim("slow momentum inside (as MT-DAO) improves DDP, AdamW", gap_at_most("slow adamw ddp", "rate adamw 2e-3", 0)),
    Claim("the same, Muon", gap_at_most("slow muon ddp", "rate muon 4e-3", 0)),
]  # fmt: skip

FRESH_DESLOC = _desloc("fresh ", "fresh rate adamw 4e-3")

FRESH_OVERLAP = [
    *_published_overlap("fresh "),
    Claim("delayed is clearly worse than eager, M = 4",
          gap_at_least("fresh M4 H30 delayed", "fresh M4 H30 eager", 2)),
    *(
        Claim(f"goal, M = {m}: at most {limit}% above DiLoCo with the same outer step, relay",
              gap_at_most(f"fresh M{m} H30 relay", f"fresh M{m} H30 diloco .6", limit))
        for m, limit in ((2, 1.15), (4, 3), (8, 3))
    ),
]  # fmt: skip

_VARIANTS = ("consensus", "consensus, 256", "mean", "paper")
FRESH_DECOUPLED = [
    *_decoupled("fresh ", {2: _VARIANTS, 4: (*_VARIANTS, "mean, 256")}),
    *_resnets("small resnet", "ResNet-8"),
]

FRESH_COMPOSED = [
    Claim("goal: within 1% of DDP at 1000x fewer bytes, M = 4, AdamW: one of 64 every 5",
          gap_at_most("fresh 1000x one of 64, 5, decay .8", "fresh rate adamw 4e-3", 1)),
    Claim("the same with an outer rate of 1.5",
          gap_at_most("fresh 1000x one of 64, 5, decay .8, outer 1.5", "fresh rate adamw 4e-3", 1)),
    Claim("the same with a rate of 1, M = 8",
          gap_at_most("fresh M8 1000x one of 64, 5, decay .8", "fresh rate adamw 4e-3", 1)),
    Claim("the same with sparseloco, M = 4: 30 of 4,096 every 4",
          gap_at_most("fresh 1000x sparseloco 4", "fresh rate adamw 4e-3", 1)),
    Claim("the same with Muon: two bits every 64",
          gap_at_most("fresh muon 1000x two bits 64", "fresh rate muon 4e-3", 1)),
    Claim("the same with Muon: one of 64 every 5",
          gap_at_most("fresh muon 1000x one of 64, 5, decay .8", "fresh rate muon 4e-3", 1)),
    Claim("within 1% at 3000x, AdamW: one of 64 every 14",
          gap_at_most("fresh 3000x one of 64, 14", "fresh rate adamw 4e-3", 1)),
]  # fmt: skip
