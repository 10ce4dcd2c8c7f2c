"""HOW the mean of what the workers sent is applied.

A rule reads the live tensors of a row (`x`) and its own state, and answers one message: `send` commits nothing, so a
round that is lost never happened. Delayed and eager updates take their outer step at launch by definition; that is
`depart`, and what it returns is kept with the message until the answer lands (`recv`) or is given up (`lose`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .codec.base import STRIP
from .live import Live

State = MutableMapping[str, Tensor | None]
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


class Reduced:
    """The answer of a round. `mean` is the rule's to use up.

    `own` is this replica's contribution as decoded, or None where x is still exactly what was sent.
    `sick`: this replica's message was not finite and was left out, so it takes the result outright.
    `held` says which tensors any worker had at launch, `had` which this one had; None means all.
    With a `divisor` it is made of a sum, which becomes the mean when it is asked for: whole, or by `part`.

    >>> Reduced(mean=torch.ones(3), own=None, share=0.25, divisor=4).mean
    tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        mean: Tensor,
        own: Tensor | None,
        share: float,
        sick: bool = False,
        kept: Tensor | None = None,
        held: list[bool] | None = None,
        had: list[bool] | None = None,
        divisor: float = 1.0,
        measured: bool = False,
    ) -> None:
        self.own, self.share, self.sick, self.kept, self.held, self.had = own, share, sick, kept, held, had
        self.divisor, self.measured = divisor, measured
        self.square = 0.0  # of the norm of what was divided, if it is `measured`
        self._values = mean
        self._scratch: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        if self.divisor != 1:
            for (part,) in _strips(self._values):
                self._divide(part, out=part)
            self.divisor = 1.0
        return self._values

    def part(self, which: slice) -> Tensor:
        """The mean of some values, divided in the pass that uses them: to be taken once each, and used up at once.

        A strip on a CPU is divided into a scratch that never leaves the cache, so that the sum is not written again.
        """
        part = self._values[which]
        if self.divisor == 1:
            return part
        if not part.is_cpu or part.numel() > STRIP:
            return self._divide(part, out=part)
        if self._scratch is None:
            self._scratch = torch.empty(STRIP, dtype=torch.float32, device="cpu")
        return self._divide(part, out=self._scratch[: part.numel()])

    def _divide(self, part: Tensor, out: Tensor) -> Tensor:
        if math.frexp(self.divisor)[0] == 0.5:  # a power of two: the same bits in half the time
            torch.mul(part, 1 / self.divisor, out=out)
        else:
            torch.div(part, self.divisor, out=out)
        if self.measured:
            self.square += float(torch.linalg.vector_norm(out)) ** 2 if out.is_cuda else float(torch.dot(out, out))
        return out


@dataclass(frozen=True)
class Nesterov:
    """An outer step: `v = momentum*v + d ; x -= lr*(d + momentum*v)`, as `torch.optim.SGD(nesterov=True)` does it.

    >>> Nesterov(0.7, 0.9).slots
    ('velocity',)
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_step("an outer step", self.lr, "momentum", self.momentum)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def step(self, point: Tensor, state: State, drift: Tensor) -> None:
        """Move `point` in place; `drift` is used up."""
        if not self.momentum:
            point.add_(drift, alpha=-self.lr)
            return
        for p, v, d in _strips(point, _get(state, "velocity"), drift):
            v.mul_(self.momentum).add_(d)
            d.add_(v, alpha=self.momentum)
            p.add_(d, alpha=-self.lr)

    def step_part(self, which: slice, point: Tensor, state: State, drift: Tensor) -> None:
        """The same for some values only, of which `drift` is."""
        slots: State = {slot: _get(state, slot)[which] for slot in self.slots}
        self.step(point[which], slots, drift)


def _strips(*buffers: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """On a CPU, pieces that stay in its cache from one operation to the next: half the memory traffic."""
    return [buffers] if buffers[0].is_cuda else zip(*(buffer.split(STRIP) for buffer in buffers), strict=True)


def SGD(lr: float) -> Nesterov:  # noqa: N802 - named as the optimizer it is
    """An outer step without momentum.

    >>> SGD(0.7)
    Nesterov(lr=0.7, momentum=0.0)
    """
    return Nesterov(lr, 0.0)


def _get(state: State, name: str) -> Tensor:
    value = state[name]
    assert value is not None, name
    return value


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
        # a tensor that came to be after the launch is not corrected by a round it took no part in
        took_part = answer.had or [True] * len(x.names)
        weights = [s * there for s, there in zip(scales or [1.0] * len(x.names), took_part, strict=True)]
        x.add(answer.mean.sub_(answer.own), weights)


@dataclass(frozen=True)
class Outer(Rule):
    """One shared outer copy takes the outer step on the mean drift; x becomes `mix * x + (1 - mix) * copy`.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30), Outer(Nesterov(0.7, 0.9)), tw.Int8()))
    params | every 30 | Outer(step=Nesterov(lr=0.7, momentum=0.9), mix=0.0) | Int8()
    """

    step: Nesterov
    mix: float = 0.0
    agreement = "shared"
    keeps_rest = False
    overlaps = True

    def __post_init__(self) -> None:
        _check_outer(self.step)
        check_fraction("mix", self.mix)

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), **{slot: x.layout.zeros(x.device) for slot in self.step.slots}}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(_get(state, "anchor"))

    def uses_own(self, scope: Scope) -> bool:
        return False

    def equalises(self, scope: Scope) -> bool:
        return not self.mix

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor = _get(state, "anchor")
        if self.mix and not answer.sick:
            self.step.step(anchor, state, answer.mean)
            x.mix(anchor, self.mix)
        else:
            x.write_along(anchor, lambda which: self.step.step_part(which, anchor, state, answer.part(which)))


@dataclass(frozen=True)
class Carry(Rule):
    """One shared anchor steps when the answer lands; x keeps the progress made since the launch.

    `A = step(A, mean) ; x += (A - A before) + own`: the same as `x = A + (x - x at launch)`, without a copy at launch.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Carry(Nesterov(0.7, 0.6))))
    params | every 30, delay 30 | Carry(step=Nesterov(lr=0.7, momentum=0.6)) | Float32()
    """

    step: Nesterov
    agreement = "shared"

    def __post_init__(self) -> None:
        _check_outer(self.step)

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), **{slot: x.layout.zeros(x.device) for slot in self.step.slots}}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(_get(state, "anchor"))

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor = _get(state, "anchor")
        before = None if answer.sick or answer.own is None else anchor.clone()
        self.step.step(anchor, state, answer.mean)
        if before is None or answer.own is None:
            x.write(anchor)
        else:
            x.add(torch.sub(anchor, before, out=before).add_(answer.own))


class _AtLaunch(Rule):
    """Delayed and eager updates: the outer step is taken at launch, with the answers that have landed by then."""

    at_launch = True
    keeps_rest = False
    overlaps = True
    step: Nesterov

    def __post_init__(self) -> None:
        _check_outer(self.step)

    def init(self, x: Live, scope: Scope) -> State:
        zeros = {slot: x.layout.zeros(x.device) for slot in self.step.slots}
        return {"anchor": x.read(), "answer": x.layout.zeros(x.device), "backlog": None, **zeros}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        message, backlog = x.drift(_get(state, "anchor")), state["backlog"]
        return message if backlog is None else message.add_(backlog)

    def uses_own(self, scope: Scope) -> bool:
        return False

    def equalises(self, scope: Scope) -> bool:
        return False  # the answer is only put by; x moves at launch

    def keeps(self, scope: Scope) -> int:
        return 1

    def _step(self, state: State, fresh: Tensor | None) -> None:
        answer = _get(state, "answer")
        if fresh is not None:
            answer.add_(fresh)
        self.step.step(_get(state, "anchor"), state, answer)
        answer.zero_()

    def settle(self, x: Live, state: State) -> None:
        """One outer step with the answer in hand; the steps since the last launch stay in x."""
        if not bool(_get(state, "answer").any()):
            return
        before = _get(state, "anchor").clone()
        self._step(state, fresh=None)
        x.add(torch.sub(_get(state, "anchor"), before, out=before))

    def _owe(self, state: State, message: Tensor) -> None:
        """A lost message is added to the next one."""
        backlog = state["backlog"]
        state["backlog"] = message if backlog is None else backlog.add_(message)


@dataclass(frozen=True)
class Delayed(_AtLaunch):
    """`x = p = step(p, mean of one phase ago)`.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Delayed(Nesterov(0.4, 0.9))))
    params | every 30, delay 30 | Delayed(step=Nesterov(lr=0.4, momentum=0.9)) | Float32()
    """

    step: Nesterov
    agreement = "shared"

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        self._step(state, fresh=None)
        x.write(_get(state, "anchor"))
        state["backlog"] = None
        return message.clone()

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        _get(state, "answer").add_(answer.mean)

    def lose(self, x: Live, state: State, kept: Tensor | None, scope: Scope) -> None:
        assert kept is not None
        self._owe(state, kept)


@dataclass(frozen=True)
class Eager(_AtLaunch):
    """`g = mean before - early before + early ; x = p = step(p, g)`, early = own drift / workers, as it was applied.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30, delay=30), Eager(Nesterov(0.4, 0.9))))
    params | every 30, delay 30 | Eager(step=Nesterov(lr=0.4, momentum=0.9)) | Float32()
    """

    step: Nesterov

    def shared_copy(self, state: State) -> Tensor | None:
        return None  # each worker has its own point

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        early = message.div(scope.world)
        self._step(state, fresh=early)
        x.write(_get(state, "anchor"))
        state["backlog"] = None
        return early

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        assert answer.kept is not None
        _get(state, "answer").add_(answer.mean).sub_(answer.kept)

    def lose(self, x: Live, state: State, kept: Tensor | None, scope: Scope) -> None:
        assert kept is not None
        _get(state, "answer").sub_(kept)
        self._owe(state, kept.mul(scope.world))


@dataclass(frozen=True)
class SharedMomentum(Rule):
    """Each worker's momentum gives its strongest components away and takes the merge of all back.

    `m = b*m + g ; m = m - own + mean ; anchor -= lr*(g + b*m)`: workers are never made equal, so the first one's
    parameters are what to evaluate.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.params, tw.Every(30), SharedMomentum(0.7, 0.9)))
    params | every 30 | SharedMomentum(lr=0.7, decay=0.9) | Float32()
    """

    lr: float
    decay: float
    agreement = "first"

    def __post_init__(self) -> None:
        _check_step("a shared momentum", self.lr, "decay", self.decay)

    def shared_copy(self, state: State) -> Tensor | None:
        return None  # each worker has its own anchor

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read(), "momentum": x.layout.zeros(x.device)}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        return x.drift(_get(state, "anchor")).add_(_get(state, "momentum"), alpha=self.decay)

    def uses_own(self, scope: Scope) -> bool:
        return True

    def keeps(self, scope: Scope) -> int:
        return int(scope.delay > 0)

    def scratch(self, scope: Scope) -> int:
        return 1

    def depart(self, x: Live, state: State, message: Tensor, scope: Scope) -> Tensor | None:
        """With a delay the drift at launch cannot be had again at landing."""
        return message.sub(_get(state, "momentum"), alpha=self.decay) if scope.delay else None

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor, momentum = _get(state, "anchor"), _get(state, "momentum")
        drift = self._drift(x, anchor, answer)
        momentum.mul_(self.decay).add_(drift)
        if not answer.sick:
            assert answer.own is not None
            momentum.add_(answer.mean).sub_(answer.own)
        before = anchor.clone() if scope.delay and not answer.sick else None
        anchor.add_(drift, alpha=-self.lr).add_(momentum, alpha=-self.lr * self.decay)
        if before is None:
            x.write(anchor)
        else:
            x.add(torch.sub(anchor, before, out=before).add_(drift))

    def _drift(self, x: Live, anchor: Tensor, answer: Reduced) -> Tensor:
        if answer.sick:
            return answer.mean.mul(1 - self.decay)  # the drift that such a momentum comes of
        return x.drift(anchor) if answer.kept is None else answer.kept


@dataclass(frozen=True)
class Sign(Rule):
    """Gradients: sends `lr * g`, and hands the sign of the mean to plain SGD.

    >>> import thinwire as tw
    >>> print(tw.Sync(tw.grads, tw.Every(1), Sign()))
    grads | every 1 | Sign() | Float32()
    """

    keeps_rest = False
    signs = True

    def check(self, x: Live) -> None:
        for optimizer in x.replica.optimizers:
            plain = isinstance(optimizer, torch.optim.SGD) and not any(g["momentum"] for g in optimizer.param_groups)
            if not plain:
                raise ValueError(
                    f"demo hands plain SGD the sign of the update, but the optimizer is {type(optimizer).__name__}: "
                    "use torch.optim.SGD(params, lr, momentum=0)"
                )

    def init(self, x: Live, scope: Scope) -> State:
        return {}

    def send(self, x: Live, state: State, scope: Scope) -> Tensor:
        message = x.read()
        for view, lr in zip(x.layout.views(message), x.rates(), strict=True):
            view.mul_(lr)
        return message

    def uses_own(self, scope: Scope) -> bool:
        return False

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        x.write(answer.mean.sign_(), answer.held)


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


def _check_step(what: str, lr: float, name: str, momentum: float) -> None:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (lr, momentum))
    if not (numbers and 0 <= lr < math.inf and 0 <= momentum < 1):
        raise ValueError(f"{what} needs 0 <= lr and 0 <= {name} < 1, not {lr!r} and {momentum!r}")


def _check_outer(step: Nesterov) -> None:
    if not isinstance(step, Nesterov):
        raise ValueError(f"an outer step is such as tw.Nesterov(0.7, 0.9), not {step!r}")


def check_fraction(name: str, value: float) -> None:
    """Refuse what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")
