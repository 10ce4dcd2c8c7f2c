"""What a rule is, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..live import Live
from ..spelling import of_attributes
from .reduced import Reduced
from .state import State

Agreement = Literal["mean", "shared", "first"]


@dataclass(frozen=True)
class Scope:
    """What a rule may know of its row: the number of workers, the delay, whether the codec is coarse or lossless.

    >>> Scope(world=4, delay=0, coarse=False, lossless=True).world
    4
    """

    world: int
    delay: int
    coarse: bool
    lossless: bool


class Rule(ABC):
    """How one row is applied.

    `agreement`   what to evaluate: the mean of the workers, a shared outer copy, or the first worker's
    `keeps_rest`  x itself keeps what a codec dropped, so error feedback would count it twice
    `drifts`      messages are differences, whose norm and cosine say something
    `overlaps`    a round may be launched before the one before it has landed
    `signs`       the gradients it leaves are signs, so that clipping is for those it takes
    `silent`      nothing travels: `recv` is called with zeros when the row is due
    `at_launch`   x moves when the message leaves, and not when the answer lands

    A method uses it in a row; see `examples/custom_method.py` for a new one.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(8), tw.Average()))
    params | every 8 | Average() | Float32()
    >>> tw.Average().equalises(tw.Scope(world=4, delay=0, coarse=False, lossless=True))
    True
    """

    silent: bool = False
    signs: bool = False
    at_launch: bool = False

    agreement: Agreement = "mean"
    keeps_rest: bool = True
    drifts: bool = True
    overlaps: bool = False

    def check(self, x: Live) -> None:
        """Refuse a replica that this rule cannot serve."""
        return None

    @abstractmethod
    def init(self, x: Live, scope: Scope) -> State:
        """The state before the first round; a None is allocated when it is first needed."""

    @abstractmethod
    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        """The message, a new buffer."""

    @abstractmethod
    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        """Apply the answer in place."""

    def uses_own(self, scope: Scope) -> bool:
        """Whether `recv` needs this replica's own contribution as decoded."""
        return scope.delay > 0 or not scope.lossless

    def equalises(self, scope: Scope) -> bool:
        """Whether x is the same on all workers once the rule was applied."""
        return not self.uses_own(scope)

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        """Called with the message that is about to leave (all zeros if this replica is sick)."""
        return None

    def keeps(self, scope: Scope) -> int:
        """Buffers that `depart` returns."""
        return 0

    def scratch(self, scope: Scope) -> int:
        """Buffers that `recv` needs for a moment."""
        return int(self.uses_own(scope))

    def lose(self, x: Live, state: State, kept: Tensor | None, scope: Scope) -> None:
        """The round was lost: nothing to undo, since sending committed nothing."""
        return None

    def settle(self, x: Live, state: State) -> None:
        """Training ends: take what is in hand."""
        return None

    def shared_copy(self, state: State) -> Tensor | None:
        """The buffer that every worker should hold in the same bits, if there is one."""
        return state.get("anchor")

    def shared_slots(self) -> tuple[str, ...]:
        """The names of what goes with that copy, and must be sent with it where it is sent again."""
        return ()

    def __repr__(self) -> str:
        return of_attributes(self)
