"""The workers between two changes of membership, and the connections among them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torchft.process_group import create_store_client

from ..group import Group
from ..header import Header
from ..site import Site
from ..transport import Exchange, Key, Local, Order, PeerLost, Transport
from .healing import LONGEST

QUORUMS = 1 << 24  # more than a coordinator ever forms: what is above tells two coordinators apart
CONNECT = 15.0  # seconds to reach every member of a new quorum
TRANSFER = 300.0  # seconds that one chunk may take; who is dead is known much earlier
SHOWN = 4  # differences listed in an error


@dataclass
class Introduction:
    """What each member says of itself to the others before the first round with them."""

    id: str
    slot: int | None  # its share of the data; a newcomer has none yet
    begun: bool
    facts: dict[str, Any] = field(default_factory=dict)
    least: int = 1  # with fewer workers it does not train
    position: int = 0  # who is behind the others takes over the state of one who is not
    sought: list[str] = field(default_factory=list)  # who was here before the coordinator went, and may yet come back


@dataclass
class Epoch:
    """One quorum. `broken`: a peer was lost in it, so nothing more will come of it."""

    number: int
    transport: Transport
    members: list[Introduction]
    broken: bool = False

    @property
    def coordinator(self) -> int:
        """Which start of a coordinator formed it."""
        return self.number // QUORUMS

    @property
    def ids(self) -> list[str]:
        return [member.id for member in self.members]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    @property
    def wanted(self) -> int:
        """How many it takes. All members must judge alike: who trains would wait for one who waits for more."""
        missing = {id for member in self.members for id in member.sought} - {*self.ids}
        return max(len(self.members) + len(missing), *(member.least for member in self.members))

    @property
    def beginning(self) -> bool:
        """Whether nobody in it has begun to train."""
        return not any(member.begun for member in self.members)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Anything that crosses to the others; whoever is lost in it ends the epoch."""
        if self.broken:
            raise PeerLost("a worker of this quorum was lost before")
        try:
            return call()
        except PeerLost:
            self.broken = True
            raise

    def be_patient(self, first: bool, ends: bool) -> None:
        """At the start and the end, and when somebody takes over a state, a whole model crosses the line at once."""
        handed = self.beginning or len({member.position for member in self.members}) > 1
        if isinstance(self.transport, Group):
            self.transport.wait_up_to(LONGEST if ends or (first and handed) else TRANSFER)

    def retire(self) -> None:
        if isinstance(self.transport, Group):
            threading.Thread(target=_hold, args=(self.transport,), name="thinwire-retired", daemon=True).start()


def _hold(group: Group) -> None:
    """gloo's destructor waits for what is under way; a thread that is never joined waits in our stead."""
    while not group.idle():
        time.sleep(1)


def connect(
    number: int, place: tuple[str, int, int], address: str, opening: Callable[[Transport], None], me: Introduction
) -> Epoch:
    """Reach all members of a quorum; `place` is the address of their store, our rank and their number."""
    store_address, rank, size = place
    transport: Transport = Local()
    if size > 1:
        store = create_store_client(store_address, timedelta(seconds=CONNECT))
        transport = Group()
        transport._site = Site(store, rank, size, CONNECT, address)
    opening(transport)
    members = [Introduction(**json.loads(blob)) for blob in transport.talk([json.dumps(vars(me)).encode()])]
    _allot(members)
    return Epoch(number, transport, members)


def _allot(members: Sequence[Introduction]) -> None:
    """Give the newcomers, in order, the lowest shares of the data that nobody holds."""
    held: set[int] = set()
    for member in members:
        if member.slot in held:  # it was away for a while, and its share was given to another
            member.slot = None
        elif member.slot is not None:
            held.add(member.slot)
    free = (slot for slot in range(len(held) + len(members)) if slot not in held)
    for member in members:
        if member.slot is None:
            member.slot = next(free)


def check_facts(mine: Introduction, members: Sequence[Introduction]) -> None:
    """A newcomer that differs from those who train must go; among those who begin, all hear of it."""
    trained = [member for member in members if member.begun] or list(members)
    other = trained[0]
    names = [n for n in {**other.facts, **mine.facts} if other.facts.get(n) != mine.facts.get(n)]
    if names and not mine.begun:
        lines = [f"{n} is {mine.facts.get(n, 'absent')} here, {other.facts.get(n, 'absent')} there" for n in names]
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise ValueError(
            f"this worker differs from {other.id}: {'; '.join(lines[:SHOWN])}{more}. Start all with the same settings"
        )


class Committing(Exchange):
    """An exchange that is applied only when every member has its answer."""

    def __init__(self, epoch: Epoch, order: Order, header_length: int, voted: Callable[[bool, bool], None]) -> None:
        self.epoch, self.order, self.header_length, self.voted = epoch, order, header_length, voted
        self.lost: PeerLost | None = None
        try:
            self.inner: Exchange | None = epoch.attempt(lambda: epoch.transport.exchange(order))
        except PeerLost as error:
            self.inner, self.lost = None, error

    def _inner(self) -> Exchange:
        if self.inner is None:
            assert self.lost is not None
            raise self.lost
        return self.inner

    def poll(self) -> bool:
        if self.epoch.broken or self.inner is None:
            return True
        try:
            return bool(self.epoch.attempt(self.inner.poll))
        except PeerLost:
            return True  # `headers` will say so

    def headers(self) -> list[bytes]:
        return self.epoch.attempt(self._inner().headers)

    def result(self) -> Any:
        return self.epoch.attempt(self._inner().result)

    def confirm(self, complete: bool) -> bool:
        """The vote: all hear from all, or this worker cannot know whether the others went on."""
        key, header = self.order.key, Header(equal=complete).pack(self.header_length)
        try:
            meet = self.epoch.transport.meet
            heard = self.epoch.attempt(lambda: meet(Key("vote", key.row, key.round), [header], lambda ahead: None))
        except PeerLost:
            self.voted(False, not complete)
            return False
        agreed = all(Header.unpack(blob, 0).equal for blob in heard)
        self.voted(agreed, True)
        return agreed
