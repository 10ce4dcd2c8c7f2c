"""Rows whose state lives elsewhere: every method, with the lanes of a CPU told to keep theirs in another memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from thinwire.flight import Fetched
from thinwire.live import Live
from thinwire.rule import Reduced, Scope, State

from .entries import ENTRIES, Entry, fleet_of, same, sgd, snapshot, train

every_method = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())


def start(entry: Entry, offload: bool) -> tw.Fleet:
    fleet = fleet_of(entry.method, 2, entry.optimizer, lose=lambda row, number: number == 2)
    for lane in (lane for row in fleet.rows for lane in row.lanes):
        lane.offload = offload  # on a CPU `Fleet(offload=True)` has nothing to do
    return fleet


@every_method
def test_the_bits_do_not_depend_on_where_the_state_is(entry: Entry) -> None:
    """Lost rounds, evaluation and the end included."""
    plain, offloaded = (start(entry, offload) for offload in (False, True))
    for fleet in (plain, offloaded):
        train(fleet, 14)
        fleet.finish()
    assert same(snapshot(plain), snapshot(offloaded))
    assert plain.bytes_sent == offloaded.bytes_sent


def test_only_what_is_used_comes_and_only_what_changed_goes_back() -> None:
    far = {"anchor": torch.zeros(3), "velocity": torch.zeros(3), "backlog": None, "residual": torch.zeros(3)}
    near = Fetched(far, torch.device("cpu"))
    assert near["anchor"] is not far["anchor"] and near.changed() == {}
    near["velocity"][1:].add_(1.0)  # through a view
    near["backlog"] = torch.ones(3)
    changed = near.changed()
    assert changed.keys() == {"velocity", "backlog"}
    assert changed["velocity"].tolist() == [0, 1, 1] and far["velocity"].tolist() == [0, 0, 0]
    assert near.get("residual") is not None and near.get("nothing") is None
    assert list(near) == list(far) and len(near) == 4


@dataclass(frozen=True)
class Unseen(tw.Rule):
    """Writes to its state as torch does not count."""

    agreement = "shared"

    def init(self, x: Live, scope: Scope) -> State:
        return {"anchor": x.read()}

    def send(self, x: Live, state: State, scope: Scope) -> torch.Tensor:
        anchor = state["anchor"]
        assert anchor is not None
        return x.drift(anchor)

    def recv(self, x: Live, state: State, answer: Reduced, scope: Scope) -> None:
        anchor = state["anchor"]
        assert anchor is not None
        anchor.data.sub_(answer.mean)
        x.write(anchor)


def test_a_landing_puts_back_what_torch_has_not_counted() -> None:
    entry = Entry(tw.table("unseen", tw.Sync(tw.params, tw.Every(2), Unseen()), every=2), sgd)
    plain, offloaded = (train(start(entry, offload), 6).consensus() for offload in (False, True))
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


def test_a_launch_fetches_the_anchor_and_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = start(ENTRIES["carry"], True)
    train(fleet, 2)
    moved: list[tuple[set[str], set[str]]] = []
    ended = Fetched.changed

    def changed(self: Fetched) -> dict[str, torch.Tensor | None]:
        found = ended(self)
        moved.append((set(self.asked_for()), set(found)))
        return found

    monkeypatch.setattr(Fetched, "changed", changed)
    train(fleet, 1)  # the first launch, of two replicas
    assert moved == [({"anchor"}, set())] * 2
