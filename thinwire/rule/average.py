"""Means: of parameters, of moments and buffers; and states that begin anew."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..live import Live
from ..state_names import SECOND
from .base import Rule, Scope
from .reduced import Reduced
from .state import State


@dataclass(frozen=True)
class Average(Rule):
    """x becomes the mean: `x - own + mean`, which keeps local progress made during a delay.

    A coarse codec must not carry absolute values, so then the drift from a shared anchor travels.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(8, delay=2), Average()))
    params | every 8, delay 2 | Average() | Float32()
    """

    drifts = False

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read()} if scope.coarse else {}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return _offset(x, state)

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        _replace(x, state, answer, scales=None)


@dataclass(frozen=True)
class Overwrite(Rule):
    """x is replaced by the mean. After a delay of d steps: `x + beta^d * (mean - own)`.

    A moment forgets by beta each step, so this is exactly what averaging at launch would have given.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.moment("exp_avg"), tw.Every(24), Overwrite()))
    moment(exp_avg) | every 24 | Overwrite() | Float32()
    """

    drifts = False

    def init(self, x: Live, scope: Scope) -> State:
        anchored = scope.coarse and x.view.absolute
        return {"anchor": x.layout.zeros(x.device)} if anchored else {}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return _offset(x, state)

    def uses_own(self, scope: Scope) -> bool:
        return scope.delay > 0 or scope.coarse

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        if not x.view.absolute:
            x.write(answer.mean, answer.held)
            return
        scales = [beta**scope.delay for beta in x.decays()] if scope.delay else None
        _replace(x, state, answer, scales)
        if scope.delay and set(x.view.states).intersection(SECOND):
            x.keep_above_zero()  # rounding alone takes a mean of squares below, and its root is NaN


def _offset(x: Live, state: State) -> Tensor:
    anchor = state.get("anchor")
    return x.read() if anchor is None else x.read().sub_(anchor)


def _replace(x: Live, state: State, answer: Reduced, scales: list[float] | None) -> None:
    """`x += scale * (mean - own)`; a plain copy where x is still what was sent."""
    anchor = state.get("anchor")
    if anchor is not None:
        anchor.add_(answer.mean)
    if answer.sick or answer.own is None:
        x.write(answer.mean if anchor is None else anchor, answer.held)
    elif scales is None and anchor is None and answer.had is None:
        rest = x.read().sub_(answer.own)  # first, so that nothing but the mean is left where x did not move
        x.write(rest.add_(answer.mean), answer.held)
    else:
        # a tensor that came to be after the launch is not corrected by a round it took no part in, nor one that nobody
        # of any weight had
        everything = [True] * len(x.names)
        counts = zip(scales or [1.0] * len(x.names), answer.had or everything, answer.held or everything, strict=True)
        x.add(answer.mean.sub_(answer.own), [scale * (had and held) for scale, had, held in counts])


@dataclass(frozen=True)
class Reset(Rule):
    """Starts the optimizer state anew and sends nothing: a baseline of the papers.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.moment("exp_avg"), tw.Every(8), Reset()))
    moment(exp_avg) | every 8 | Reset() | -
    """

    silent = True

    def init(self, x: Live, scope: Scope) -> State:
        return {}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        raise AssertionError("a silent rule sends nothing")

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        x.restart_states()
