"""WHEN a row meets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Every:
    """Launch every `period` optimizer steps, `offset` steps later than the first worker would; land `delay` steps on.

    Steps are counted from 1. Round n is launched after step `offset + n * period` and lands `delay` steps later.

    >>> Every(10).rounds_due(9), Every(10).rounds_due(10), Every(10, offset=5).rounds_due(15)
    (0, 1, 1)
    """

    period: int
    offset: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("offset", 0), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of optimizer steps, at least {least}, not {value!r}")

    def rounds_due(self, step: int) -> int:
        """How many rounds should have been launched when `step` steps have been taken."""
        return max(0, step - self.offset) // self.period

    def launch_step(self, number: int) -> int:
        """The step after which round `number` (from 1) is launched."""
        return self.offset + number * self.period

    def landing_step(self, number: int) -> int:
        return self.launch_step(number) + self.delay

    @property
    def in_flight(self) -> int:
        """The most rounds of this row that can be under way at once."""
        return -(-self.delay // self.period)

    def __str__(self) -> str:
        extras = "".join(f", {name} {getattr(self, name)}" for name in ("offset", "delay") if getattr(self, name))
        return f"every {self.period}{extras}"
