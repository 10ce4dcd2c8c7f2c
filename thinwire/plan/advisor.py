"""Every method on one line-up of machines and links: what it costs, and which one to take."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

import thinwire as tw
from thinwire.cost import Cost
from thinwire.plan import failures
from thinwire.plan.method import Sketch, round_seconds, utilization
from thinwire.plan.quality import quality
from thinwire.plan.timeline import Array, Compute, Link
from thinwire.train.methods import build_method, method_keys, methods, resolved_method

DAY = 86400
ENOUGH = 0.9  # what a recommendation must reach of the utilization that the machines allow
OWN_CONFIG = "CONFIG.toml"  # stands for the user's own file
TRAINING_BYTES = 16  # device memory per parameter without any method: weights, gradients and two moments in fp32
HEALING_BYTES = 12  # what a replacement worker receives per parameter: weights and two moments
RESTART = 60.0  # seconds until a dead worker's process is there again

Setting = dict[str, Any]  # the method section of a trainer's config: name, every, fragments, codec, ...


@dataclass(frozen=True)
class Site:
    """The machines and lines to plan for; `links` is one for all workers or one for each."""

    parameters: int
    layers: int
    step_times: tuple[float, ...]
    links: tuple[Link, ...]
    batch_tokens: int  # of one worker in one step
    config: str = OWN_CONFIG  # the trainer's file that holds the model

    @property
    def workers(self) -> int:
        return len(self.step_times)

    @property
    def step_time(self) -> float:
        """Of a step of the fleet: the slowest worker's."""
        return max(self.step_times)

    @property
    def balance(self) -> float:
        """The utilization that the machines allow: all wait for the slowest, even where no byte is sent."""
        return float(np.mean(self.step_times)) / self.step_time

    @property
    def slowest_up(self) -> float:
        return min(float(np.min(link.up)) for link in self.links)

    @property
    def slowest_down(self) -> float:
        return min(float(np.min(link.down)) for link in self.links)


@dataclass(frozen=True)
class Limits:
    """Memory of one worker; None is not asked about."""

    device: int | None = None
    host: int | None = None


UNLIMITED = Limits()


@dataclass(frozen=True)
class Trouble:
    """How often a worker dies, and how many are slow by which factor."""

    mtbf: float = np.inf
    slow: float = 0.0
    slowdown: float = 2.0


@dataclass(frozen=True)
class Row:
    """What one method costs. Bytes are per worker; memory is what the method adds to plain training."""

    method: str
    every: int
    fragments: int | None
    delay: int
    codec: str
    utilization: float
    bytes_per_step: float
    sent_per_day: float
    received_per_day: float
    seconds: float
    memory_device: int
    memory_host: int
    fits: bool
    quality_percent: float | None
    quality_source: str
    command: str
    goodput: dict[str, float] | None = None


def settings(layers: int) -> list[Setting]:
    """One setting a method, the same whatever the link: the period (and components) its known quality belongs to.

    The DiLoCo family shares its period, and those that overlap share fragments and bits, so that they compare.
    """
    fragments = max(1, layers // 3)  # of three blocks, as the papers cut
    chosen: list[Setting] = [
        {"name": "ddp"},
        {"name": "demo"},
        {"name": "local_sgd", "every": 32},
        {"name": "local_adam", "every": 32},
        {"name": "desloc", "every": 32},
        {"name": "diloco", "every": 30},
        {"name": "streaming_diloco", "every": 30, "fragments": fragments, "codec": "E3M0()"},
        {"name": "delayed_diloco", "every": 30, "fragments": fragments, "codec": "E3M0()"},
        {"name": "eager_diloco", "every": 30, "fragments": fragments, "codec": "E3M0()"},
        {"name": "carry_diloco", "every": 30, "codec": "E3M0()"},
        {"name": "relay_diloco", "every": 30, "fragments": fragments, "codec": "E3M0()"},
        {"name": "decoupled_momentum", "every": 128, "topk": 256},
        {"name": "sparseloco", "every": 30},
        {"name": "sparse_averaging", "every": 4},
        {"name": "two_bit_averaging", "every": 64},
    ]
    known = {setting["name"] for setting in chosen}
    others = [{"name": name} | ({"every": 32} if "every" in method_keys(name) else {}) for name in methods()]
    return [setting for setting in chosen if setting["name"] in methods()] + [
        setting for setting in others if setting["name"] not in known
    ]


class Advisor:
    """Answers for one site; the model is a sketch without weights, built once."""

    def __init__(self, site: Site, tokens: int, limits: Limits = UNLIMITED, trouble: Trouble | None = None) -> None:
        self.site, self.tokens, self.limits, self.trouble = site, tokens, limits, trouble
        self.model: nn.Module = Sketch(site.parameters, site.layers)
        self.compute = Compute(site.step_times)

    def table(self) -> list[Row]:
        return [self.assess(setting) for setting in settings(self.site.layers)]

    def assess(self, setting: Setting) -> Row:
        price = self.price(setting)
        share = float(utilization(price, self.compute, self.site.links)[0])
        offload = not self._fits(price, offload=False)
        device, host = price.memory(offload)
        expected = quality(setting["name"], period(setting), self.site.parameters, self.site.workers)
        return Row(
            method=setting["name"],
            every=period(setting),
            fragments=setting.get("fragments"),
            delay=max(row.when.delay for row in price.rows),
            codec=setting.get("codec", ""),
            utilization=share,
            bytes_per_step=price.bytes_per_step,
            **self._flow(price, share),
            memory_device=device,
            memory_host=host,
            fits=self._fits(price, offload),
            quality_percent=expected.percent,
            quality_source=expected.source,
            command=command(setting, self.site, offload),
            goodput=self._goodput(price, period(setting)),
        )

    def price(self, setting: Setting) -> Cost:
        return tw.cost(build_method(setting, self.model), self.model, self.site.workers)

    @property
    def enough(self) -> float:
        """The utilization a recommendation must reach. Equal steps end the wait for a slow machine; no method does."""
        return ENOUGH * self.site.balance

    def recommend(self) -> Row | None:
        """The least loss among those that fit and keep the machines busy; else the busiest that fits."""
        rows = [row for setting in self._candidates() if (row := self.assess(setting)).fits]
        busy = [row for row in rows if row.utilization >= self.enough]
        if busy:
            return min(busy, key=lambda row: (row.quality_percent, row.bytes_per_step))
        return max(rows, key=lambda row: row.utilization, default=None)

    def curves(self, rates: Array) -> dict[str, Array]:
        """Utilization of each method at each rate of the slowest line (bytes per second, up).

        All other rates keep their proportion to it.
        """
        times = rates / self.site.slowest_up
        links = [replace(link, up=times * link.up, down=times * link.down) for link in self.site.links]
        return {
            f"{setting['name']} every {period(setting)}": utilization(self.price(setting), self.compute, links)
            for setting in settings(self.site.layers)
        }

    def _candidates(self) -> list[Setting]:
        """The table's settings, and longer periods of each that has one and a published quality."""
        found = []
        for setting in settings(self.site.layers):
            if quality(setting["name"], 1, self.site.parameters, self.site.workers).percent is not None:
                longer = [setting["every"] * factor for factor in (1, 2, 4, 8, 16)] if "every" in setting else []
                found += [setting | {"every": every} for every in longer] or [setting]
        return found

    def _flow(self, price: Cost, share: float) -> dict[str, float]:
        """Bytes a day and seconds for the token budget."""
        step = self.site.step_time * self.site.balance / share
        # the long-run mean: on a thin line a day may be shorter than a round
        sent = DAY / step * sum(row.sent / row.when.period for row in price.rows)
        received = DAY / step * sum(row.received / row.when.period for row in price.rows)
        needed = self.tokens / (self.site.batch_tokens * self.site.workers)
        return {"sent_per_day": sent, "received_per_day": received, "seconds": needed * step}

    def _fits(self, price: Cost, offload: bool) -> bool:
        device, host = price.memory(offload)
        device += TRAINING_BYTES * self.site.parameters
        limits = self.limits
        return (limits.device is None or device <= limits.device) and (limits.host is None or host <= limits.host)

    def _goodput(self, price: Cost, every: int) -> dict[str, float] | None:
        if self.trouble is None:
            return None
        site = self.site
        healing = HEALING_BYTES * site.parameters / site.slowest_down
        faults = failures.Faults(self.trouble.mtbf, RESTART + healing)
        exchange = round_seconds(price, site.links, site.workers, every)
        fleet = failures.Fleet(
            site.workers, every * site.step_time, exchange, every, self.trouble.slow, self.trouble.slowdown
        )
        return {kind: failures.goodput(kind, fleet, faults) for kind in failures.KINDS}


def period(setting: Setting) -> int:
    return int(setting.get("every", 1))


def command(setting: Setting, site: Site, offload: bool) -> str:
    """What to type for this setting."""
    # A run's file may have chosen any key of the method, so there the method's own defaults are said as well.
    said = setting if site.config == OWN_CONFIG else setting | resolved_method(setting)
    keys = {key: value for key, value in said.items() if key != "name"}
    options = [f"--set method.{key}={_shell(value)}" for key, value in keys.items()]
    options += ["--set train.offload=true"] if offload else []
    train = f"thinwire train {shlex.quote(site.config)} --method {setting['name']} --workers {site.workers}"
    return " ".join([train, *options])


def _shell(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def equal_batches(step_times: Sequence[float], batch_tokens: int) -> tuple[list[int], float]:
    """Tokens per worker that make all steps equally long, the fleet's total unchanged, and that step's time."""
    speeds = 1 / np.asarray(step_times)
    shares = speeds / speeds.sum() * len(step_times)
    return [round(float(share) * batch_tokens) for share in shares], float(1 / speeds.mean())
