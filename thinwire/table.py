"""A method is a table of rows; this is the table."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

from .codec.base import Codec
from .codec.dense import Float32
from .live import Live
from .replica import Replica, View
from .rule import Average, Carry, Outer, Overwrite, Reset, Rule, Scope, SharedMomentum, Sign, check_fraction
from .schedule import Every
from .state_names import FIRST, SECOND

NO_OPTIMIZER = 'moments="half-life" reads the periods off the optimizer: pass it, as in tw.cost(.., optimizer)'


@dataclass(frozen=True)
class HalfLife:
    """A period to be read off the optimizer: the steps in which a state forgets half, `ln .5 / ln beta`."""

    states: tuple[str, ...]
    least: int
    delay: int = 0

    def resolve(self, replica: Replica) -> Every:
        """The shortest half-life of any parameter group, but no shorter than the period of the parameters."""
        if not replica.optimizers:
            raise ValueError(NO_OPTIMIZER)
        betas = Live(View("moment", self.states), replica, align=1).decays()
        lives = [math.log(0.5) / math.log(beta) for beta in betas if 0 < beta < 1]
        return Every(max(self.least, round(min(lives, default=1))), delay=self.delay)

    def __str__(self) -> str:
        return f"half-life, at least {self.least}"


@dataclass(frozen=True)
class Sync:
    """One row: WHAT tensors meet, WHEN, HOW the answer is applied, HOW the message is written.

    `feedback` keeps what the codec dropped and adds this fraction of it to the next message.

    >>> from thinwire import params, Average
    >>> print(Sync(params, Every(8), Average()))
    params | every 8 | Average() | Float32()
    """

    view: View
    when: Every | HalfLife
    rule: Rule
    codec: Codec = Float32()
    feedback: float | None = None

    def __post_init__(self) -> None:
        for what, kind, example in (
            ("view", View, "tw.params"),
            ("when", (Every, HalfLife), "tw.Every(32)"),
            ("rule", Rule, "tw.Average()"),
            ("codec", Codec, "tw.Int8()"),
        ):
            if not isinstance(value := getattr(self, what), kind):
                raise ValueError(f"the {what} of a row must be such as {example}, not {value!r}")
        if self.feedback is not None:
            check_fraction("feedback", self.feedback)
        _check_pairing(self)
        if isinstance(self.when, Every):
            _check_delay(self)

    @property
    def every(self) -> Every:
        """The schedule, once it is known."""
        if isinstance(self.when, HalfLife):
            raise ValueError(NO_OPTIMIZER)
        return self.when

    def resolved(self, replica: Replica) -> Sync:
        """This row with its period known."""
        return replace(self, when=self.when.resolve(replica)) if isinstance(self.when, HalfLife) else self

    def scope(self, workers: int) -> Scope:
        return Scope(workers, self.every.delay, self.codec.coarse, self.codec.lossless)

    def __str__(self) -> str:
        cells = [str(self.view), str(self.when), repr(self.rule), "-" if self.rule.silent else repr(self.codec)]
        return " | ".join(cells + ([f"feedback {self.feedback}"] if self.feedback is not None else []))


@dataclass(frozen=True)
class Method:
    """A name and its rows; print it to see what it does.

    >>> from thinwire import Average, params
    >>> print(Method("mine", (Sync(params, Every(8), Average()),)))
    mine: 1 rows (what | when | how it is applied | how it is written)
    params  every 8  Average()  Float32()
    """

    name: str
    rows: tuple[Sync, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or not all(isinstance(row, Sync) for row in self.rows):
            raise ValueError(f"a method is made of tw.Sync(view, when, rule) rows, in a tuple, not {self.rows!r}")

    def resolved(self, replica: Replica) -> Method:
        return replace(self, rows=tuple(row.resolved(replica) for row in self.rows))

    def __str__(self) -> str:
        lines = [str(row).split(" | ") for row in self.rows]
        widths = [max((len(line[i]) for line in lines if i < len(line)), default=0) for i in range(5)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines
        ]
        return "\n".join(
            [f"{self.name}: {len(self.rows)} rows (what | when | how it is applied | how it is written)", *table]
        )


def a_method(value: Any) -> Method:
    """It, or a line on what a method is."""
    if not isinstance(value, Method):
        raise ValueError(f"a method is made by a call such as tw.diloco(every=32), not {value!r}")
    return value


def _check_delay(row: Sync) -> None:
    """A second launch before the first has landed would send the same progress again."""
    rule, when = row.rule, row.every
    if row.feedback is not None and when.delay > when.period and not rule.at_launch:
        raise ValueError(
            f"feedback with a delay of {when.delay} that is longer than the period of {when.period}: what the codec "
            "dropped is known when the answer lands, and would be sent twice before. Lower the delay"
        )
    if when.delay > when.period and not rule.overlaps:
        raise ValueError(
            f"a delay of {when.delay} is longer than the period of {when.period}: {type(rule).__name__} needs each "
            "answer before the next launch. Lower the delay, or use eager_diloco with phases"
        )
    if isinstance(rule, Outer) and not rule.mix and when.delay and when.delay % when.period == 0:
        warnings.warn(
            f"with mix 0 an answer that lands just before a launch (delay {when.delay}, every {when.period}) wipes out "
            "all that this launch would send, and nothing is learnt: use another delay, or mix=0.5",
            stacklevel=2,
        )


def _check_pairing(row: Sync) -> None:
    """Refuse the combinations that would be wrong in silence."""
    rule, kind, delay = row.rule, row.view.kind, row.when.delay
    second = [state for state in row.view.states if state not in FIRST]
    if row.codec.coarse and (kind == "buffers" or second):
        what = "BatchNorm statistics" if kind == "buffers" else f"the state {second[0]}"
        raise ValueError(f"{what} must travel in Float32 or BFloat16: a coarse codec would make it zero or negative")
    if row.feedback is not None and rule.keeps_rest and not (isinstance(rule, Overwrite) and kind == "grads"):
        raise ValueError(
            f"feedback does not go with {type(rule).__name__}: it already keeps what the codec drops, "
            "which would then be sent twice. Leave feedback out"
        )
    if kind == "grads" and (rule.at_launch or isinstance(rule, (Average, Outer, Carry, SharedMomentum, Reset))):
        raise ValueError(f"{type(rule).__name__} is not for gradients: they take Overwrite or Sign")
    if isinstance(rule, Sign) and kind != "grads":
        raise ValueError(f"Sign hands gradients to plain SGD and does not go with {kind}")
    if isinstance(rule, Overwrite) and delay and kind in ("params", "buffers"):
        instead = "Average() for params" if kind == "params" else "delay=0 for buffers"
        raise ValueError(f"after a delay Overwrite is for moments, which forget: use {instead}")
    if isinstance(rule, Overwrite) and row.codec.coarse and kind == "params":
        raise ValueError("Overwrite sends the parameters themselves, which a coarse codec would distort: use Average()")
    differs = not isinstance(rule, (Overwrite, Reset)) and not (isinstance(rule, Average) and not delay)
    if differs and (kind == "buffers" or set(row.view.states).intersection(SECOND)):
        what = "variances among BatchNorm's statistics" if kind == "buffers" else f"the second moment {SECOND[0]}"
        raise ValueError(f"{type(rule).__name__} steps by differences and makes {what} negative: use Overwrite()")
    if isinstance(rule, Reset) and kind != "moment":
        raise ValueError(f"Reset starts moments anew and does not go with {kind}")
    if kind == "grads" and delay:
        raise ValueError("gradients meet before the optimizer steps: a delay is for rows on params and moments")
