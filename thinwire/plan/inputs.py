"""What the planner is asked, from the words on the command line, a run directory or a probe."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from thinwire import units
from thinwire.plan.advisor import OWN_CONFIG, Limits, Site, Trouble
from thinwire.plan.timeline import Link

FLEET_BATCH = 2**19  # tokens of one step of the whole fleet where nothing says otherwise
TOKENS_PER_PARAMETER = 20
MEGABYTE = 10**6
MOST = {"--params": 10**18, "--layers": 1000, "--workers": 10_000}  # beyond these a plan takes minutes, or all memory


@dataclass
class Facts:
    """What is known so far; what is None must still be told."""

    parameters: int | None = None
    layers: int | None = None
    step_times: list[float] | None = None
    links: list[Link] | None = None
    workers: int | None = None
    batch_tokens: int | None = None
    config: str | None = None  # the file that holds the model

    def update(self, other: Facts) -> None:
        """What `other` knows replaces what was known."""
        for name in (f.name for f in fields(self)):
            if getattr(other, name) is not None:
                setattr(self, name, getattr(other, name))

    def same_model(self, told: Facts) -> bool:
        """Whether what was told leaves the model as it is; blocks that nobody knew may be told."""
        same_size = told.parameters in (None, self.parameters)
        return same_size and (self.layers is None or told.layers in (None, self.layers))


def site(facts: Facts) -> Site:
    """The site, or one line that names what is missing."""
    options = {
        "parameters": "--params",
        "layers": "--layers",
        "step_times": "--step-time",
        "links": "--bandwidth",
        "workers": "--workers",
    }
    missing = [option for name, option in options.items() if getattr(facts, name) is None]
    if missing:
        raise ValueError(f"also needed: {' '.join(missing)} (or --run DIR, or --probe under torchrun)")
    assert facts.parameters and facts.layers and facts.step_times and facts.links and facts.workers
    _refuse_more(facts.parameters, "--params")
    _refuse_more(facts.layers, "--layers")
    _refuse_more(facts.workers, "--workers")
    if facts.parameters < facts.layers:
        raise ValueError(f"--params {facts.parameters} is fewer than --layers {facts.layers}")
    times = _one_or_each(facts.step_times, facts.workers, "--step-time")
    _one_or_each(facts.links, facts.workers, "--bandwidth")
    batch = facts.batch_tokens or max(1, FLEET_BATCH // facts.workers)
    config = facts.config or OWN_CONFIG
    return Site(facts.parameters, facts.layers, tuple(times), tuple(facts.links), batch, config)


def _refuse_more(value: int, option: str) -> None:
    if value > MOST[option]:
        raise ValueError(f"{option} {value}: more than {MOST[option]:,} cannot be planned for")


def _one_or_each(values: list[Any], workers: int, option: str) -> list[Any]:
    if len(values) not in (1, workers):
        raise ValueError(f"{option} has {len(values)} values for {workers} workers: give one, or one for each worker")
    return values * workers if len(values) == 1 else values


def whole(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()) or int(text) < 1:
        raise ValueError(f"{option} {text}: must be a whole number, 1 or more")
    return int(text)


def step_times(text: str) -> list[float]:
    times = [units.duration(part) for part in text.split(",")]
    if min(times) <= 0:
        raise ValueError(f"--step-time {text}: must be more than zero")
    return times


def links(bandwidth: str, latency: str) -> list[Link]:
    delay, jitter = units.spread(latency)
    return [Link(up, down, delay, jitter) for up, down in map(units.line, bandwidth.split(","))]


def limits(gpu_memory: str | None, ram: str | None) -> Limits:
    device = _memory("--gpu-memory", gpu_memory) if gpu_memory else None
    return Limits(device, _memory("--ram", ram) if ram else None)


def _memory(option: str, text: str) -> int:
    """A bare number is bytes, but nobody means so few."""
    size = units.size(text)
    if size < MEGABYTE:
        raise ValueError(f"{option} {text} is {units.show_size(size)}: write the unit as well, for example 80GB")
    return size


def trouble(mtbf: str | None, slow_workers: str | None, workers: int) -> Trouble | None:
    """`--slow-workers` is a share or a number of workers, and how many times slower they are: 5%, 3, 5%x1.5."""
    if mtbf is None and slow_workers is None:
        return None
    seconds = units.duration(mtbf) if mtbf else float("inf")
    if seconds <= 0:
        raise ValueError(f"--mtbf {mtbf}: must be more than zero")
    many, x, factor = (slow_workers or "0").partition("x")
    share = units.share(many) if "%" in many or "." in many else _share_of(_count(many), workers)
    slowdown = float(factor) if re.fullmatch(r"[0-9]*\.?[0-9]+", factor) else 0.0 if x else 2.0
    if slowdown < 1:
        raise ValueError(f"--slow-workers {slow_workers}: write 5%, 3, or 5%x1.5 (share or number, times slower)")
    return Trouble(seconds, share, slowdown)


def _share_of(slow: int, workers: int) -> float:
    if slow > workers:
        raise ValueError(f"--slow-workers {slow}: there are only {workers} workers")
    return slow / workers


def _count(text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"--slow-workers {text}: write 5%, 3, or 5%x1.5 (share or number, times slower)")
    return int(text)
