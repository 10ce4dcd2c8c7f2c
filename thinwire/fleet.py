"""The engine: it drives the rows of a method around the steps of the hosted optimizers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ending, joining, saving, start
from .agreement import Agreement, swap_in
from .calls import apart, lasting, led
from .clock import Clock
from .events import Events
from .group import Group
from .header import header_length
from .island import Island
from .live import Spare
from .replica import Replica
from .row import Row
from .sharing import share_states
from .table import Method, a_method
from .transport import Local, PeerLost, Transport


class Fleet:
    """The replicas hosted in this process, joined to the world by a transport and kept together by a method.

    Several replicas and no transport simulate a fleet in one process; one replica under torchrun joins its group.

    >>> import thinwire as tw
    >>> models = [torch.nn.Linear(4, 1) for _ in range(2)]
    >>> replicas = [tw.Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    >>> fleet = tw.Fleet(replicas, tw.local_sgd(every=2), tw.Local())
    >>> for _ in range(2):
    ...     for model in models:
    ...         model(torch.randn(8, 4)).square().mean().backward()
    ...     fleet.step()
    ...     fleet.zero_grad()
    >>> torch.equal(models[0].weight, models[1].weight), fleet.bytes_sent
    (True, 20)
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        method: Method,
        transport: Transport | None = None,
        offload: bool = False,
        clip: float | None = None,
    ) -> None:
        self.replicas = _replicas(replicas)
        self.transport = _default_transport() if transport is None else transport
        if not isinstance(self.transport, Transport):
            raise ValueError(f"a transport is such as tw.Local() or tw.Group(), not {transport!r}")
        self.offload, self.clip = offload, _limit(clip)
        self.steps = self.steps_begun = 0
        self.bytes_sent = self.wire_sent = self.wire_received = 0
        self.events, self.clock, self.spare = Events(), Clock(), Spare()
        self.header_length = header_length(self.replicas[0].most_tensors)
        self.island = Island(self.replicas)
        self.loaded = self._opened = self._begun = False
        self._looked_at = -1  # the step at which the replicas were last looked at
        self._opening: int | None = None  # which of its transport's fleets this is, in order
        self.calls = self.evaluations = 0  # meetings outside of rounds so far; blocks of `evaluating` open now
        self._hooks: list[Any] = []  # on the optimizers, while attached
        self.set_method(method)

    def set_method(self, method: Method) -> None:
        self.method = a_method(method).resolved(self.replicas[0])
        self.build_rows()

    def build_rows(self) -> None:
        self.rows = self.rows_of(self.method)

    def rows_of(self, method: Method) -> list[Row]:
        rows = [Row(i, sync, self.replicas, self, self.offload) for i, sync in enumerate(method.rows)]
        if not any(row.names for row in rows):
            raise ValueError(f"{method.name} finds nothing to synchronise in this model")
        return rows

    @property
    def worker(self) -> int:
        """The number of the first replica hosted here."""
        self._open()
        return self.transport.worker

    @property
    def workers(self) -> int:
        """How many replicas there are in the world."""
        self._open()
        return self.transport.workers

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            self.transport.notify = _noting(weakref.ref(self))
            self.transport.host(joining.Joining(self))
            self.transport = self.island.join(self)
            self._opening = self.transport.openings
            if self.island.led:
                self.build_rows()  # of whole tensors

    def refuse_lent(self) -> None:
        """A transport serves one fleet after another, not two at once."""
        if self._opening is not None and self.transport.openings != self._opening:
            raise ValueError("this fleet's transport serves another fleet by now: give each a transport of its own")

    def open(self) -> None:
        """Connect; without this call it happens when the fleet begins. A wrong address or setting is said here."""
        self._open()

    @apart
    def begin(self) -> None:
        """Meet the others now; without this call it happens before the first step. Once; Collective.

        In an elastic fleet that trains already, this worker takes over its state, and `steps` is the fleet's.
        """
        if not self._begun:
            self._begin()

    @led
    def _begin(self) -> bool:
        """The workers compare notes, start equal, and take their anchors. Whether a running fleet's state was taken."""
        self._open()
        while True:
            try:
                return self._meet_at_start()
            except PeerLost:
                if not self.transport.elastic:
                    raise

    def _meet_at_start(self) -> bool:
        if self.transport.elastic:
            self.transport.renew(self.steps, ahead=False)
            if not self.transport.beginning:
                return self._join_in()
        start.compare_settings(self)
        start.equalise(self)
        if self.loaded:
            start.compare_shared_copies(self)
        else:
            for row in self.rows:
                row.begin()
        self._begun = True
        if self.gradient_rows() and not self.loaded:
            share_states(self)
        return False

    def _join_in(self) -> bool:
        """The others are in the middle of a step, at the rounds that this worker is to take part in."""
        self._begun = True
        if self.gradient_rows():
            self.steps_begun = self.steps
        else:
            self._tick(self._other_rows())
        return True

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Step every hosted optimizer, and synchronise."""
        attached = bool(self._hooks)  # then the optimizers' hooks do the rest
        if not attached:
            self.before_step()
        for replica in self.replicas:
            for optimizer in replica.optimizers:
                optimizer.step()
        if not attached:
            self.after_step()

    @lasting
    @apart
    def before_step(self) -> None:
        """Once a step, before the first optimizer: gradient rows meet, and are clipped."""
        if self.steps_begun > self.steps:
            if not self.gradient_rows():  # another call of a closure, or of an optimizer whose step has failed
                self._clip_all()
                return
            text = f"step {self.steps_begun} met its gradients, but no optimizer stepped: it changed nothing"
            self.events.add("unfinished", self.steps_begun, text)
            self.after_step()  # its rounds are over, or waited for by others
        joined = not self._begun and self._begin()
        rows = self.gradient_rows()
        self.steps_begun = self.steps + (not joined or bool(rows))  # who has just joined has no step to give
        if self._renew(rows) or joined:
            for replica in self.replicas:
                replica.drop_gradients()  # of parameters that have been replaced since
        signs = any(row.sync.rule.signs for row in rows)  # whose norm is not a gradient's: clip what goes in
        if rows and not signs:
            self._meet_gradients(rows)
        self._clip_all()
        if signs:
            self._meet_gradients(rows)

    def _clip_all(self) -> None:
        for replica in self.replicas:
            self.clip_gradients(replica.trainable.values())

    def clip_gradients(self, parameters: Iterable[Tensor]) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters), self.clip)

    @led
    def _meet_gradients(self, rows: list[Row]) -> None:
        for row in rows:
            row.weigh()
            row.tick()

    @apart
    def after_step(self) -> None:
        """Once a step, after the last optimizer: all other rows tick."""
        if self.steps_begun == self.steps:
            return
        self.steps = self.steps_begun
        rows = self._other_rows()
        for row in rows:
            row.weigh()
        if self.transport.elastic:
            self._catch_up(rows)
        if not self.gradient_rows():  # where gradients meet, membership has been settled before the step
            self._renew(rows)
        self._tick(rows)

    @led
    def _tick(self, rows: list[Row]) -> None:
        due = any(row.due() for row in rows)
        for row in rows:
            row.tick()
        if due:
            self.transport.look_ahead()

    def _renew(self, rows: list[Row]) -> bool:
        """Where workers come and go: before new rounds, land the old ones and see who is there."""
        due = [row for row in rows if row.due()]
        if not self.transport.elastic or not due:
            return False
        for row in rows:
            row.land_due()
        return self.transport.renew(self.steps_begun, ahead=all(row.sync.every.delay > 0 for row in due))

    def _catch_up(self, rows: list[Row]) -> None:
        """A slow worker gives what it has: it takes the step at which the others wait, with the weight of its own."""
        steps = [row.sync.every.launch_step(row.launched + 1) for row in rows if row.names and not row.sync.rule.silent]
        due = min(steps, default=self.steps)
        if due > self.steps and self.transport.awaited(due):
            missed = due - self.steps
            self.steps = self.steps_begun = due
            self.events.add("late", due, f"the others waited at step {due}: this worker skips {missed} steps to them")

    def refuse_changed(self) -> None:
        """Of the rows that are due in a step the first one asks: it takes a look at every tensor of the models."""
        if self._looked_at != self.steps_begun:
            moments = any(row.sync.view.kind == "moment" for row in self.rows)
            for replica in self.replicas:
                replica.refuse_changed(moments)
            self._looked_at = self.steps_begun

    def gradient_rows(self) -> list[Row]:
        return [row for row in self.rows if row.sync.view.kind == "grads"]

    def _other_rows(self) -> list[Row]:
        return [row for row in self.rows if row.sync.view.kind != "grads"]

    def zero_grad(self) -> None:
        for replica in self.replicas:
            for optimizer in replica.optimizers:
                optimizer.zero_grad()

    def detach(self) -> None:
        """Take the hooks off the optimizers: from here on they step alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- agreement -------------------------------------------------------------------------------------------------

    @lasting
    @apart
    @led
    def drain(self) -> None:
        """Land all that is in flight."""
        while flying := [row for row in self.rows if row.flights]:
            min(flying, key=lambda row: row.sync.every.landing_step(row.flights[0].number)).land()

    @apart
    @led
    def consensus(self) -> dict[str, Tensor]:
        """Named tensors to evaluate and export, the same on every worker. Collective.

        The shared outer copy where the method has one, the mean of the workers' parameters elsewhere (for decoupled
        momentum's "paper" and "mean" worker 0's), and the mean of BatchNorm's statistics. Nothing but a header travels
        when a shared copy is all it takes, or when the parameters are equal since the last landing. The tensors are
        sharded as those of `model.state_dict()` are, and load back into the model as they are.
        """
        return Agreement(self).tensors()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Swap the consensus into the hosted models, and back out again. Collective."""
        agreed = self.consensus()
        before = [swap_in(replica, agreed) for replica in self.replicas]
        self.evaluations += 1
        try:
            yield
        finally:
            self.evaluations -= 1
            for replica, tensors in zip(self.replicas, before, strict=True):
                swap_in(replica, tensors)

    @lasting
    @apart
    def finish(self) -> None:
        """End of training: land what is in flight, settle, and put the plain mean of the parameters into the model.

        Without workers that are not finite. Where their mean is no model, of a `SharedMomentum`, it is the first one's.
        """
        ending.finish(self)

    @lasting
    @apart
    def switch(self, method: Method) -> None:
        """Go on with another method: drain, take the consensus, start new outer state. Collective."""
        ending.switch(self, method)

    # -- faults ----------------------------------------------------------------------------------------------------

    def cleanse(self, replica: Replica, cured: Row) -> None:
        """A replica was sick in one row: what else of it is not finite starts anew, and sits out its next round."""
        lane = self.replicas.index(replica)
        ill = self.island.cure(replica)
        for row in self.rows:
            side = row.lanes[lane]
            if row.sync.view.kind == "moment" and row is not cured and ill.intersection(row.names):
                side.unwell = True
            anchor = side.state.get("anchor") if row.sync.view.kind == "params" and row is not cured else None
            if anchor is not None and not bool(torch.isfinite(side.live.read().sum())):
                side.live.write(anchor.to(side.live.device))
                row.forget_progress(lane)

    def stats(self) -> dict[str, Any]:
        """Seconds waited and hidden, the last round's duration and participants, drift norm and cosine."""
        return dict(vars(self.clock))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @apart
    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-identical run needs beside model and optimizer; waits for messages in flight."""
        return saving.save(self)

    @lasting
    @apart
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; load the model and the optimizer first."""
        saving.load(self, state)


def _replicas(given: Any) -> list[Replica]:
    found = list(given) if isinstance(given, Iterable) else []
    if not found or not all(isinstance(each, Replica) for each in found):
        raise ValueError(f"a fleet needs a list of tw.Replica(model, optimizer), at least one, not {given!r}")
    if not all(replica.optimizers for replica in found):
        raise ValueError("a replica has no optimizer, so it would never step: tw.Replica(model, optimizer)")
    owned = [[replica.module, *replica.optimizers, *replica.trainable.values()] for replica in found]
    if len({id(part) for parts in owned for part in parts}) < sum(map(len, owned)):
        raise ValueError("two replicas share a model: each needs a copy of its own, and an optimizer of that copy")
    return found


def _noting(fleet: weakref.ref[Fleet]) -> Callable[[str, Sequence[int], str], None]:
    """What a transport has to say is an event; a transport that lives on does not keep its last fleet alive."""

    def note(kind: str, workers: Sequence[int], text: str) -> None:
        if (heard := fleet()) is not None:
            heard.events.add(kind, heard.steps, text, workers=workers)

    return note


def _limit(clip: Any) -> float | None:
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise ValueError(f"clip is the largest norm that gradients may have, above 0, or None; not {clip!r}")
    return clip


def _default_transport() -> Transport:
    """The default process group, joined first if torchrun started this process; else everything is in this process."""
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group()
    size = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and size != "1":
        raise ValueError(
            f"WORLD_SIZE is {size}, but there is no process group: call torch.distributed.init_process_group(), "
            "or pass transport=tw.Local() to train alone"
        )
    return Group() if dist.is_initialized() else Local()
