"""How long rounds take, how much of that was waited for, and what the workers' drifts look like."""

from __future__ import annotations

from dataclasses import dataclass

from .header import Header


@dataclass
class Clock:
    """Counters behind `fleet.stats()`: seconds waited and hidden, the last round's duration, participants and drift."""

    waited: float = 0.0
    hidden: float = 0.0
    last_round: float = 0.0
    participants: int = 0
    drift_norm: float | None = None
    drift_cosine: float | None = None

    def round_ended(self, started: float, arrived: float | None, begun: float, now: float) -> None:
        """A round launched at `started` was waited for from `begun` to `now`; it may have arrived long before."""
        self.waited += now - begun
        self.hidden += max(0.0, (arrived or begun) - started)
        self.last_round = (arrived or now) - started

    def drift(self, headers: list[Header], mean_norm: float | None) -> None:
        """The mean norm of the messages and the mean cosine between two workers, from the norms alone, with the weights
        that are in the mean: |sum w d|^2 = sum |w d|^2 + what the pairs have in common."""
        self.participants = sum(header.weight > 0 for header in headers)
        if mean_norm is None:
            return
        there = [header for header in headers if header.weight > 0]
        self.drift_norm = sum(header.norm for header in there) / len(there)
        parts = [header.weight * header.norm for header in there]
        squares = sum(part * part for part in parts)
        pairs = sum(parts) ** 2 - squares
        together = (mean_norm * sum(header.weight for header in there)) ** 2
        cosine = (together - squares) / pairs if pairs > 0 else None
        self.drift_cosine = None if cosine is None else max(-1.0, min(1.0, cosine))  # norms are rounded
