"""What a round is made of: the replicas' sides of a row, what each sent, the answer, and the whole while under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .header import Header
from .live import Live
from .rule import Rule, State
from .transport import Exchange, PeerLost


@dataclass
class Lane:
    """One hosted replica's side of a row.

    `weighed` sums the replica's weight over all steps, `counted` is where it stood at the last landed launch.
    `unwell`: its tensors were cleared, so the next round leaves it out and it takes the answer outright.
    `parameters`: those that the row's signs move alike on every worker, and that must therefore stay equal.
    """

    live: Live
    parameters: Live | None = None
    state: State = field(default_factory=dict)
    weighed: float = 0.0
    counted: float = 0.0
    unwell: bool = False
    offload: bool = False

    @contextmanager
    def borrowed(self, write: bool = True) -> Iterator[State]:
        """The state on the device of the tensors; with offload it is fetched, and put back if it may have changed."""
        if not self.offload:
            yield self.state
            return
        near: State = {k: v if v is None else v.to(self.live.device, non_blocking=True) for k, v in self.state.items()}
        yield near
        if write:
            self.keep(near)

    def keep(self, state: State) -> None:
        """From here on this is the state: on the host with offload."""
        if not self.offload:
            self.state = state
            return
        self.state = {name: self._put_back(name, value) for name, value in state.items()}
        torch.cuda.current_stream(self.live.device).synchronize()  # the host may read it from now on

    def common(self, rule: Rule) -> Tensor:
        """What every worker should hold in the same bits."""
        if self.parameters is not None:
            return self.parameters.read()
        with self.borrowed(write=False) as state:
            return _present(rule.shared_copy(state))

    def take_common(self, rule: Rule, values: Tensor) -> None:
        if self.parameters is not None:
            return self.parameters.write(values)
        with self.borrowed() as state:
            _present(rule.shared_copy(state)).copy_(values)

    def _put_back(self, name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        far = self.state.get(name)
        if far is None:
            far = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        return far.copy_(value, non_blocking=True)


def _present(copy: Tensor | None) -> Tensor:
    assert copy is not None
    return copy


@dataclass
class Sent:
    """What one replica put into a round, kept until the answer lands."""

    own: Tensor | None
    rest: Tensor | None
    kept: Tensor | None
    sick: bool
    weighed: float
    present: list[bool]


@dataclass
class Answer:
    """A round's answer before it is applied; `shares` are the hosted workers' fractions of the weight.

    `total` is to be divided by `divisor`; `headers` are kept for the statistics of the round. Where the workers' shared
    copies differ, `source` is the healthy worker whose copy all are to take.
    """

    total: Tensor
    shares: list[float]
    held: list[bool] | None
    source: int | None = None
    divisor: float = 1.0
    headers: list[Header] | None = None

    def mean(self) -> Tensor:
        if self.divisor != 1:
            self.total.div_(self.divisor)
            self.divisor = 1.0
        return self.total


@dataclass
class Flight:
    """A round under way."""

    number: int
    sent: list[Sent]
    exchange: Exchange | None
    started: float
    answer: Answer | None = None
    lost: PeerLost | None = None
    arrived: float | None = None
