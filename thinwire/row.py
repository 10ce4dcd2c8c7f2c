"""One row at work: launching its messages, landing the answers. Every method goes through here."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codec.base import Layout
from .flight import Answer, Flight, Lane, Sent
from .header import Header, checksum
from .live import Live
from .replica import Replica, View, params
from .rule import Overwrite, Reduced, Scope, State
from .state_names import FIRST, SECOND, created_states
from .table import Sync
from .transport import AllSick, Exchange, Key, Order, PeerLost
from .wire import Wire

if TYPE_CHECKING:
    from .fleet import Fleet


class Row:
    """A `Sync` bound to the replicas hosted here."""

    def __init__(self, index: int, sync: Sync, replicas: Sequence[Replica], fleet: Fleet, offload: bool) -> None:
        self.index, self.sync, self.fleet = index, sync, fleet
        offload = offload and replicas[0].device.type == "cuda"
        self.lanes = [
            Lane(Live(sync.view, replica, sync.codec.align, fleet.spare), self._moved(replica), offload=offload)
            for replica in replicas
        ]
        self.layout: Layout = self.lanes[0].live.layout
        self.names = self.lanes[0].live.names
        self.tensors = frozenset(self.names)
        self.wire = Wire(sync.codec, self.layout, fleet)
        self.flights: deque[Flight] = deque()
        self.launched = self.landed = 0
        self.weighed_from = 0  # the step since which the lanes' weights count
        self.equal_at = -1  # the step after which the tensors were made equal on all workers
        if not self.names:
            _refuse_unknown_states(sync.view, replicas[0])
        for lane in self.lanes if self.names else []:
            sync.rule.check(lane.live)
            if sync.every.delay and isinstance(sync.rule, Overwrite):
                lane.live.decays()  # a state without a decay is refused now, not when the first round lands

    def _moved(self, replica: Replica) -> Live | None:
        """Gathered signs move parameters alike only while all decode alike: kinds of GPU differ in that."""
        view = params.where(self.sync.view.names(replica).__contains__)
        return Live(view, replica, 1, self.fleet.spare) if self.sync.rule.signs else None

    @property
    def scope(self) -> Scope:
        return self.sync.scope(self.fleet.workers)

    def begin(self) -> None:
        """Take the state from the present tensors; nothing that fell due before now is made up for."""
        self.launched = self.landed = self.sync.every.rounds_due(self.fleet.steps)
        self.weighed_from = self.fleet.steps
        for lane in self.lanes:
            state = self.sync.rule.init(lane.live, self.scope)
            if self.sync.feedback is not None and not self.sync.codec.lossless:
                state["residual"] = self.layout.zeros(lane.live.device)
            lane.keep(state)
            lane.counted = lane.weighed

    # -- time ------------------------------------------------------------------------------------------------------

    def weigh(self) -> None:
        for lane in self.lanes:
            lane.weighed += lane.live.replica.weighs()

    def due(self) -> bool:
        """Whether a round is to be launched now."""
        return bool(self.names) and self.launched < self.sync.every.rounds_due(self.fleet.steps_begun)

    def tick(self) -> None:
        """Land what is due, then launch what is due; without a delay, land that too."""
        if not self.names:
            return
        self.land_due()
        while self.launched < self.sync.every.rounds_due(self.fleet.steps_begun):
            self.launch()
        self.land_due()

    def land_due(self) -> None:
        while self.flights and self.sync.every.landing_step(self.flights[0].number) <= self.fleet.steps_begun:
            self.land()
        for flight in self.flights:
            if flight.exchange is not None and flight.arrived is None and self._is_here(flight.exchange):
                flight.arrived = time.monotonic()

    def _is_here(self, exchange: Exchange) -> bool:
        try:
            return exchange.poll()
        except PeerLost:
            return True  # the landing says so, with the row, the round and the step

    # -- launch ----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the next round; never waits for a peer."""
        self.fleet.refuse_changed()
        self.launched += 1
        if self.sync.rule.silent:
            return self._apply_silently()
        prepared = [self._prepare(lane) for lane in self.lanes]
        key = Key("round", self.index, self.launched)
        headers = [header.pack(self.fleet.header_length) for header, _, _ in prepared]
        given = [contribution for _, contribution, _ in prepared]
        order = Order(key, headers, self.wire.kind, given, step=self.fleet.steps)
        if order.kind == "two_shot":
            self.wire.plan_second_leg(order)
        flight = Flight(self.launched, [sent for _, _, sent in prepared], None, time.monotonic())
        flight.exchange = self.fleet.transport.exchange(order)
        self.flights.append(flight)
        self.wire.count(prepared[0][0].size)

    def _apply_silently(self) -> None:
        for lane in self.lanes:
            self.sync.rule.recv(
                lane.live, lane.state, Reduced(self.layout.zeros(lane.live.device), None, 1.0), self.scope
            )
        self.landed = self.launched

    def _prepare(self, lane: Lane) -> tuple[Header, Tensor | list[Tensor], Sent]:
        rule, present, unwell = self.sync.rule, lane.live.present(), lane.unwell
        bits = self._parameter_bits(lane)
        with lane.borrowed(to_read=not rule.at_launch) as state:
            message = self._message(lane, state)
            norm, weight, sick = self._health(lane, message, bits is None)
            owed = state.get("backlog") if sick else None  # it does not leave with a message of zeros
            if sick:
                message.zero_()
            kept = rule.depart(lane.live, state, message, self.scope)
            if owed is not None:
                state["backlog"] = owed
            if sick and rule.at_launch:
                # x has been mended now; what made it sick would break it again until the landing
                self.fleet.cleanse(lane.live.replica, self)
            shared = rule.shared_copy(state)
            bits = lane.live.checksum(shared) if shared is not None else bits
        sent = Sent(None, None, kept, sick, lane.weighed, present, unwell)
        contribution = self._encode(message, sent, weight)
        return Header(self.wire.size(), weight, norm, bits or 0, present=present), contribution, sent

    def _encode(self, message: Tensor, sent: Sent, weight: float) -> Tensor | list[Tensor]:
        """What to send; `own` and what the codec dropped are kept where the rule or the feedback asks for them."""
        wants_own = self.sync.rule.uses_own(self.scope)
        wants_rest = self.sync.feedback is not None and not self.sync.codec.lossless and not sent.sick
        contribution, own = self.wire.encode(message, weight, wants_own or wants_rest)
        if wants_rest and own is not None:
            sent.rest = self._rest(message, own, sent.present)
        sent.own = own if wants_own else None
        return contribution

    def _parameter_bits(self, lane: Lane) -> int | None:
        """Checksum of the parameters, where it is they that every worker should hold in the same bits.

        None where they are not finite: others must not take them over, whatever message goes with them.
        """
        if lane.parameters is None:
            return 0
        values = lane.parameters.read()
        bits = checksum(values) if bool(torch.isfinite(values.sum())) else None
        self.fleet.spare.give(values)
        return bits

    def _message(self, lane: Lane, state: State) -> Tensor:
        message = self.sync.rule.send(lane.live, state, self.scope)
        residual = state.get("residual")
        return message if residual is None else message.add_(residual, alpha=self.sync.feedback or 0.0)

    def _health(self, lane: Lane, message: Tensor, broken: bool) -> tuple[float, float, bool]:
        """Norm, weight and whether the replica must be left out; decided once for all shards of a worker."""
        norm = math.nan if broken else lane.live.norm(message)
        nominal = self.sync.every.launch_step(self.launched) - self.weighed_from
        weight = (lane.weighed - lane.counted) / nominal
        norm, weight = self.fleet.island.agree(norm, weight)
        sick = lane.unwell or not math.isfinite(norm)
        lane.unwell = False
        if sick:
            text = f"row {self.index}, round {self.launched}: the message was not finite and is left out"
            if broken:
                text = f"row {self.index}, round {self.launched}: a parameter was not finite, the message is left out"
            worker = self.fleet.worker + self.lanes.index(lane)
            self.fleet.events.add("sick", self.fleet.steps, text, self.index, self.launched, [worker])
        return (0.0, 0.0, True) if sick else (norm, weight, False)

    def _rest(self, message: Tensor, own: Tensor, present: list[bool]) -> Tensor:
        """What the codec dropped; of an absent tensor all, since its part of the message counts for nothing."""
        for view, there in zip(self.layout.views(own), present, strict=True) if not all(present) else ():
            if not there:
                view.zero_()
        return message.sub_(own)

    # -- land ------------------------------------------------------------------------------------------------------

    def complete(self, flight: Flight) -> None:
        """Wait for the answer without applying it."""
        if flight.answer is not None or flight.lost is not None or flight.exchange is None:
            return
        begun = time.monotonic()
        try:
            flight.answer = self._answer(flight.exchange)
        except PeerLost as error:
            flight.lost = error
        now = time.monotonic()
        self.fleet.clock.round_ended(flight.started, flight.arrived, begun, now)
        complete = self.fleet.island.all(flight.lost is None)
        if not flight.exchange.confirm(complete) and flight.lost is None:
            flight.lost = PeerLost(f"row {self.index}, round {flight.number}: somebody else has no answer")
        flight.exchange = None

    def _answer(self, exchange: Exchange) -> Answer:
        headers = self.wire.unpacked(exchange.headers())
        sizes = [header.size for header in headers]
        if len(set(sizes)) > 1:
            raise ValueError(f"row {self.index}: workers sent messages of different sizes, {sizes} bytes")
        return self.wire.answer(headers, exchange.result(), self.lanes[0].live.device)

    @property
    def _compares(self) -> bool:
        """Whether the norm of the mean says something: of differences that are all there, and as long as they were."""
        codec = self.sync.codec
        return self.sync.rule.drifts and (codec.linear or codec.second is codec)

    def forget_progress(self, lane: int) -> None:
        """This replica's tensors were mended: what it had at a launch is gone, so it takes the answers outright."""
        for flight in self.flights if not self.sync.rule.at_launch else ():
            flight.sent[lane].sick = True

    def _note_drift(self, answer: Answer, norm: float | None) -> None:
        """Statistics of the round."""
        if answer.headers is not None:
            self.fleet.clock.drift(answer.headers, None if norm is None else self.fleet.island.agree(norm, 0.0)[0])

    def land(self) -> None:
        """Apply the oldest round under way, waiting for it."""
        flight = self.flights[0]
        self.complete(flight)
        self.flights.popleft()
        if flight.lost is not None:
            self._lose(flight, flight.lost)
        else:
            assert flight.answer is not None
            self._apply(flight, flight.answer)

    def _lose(self, flight: Flight, lost: PeerLost) -> None:
        lost.row, lost.round, lost.step = self.index, flight.number, self.fleet.steps
        self.fleet.events.add("lost", lost.step, str(lost), self.index, flight.number, lost.workers)
        for lane, sent in zip(self.lanes, flight.sent, strict=True):
            lane.unwell |= sent.unwell
            with lane.borrowed() as state:
                self.sync.rule.lose(lane.live, state, sent.kept, self.scope)
                residual = state.get("residual")
                if residual is not None and sent.kept is not None and not sent.sick:
                    residual.zero_()  # it is owed with the message now
            if self.sync.view.kind == "grads":
                lane.live.drop_gradients()  # every worker skips this inner step
        if not (self.fleet.transport.survives or isinstance(lost, AllSick)):
            raise lost

    def _apply(self, flight: Flight, answer: Answer) -> None:
        self.landed, self.weighed_from = flight.number, self.sync.every.launch_step(flight.number)
        if answer.source is not None:
            self.send_copy_again(flight.number, answer.source)
        passed = max(0, self.fleet.steps_begun - self.weighed_from)  # fewer than the delay if drained early
        scope = replace(self.scope, delay=passed) if self.sync.every.delay else self.scope
        in_passing = len(self.lanes) == 1 and answer.divisor != 1
        if not in_passing:
            self._note_drift(answer, float(torch.linalg.vector_norm(answer.mean())) if self._compares else None)
        for i, (lane, sent) in enumerate(zip(self.lanes, flight.sent, strict=True)):
            last = i == len(self.lanes) - 1
            mean = answer.total if in_passing else answer.mean() if last else answer.mean().clone()
            had = None if all(sent.present) else sent.present
            with lane.borrowed() as state:
                share, divided = answer.shares[i], (answer.divisor, self._compares)
                reduced = Reduced(mean, sent.own, share, sent.sick, sent.kept, answer.held, had, *divided)
                self.sync.rule.recv(lane.live, state, reduced, scope)
                if sent.rest is not None:
                    state["residual"] = sent.rest
            lane.counted = max(lane.counted, sent.weighed)
            if sent.sick:
                self.fleet.cleanse(lane.live.replica, self)
            if all(value is not mean for value in lane.state.values()):  # a rule may have kept it
                self.fleet.spare.give(mean)
            if in_passing:
                self._note_drift(answer, math.sqrt(reduced.square) if self._compares else None)
        if self.sync.rule.equalises(self.scope):
            self.equal_at = self.fleet.steps_begun
        else:
            for row in self.fleet.rows:  # that share a tensor which has just been moved apart
                if row.sync.view.kind == self.sync.view.kind and not row.tensors.isdisjoint(self.tensors):
                    row.equal_at = -1

    def send_copy_again(self, number: int, source: int) -> None:
        """That of a healthy worker: a sick one's parameters may be what is not finite."""
        rule, broadcast = self.sync.rule, self.fleet.transport.broadcast
        buffers = zip(*(lane.common(rule) for lane in self.lanes), strict=True)  # one for each lane, copy by copy
        copies = [broadcast(each, source) for each in buffers]
        for lane in self.lanes:
            lane.take_common(rule, copies)
        what = "shared copies" if self.lanes[0].parameters is None else "parameters"
        text = f"row {self.index}, round {number}: the workers' {what} differed; worker {source}'s were sent again"
        self.fleet.events.add("unequal", self.fleet.steps, text, self.index, number)


def _refuse_unknown_states(view: View, replica: Replica) -> None:
    """The usual moments may be absent, so that one table serves many optimizers; another name is a mistake."""
    if (
        view.kind != "moment"
        or {*FIRST, *SECOND}.intersection(view.states)
        or View("moment", view.states).names(replica)
    ):
        return
    kept = sorted({state for name in replica.trainable for state in created_states(replica, name)})
    raise ValueError(
        f"no optimizer keeps a state named {' or '.join(view.states)}: "
        + (f"there are {', '.join(kept)}" if kept else "this one keeps none")
    )
