"""What a fleet does when training ends, or goes on with another method. Collective, both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import start
from .agreement import Agreement, meet, swap_in
from .calls import led
from .sharing import share_states
from .table import Method, a_method
from .transport import PeerLost

if TYPE_CHECKING:
    from .fleet import Fleet


def finish(fleet: Fleet) -> None:
    """An elastic fleet tries again with those who are left."""
    attempt = 1
    while True:
        try:
            return _finish(fleet, attempt)
        except PeerLost:
            if not fleet.transport.elastic:
                raise
            attempt += 1


def _finish(fleet: Fleet, attempt: int) -> None:
    if fleet.transport.elastic:
        fleet.begin()
        fleet.drain()
        fleet.transport.renew(fleet.steps + attempt, ahead=False, ends=True)
        fleet.calls = 0  # a worker that came late, or failed earlier, has counted others
    final = _settle(fleet)
    for replica in fleet.replicas:
        swap_in(replica, final)
    _restart(fleet)


@led
def _settle(fleet: Fleet) -> dict[str, Tensor]:
    meet(fleet, "finish")
    fleet.drain()
    for row in fleet.rows:
        for lane in row.lanes:
            with lane.borrowed() as state:
                row.sync.rule.settle(lane.live, state)
    return Agreement(fleet, finished=True).tensors()


@led
def _restart(fleet: Fleet) -> None:
    """Workers may be a skipped step apart: all count their rounds from where the farthest is."""
    latest = max(map(int, fleet.transport.talk([str(fleet.steps).encode()] * len(fleet.replicas))))
    for row in fleet.rows:
        row.begin()
        row.launched = row.landed = row.sync.every.rounds_due(latest)
        if row.sync.view.kind in ("params", "buffers"):
            row.equal_at = fleet.steps  # all hold what they have just agreed on


def switch(fleet: Fleet, method: Method) -> None:
    """Drain, take the consensus, start new outer state."""
    if fleet.transport.elastic:
        raise ValueError("an elastic fleet keeps its method, or newcomers would not know it: stop, and start anew")
    fleet.rows_of(a_method(method).resolved(fleet.replicas[0]))  # what cannot be is said before anything changes
    agreed = _drained_consensus(fleet)
    for replica in fleet.replicas:
        swap_in(replica, agreed)
    fleet.set_method(method)
    if fleet.island.turns_to_leads(fleet):
        fleet.build_rows()
    _compare_settings(fleet)
    if fleet.gradient_rows():
        share_states(fleet)
    _restart(fleet)


@led
def _drained_consensus(fleet: Fleet) -> dict[str, Tensor]:
    meet(fleet, "consensus")
    fleet.drain()
    return fleet.consensus()


@led
def _compare_settings(fleet: Fleet) -> None:
    start.compare_settings(fleet)
