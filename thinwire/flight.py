"""What a round is made of: the replicas' sides of a row, what each sent, the answer, and the whole while under way."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .header import Header
from .live import Live
from .rule import Rule, State
from .rule.state import buffer
from .transport import Exchange, PeerLost


class Fetched(MutableMapping[str, Tensor | None]):
    """A state that stays on the host: a tensor comes to the device when it is first asked for.

    What nobody asks for does not travel. Launching reads the anchor alone and leaves it as it is: nothing travels back.
    """

    def __init__(self, far: State, device: torch.device) -> None:
        self._far, self._device = far, device
        self._near: dict[str, Tensor | None] = {}
        self._fetched: dict[str, int] = {}  # the version of a tensor when it came

    def __getitem__(self, name: str) -> Tensor | None:
        if name not in self._near:
            far = self._far[name]
            near = None if far is None else far.to(self._device, non_blocking=True, copy=True)
            self._near[name] = near
            self._fetched[name] = _version(near)
        return self._near[name]

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self._near[name] = value
        self._fetched.pop(name, None)

    def __delitem__(self, name: str) -> None:
        raise AssertionError("a state keeps its names; a None takes no memory")

    def __iter__(self) -> Iterator[str]:
        return iter({**self._far, **self._near})

    def __len__(self) -> int:
        return len({**self._far, **self._near})

    def asked_for(self) -> dict[str, Tensor | None]:
        return dict(self._near)

    def changed(self) -> dict[str, Tensor | None]:
        """By what torch counts: not what is written through `.data`, or by a kernel of one's own."""
        return {name: value for name, value in self._near.items() if self._fetched.get(name) != _version(value)}


def _version(value: Tensor | None) -> int:
    return 0 if value is None else value._version


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
    def borrowed(self, to_read: bool = False) -> Iterator[State]:
        """The state on the device of the tensors; with offload what is used is fetched, and put back.

        `to_read`: nothing is expected to change, so it is put back only where it did.
        """
        if not self.offload:
            yield self.state
            return
        near = Fetched(self.state, self.live.device)
        yield near
        self._put_back(near.changed() if to_read else near.asked_for())

    def keep(self, state: State) -> None:
        """From here on this is the state: on the host with offload."""
        if not self.offload:
            self.state = state
            return
        self.state = {name: self.state.get(name) for name in state}
        self._put_back(state)

    def _put_back(self, state: State) -> None:
        for name, value in state.items():
            self.state[name] = None if value is None else self._far(name, value).copy_(value, non_blocking=True)
        if self.live.device.type == "cuda":  # the host may read it from now on, and write to what was fetched
            torch.cuda.current_stream(self.live.device).synchronize()

    def _far(self, name: str, value: Tensor) -> Tensor:
        """The memory on the host, that of before if there is one."""
        pinned = self.live.device.type == "cuda"
        far = self.state.get(name)
        return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pinned) if far is None else far

    def common(self, rule: Rule) -> list[Tensor]:
        """What every worker should hold in the same bits."""
        if self.parameters is not None:
            return [self.parameters.read()]
        with self.borrowed(to_read=True) as state:
            return _shared(rule, state)

    def take_common(self, rule: Rule, values: Sequence[Tensor]) -> None:
        if self.parameters is not None:
            return self.parameters.write(values[0])
        with self.borrowed() as state:
            for mine, value in zip(_shared(rule, state), values, strict=True):
                mine.copy_(value)


def _shared(rule: Rule, state: State) -> list[Tensor]:
    copy = rule.shared_copy(state)
    assert copy is not None
    return [copy, *(buffer(state, slot) for slot in rule.shared_slots())]


@dataclass
class Sent:
    """What one replica put into a round, kept until the answer lands.

    `unwell`: it was left out since its tensors had been cleared, as it is in the next round if this one is lost.
    """

    own: Tensor | None
    rest: Tensor | None
    kept: Tensor | None
    sick: bool
    weighed: float
    present: list[bool]
    unwell: bool = False


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
