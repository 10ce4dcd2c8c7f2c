"""The training loop: the same for every mode and every method."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import thinwire as tw
from thinwire.report import words
from thinwire.report.metrics import Record
from thinwire.train import optimizers
from thinwire.train.config import Config, shared
from thinwire.train.data import Dataset
from thinwire.train.errors import as_user_error
from thinwire.train.ledger import Ledger
from thinwire.train.methods import build_method, refuse_optimizer, resolved_method
from thinwire.train.place import Place
from thinwire.train.resume import Keeper
from thinwire.train.work import Team, Work, evaluate


class Trainer:
    """One process's part of a run."""

    def __init__(self, config: Config, place: Place, data: Dataset, team: Team, work: Work) -> None:
        self.config, self.place, self.data, self.team, self.work = config, place, data, team, work
        self.step = self.bytes_before = self.noted = 0
        self.tokens = self.tokens_here = 0  # of all workers: since the run began, and since this process did
        self.own_steps = 0  # that this worker took itself; an elastic one may have come late, or have been away
        train = config.train
        self.examples_per_step = sum(place.notes.exchange(train.batch * train.accumulate * len(place.hosted)))
        self.seconds_before = self.waited = self.hidden = 0.0
        self.wire_before = {"wire_sent": 0, "wire_received": 0}
        self.drift: Record = {}
        self.last: Record = {}

    def method(self, section: dict[str, Any]) -> tw.Method:
        method = build_method(section, self.team.replicas[0].module)
        refuse_optimizer(method, self.config.optimizer)
        return method

    def open_fleet(self, section: dict[str, Any]) -> None:
        """Join the replicas; models and optimizers must have been loaded before."""
        train = self.config.train
        if self.place.elastic:
            self.place.transport.settings = self._settings()
        with as_user_error():
            self.fleet = tw.Fleet(
                self.team.replicas,
                self.method(section),
                self.place.transport,
                offload=train.offload,
                clip=train.clip or None,
            )
            if self.place.elastic:
                self.fleet.open()

    def _settings(self) -> dict[str, Any]:
        """What an elastic fleet must agree on; the method's defaults are spelt out, as a resumed run has them."""
        method = {f"method.{key}": repr(value) for key, value in resolved_method(self.config.method).items()}
        keys = {key: value for key, value in shared(self.config).items() if not key.startswith("method.")}
        return keys | method | self.data.settings()

    def join(self, say: Callable[[str], None]) -> None:
        """Meet an elastic fleet: take its state, its step, and a share of the data that nobody else has."""
        transport, shard = self.place.transport, self.team.shards[0]
        transport.aloud = say
        transport.carry("data", shard.state_dict, shard.load_state_dict)
        transport.carry("tokens", lambda: self.tokens, self._take_tokens)
        with as_user_error():
            self.fleet.begin()
        shard.take_place(transport.slot)
        self.step = self.fleet.steps
        say(f"joined {transport.coordinator} as {transport.id}: {words.workers(self.fleet.workers)}, step {self.step}")

    def _take_tokens(self, tokens: int) -> None:
        self.tokens = tokens

    def steps_taken(self) -> int:
        """The last step that the optimizers took, also after an exchange behind it was lost."""
        return self.start_step + self.fleet.steps - self.fleet_start

    def train(self, until: int, ledger: Ledger, keeper: Keeper) -> str:
        """Go on to step `until`, or until somebody asks to stop. Returns why it stopped early, if it did."""
        self.started, self.start_step, self.fleet_start = time.perf_counter(), self.step, self.fleet.steps
        why = ""
        while self.step < until and not why:
            record, losses = self.one_step()
            why = ledger.add(record, losses)
            if self._due(self.config.train.checkpoint_every) and self.step < until:
                why = ledger.flush() or why
                keeper.save(self)
        return ledger.flush() or why

    def one_step(self) -> tuple[Record, torch.Tensor]:
        step, began = self.step + 1, time.perf_counter()
        factor = optimizers.lr_factor(step, self.config.steps, self.config.schedule)
        for replica in self.team.replicas:
            optimizers.set_lr(replica.optimizers, factor, self.config.optimizer.lr)
        losses = self.work.run(step)
        self._exchange(step)
        self.step = step
        if self.place.elastic:  # it may have been healed, and its share of the data be another's by now
            self.step = self.fleet.steps
            self.team.shards[0].take_place(self.place.transport.slot)
        record = self._record(factor, time.perf_counter() - began)
        if self._due(self.config.train.eval_every) or step == self.config.steps:
            record |= self.evaluate()
        self.last = record
        return record, losses

    def _exchange(self, step: int) -> None:
        before = self.tokens, self.tokens_here, self.own_steps
        self._count()  # before the exchange, which may bring newcomers: they are handed the count
        try:
            self._fleet_step(first=self.step == self.start_step)
        except tw.PeerLost:
            if self.steps_taken() < step:  # gradients did not meet: a resume takes this step, with the same batches
                self.tokens, self.tokens_here, self.own_steps = before
                for shard in self.team.shards:
                    shard.give_back(self.config.train.batch * self.config.train.accumulate)
            raise

    def _fleet_step(self, first: bool) -> None:
        if first:  # here the workers compare what they are: what differs is the user's to mend
            with as_user_error():
                self.fleet.step()
        else:
            self.fleet.step()
        self.fleet.zero_grad()

    def _count(self) -> None:
        """Step by step, as an elastic fleet grows and shrinks; its others are taken to have batches like this one."""
        tokens = self.tokens_per_step * (self.fleet.workers if self.place.elastic else 1)
        self.tokens += tokens
        self.tokens_here += tokens
        self.own_steps += 1

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def evaluate(self) -> Record:
        """The held-out loss of the consensus."""
        with self.fleet.evaluating():
            held = self.held_loss()
        return {} if held is None else {"val_loss": held}

    def held_loss(self) -> float | None:
        """The held-out loss of what the model holds now."""
        module = self.team.modules[0]
        module.eval()
        try:
            return evaluate(module, self.data, self.config, self.place)
        finally:
            module.train()

    def _record(self, factor: float, whole: float) -> Record:
        seconds = time.perf_counter() - self.started
        record = {
            "step": self.step,
            "lr": factor * self.config.optimizer.lr,
            "tokens": self.tokens,
            "seconds": self.seconds_before + seconds,
            "step_seconds": whole,
            "tokens_per_second": self.tokens_here / seconds,
        }
        return record | self.sent() | self._link(whole, seconds) | self._events() | self._membership()

    def sent(self) -> Record:
        """Bytes so far, those before a resume among them."""
        return {
            "bytes_sent": self.bytes_before + self.fleet.bytes_sent,
            "wire_sent": self.wire_before["wire_sent"] + self.fleet.wire_sent,
            "wire_received": self.wire_before["wire_received"] + self.fleet.wire_received,
        }

    def _membership(self) -> Record:
        """Of an elastic fleet: rounds that count, rounds that were lost, and rounds that this worker made alone."""
        if not self.place.elastic:
            return {}
        transport = self.place.transport
        transport.reporter.say(bytes_sent=self.fleet.bytes_sent, step=self.step)
        return {"committed": transport.committed, "lost": transport.lost, "alone": transport.alone_rounds}

    def _events(self) -> Record:
        """What the engine noted since the last step: lost rounds, sick or slow workers."""
        before, self.noted = self.noted, sum(self.fleet.events.counts.values())
        fresh = self.fleet.events[-(self.noted - before) :] if self.noted > before else []
        return {"events": [event.text for event in fresh]} if fresh else {}

    def _link(self, whole: float, seconds: float) -> Record:
        """What the exchange cost this step, and what the workers' drifts looked like where it met."""
        stats = dict(self.fleet.stats())
        waited, hidden = stats["waited"] - self.waited, stats["hidden"] - self.hidden
        self.waited, self.hidden = stats["waited"], stats["hidden"]
        drift = {key: stats[key] for key in ("drift_norm", "drift_cosine") if stats[key] is not None}
        met, self.drift = drift != self.drift, drift
        return {
            # of one worker: those hosted here take turns
            "compute_seconds": (whole - waited) / len(self.place.hosted),
            "waited_seconds": waited,
            "hidden_seconds": hidden,
            "waited_share": self.waited / seconds,
            "workers": stats["participants"] or (self.fleet.workers if self.place.elastic else self.config.workers),
        } | (drift if met else {})

    @property
    def tokens_per_step(self) -> int:
        """Tokens (or images) that the workers of all processes use in one step; each may have a batch of its own."""
        return self.examples_per_step * (1 if self.data.channels else self.config.model.context)
