"""The transport whose workers come and go: torchft says who takes part, thinwire carries the rounds.

Membership changes only between rounds. Before its rounds every worker asks torchft's Manager for a quorum; those who
answer together form an epoch with connections of their own. A round counts when every member has its answer (the
vote). Who misses a vote, and cannot know whether the others went on, is behind: torchft sees that by its number and
heals it, as it heals a newcomer, from one who is ahead.
"""

from __future__ import annotations

import secrets as random_words
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchft.manager import Manager
from torchft.process_group import ProcessGroup

from ..site import own_address
from ..transport import Exchange, Key, Newcomers, Order, PeerLost, Transport
from . import address as addresses
from . import secret as secrets
from .epoch import QUORUMS, Committing, Epoch, Introduction, check_facts, connect
from .healing import Healing
from .parcel import pack
from .reporter import Reporter

SLOW = 10.0  # seconds of waiting after which somebody should know
PATIENCE = timedelta(hours=1)  # for a quorum: the others may be far from their next round
RETRIES = 10_000  # a coordinator that died may be back hours later; without retries torchft gives no answer at all
RETURN = 10.0  # seconds for the others to find a coordinator that has come back
HEALING = timedelta(minutes=10)
STOPPING = 2.0  # seconds that one who was asked to stop still waits for a quorum
FINISHED = "finished"  # what a worker says when it leaves after the run's last step
VOTES = 1024  # more than the rounds of one step: a position is step * VOTES + the votes of that step


class RunFinished(Exception):
    """Others have taken the last step of this run: nothing is left for one who comes now."""


class Elastic(Transport):
    """Joins whoever is at the coordinator (`thinwire coordinator`), at any time, and goes on without those who leave.

    `min_workers`: with fewer it waits. `address` is this machine's, found by itself when not given; beyond loopback a
    `secret_file` is needed, the same on every machine.

    >>> from thinwire.elastic.coordinator import Coordinator
    >>> import torch, thinwire as tw
    >>> coordinator = Coordinator(port=29730)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    >>> fleet = tw.attach(model, optimizer, tw.diloco(every=2), tw.Elastic("127.0.0.1:29730"))
    >>> for _ in range(2):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> fleet.workers, fleet.events.counts["alone"]
    (1, 1)
    >>> fleet.transport.leave("done"), coordinator.close()
    (None, None)
    """

    survives = elastic = True

    def __init__(
        self,
        coordinator: str,
        name: str | None = None,
        min_workers: int = 1,
        secret_file: str | Path | None = None,
        address: str | None = None,
    ) -> None:
        if type(min_workers) is not int or min_workers < 1:
            raise ValueError(f"min_workers must be a whole number, at least 1, not {min_workers!r}")
        self.coordinator, self.min_workers, self.address = coordinator, min_workers, address
        self.secret = secrets.read(Path(secret_file)) if secret_file else None
        self.id = f"{name or socket.gethostname()}-{random_words.token_hex(2)}"
        self.settings: dict[str, Any] = {}  # what else must agree, beside the engine's facts
        self.aloud: Callable[[str], None] | None = None  # hears at once why this worker waits
        self.asked_to_stop: Callable[[], bool] = lambda: False  # then it waits for no more workers
        self.committed = self.lost = self.alone_rounds = 0
        self.epoch: Epoch | None = None
        self._pending: Epoch | None = None
        self._worked: Epoch | None = None  # the last one that could work
        self._returned = 0, 0.0  # which coordinator has come back, and when it was found
        self._extras: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._slot: int | None = None
        self._begun = self._failed = self._healed = self._ahead = self._ending = self._closed = False
        self._step = self._votes = self._position = 0
        self._opened: list[Callable[[], None]] = []  # how to close what is open
        self._behind: int | None = None  # the last position that is certain, once a vote was missed
        self._renewed_at: int | None = None
        self._told = 0, 0  # how many workers are here, and how many are wanted, as was said last
        self._asking: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._at_round, self._staging = threading.Event(), threading.Event()

    # -- set-up --------------------------------------------------------------------------------------------------------

    def carry(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Hand more to newcomers: `load` takes there what `save` returns here: tensors, numbers, text, lists, dicts."""
        try:
            pack(save())  # found out now: later it would fail at every quorum with a newcomer, without end
        except ValueError as error:
            raise ValueError(f"carry({name!r}): {error}") from error
        self._extras[name] = (save, load)

    def host(self, newcomers: Newcomers) -> None:
        self.newcomers = newcomers

    def open(self, hosted: int, header_length: int) -> None:
        if hosted != 1:
            raise ValueError(f"an elastic worker hosts one replica, not {hosted}: start one process for each")
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("an elastic worker is one process: join workers of several with tw.Group.connect")
        self._header_length = header_length
        host, _ = addresses.split(self.coordinator)
        self.address = self.address or own_address(host)
        self._healing = Healing(self.secret, self.address)
        self._opened.append(self._healing.shutdown)
        self.reporter = Reporter(self.coordinator, self.id, self.secret)
        self._opened.append(self.reporter.close)
        self.reporter.agree(self.settings | {"method": self.newcomers.facts()["method"]})
        self._refuse_a_finished_run()
        self._manager = self._make_manager()
        self._opened.append(lambda: self._manager.shutdown(wait=False))

    def _refuse_a_finished_run(self) -> None:
        """Who comes after the last step would train all of it again, alone."""
        if self.reporter.finished:
            self.leave("too late")
            raise RunFinished(
                f"the run at {self.coordinator} is finished and its model is with those who took part: "
                "for another run start the coordinator anew, or change a setting"
            )

    def _make_manager(self) -> Manager:
        assert self.address is not None
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return Manager(
            pg=_Connections(self._connect),
            load_state_dict=self._take,
            state_dict=self._give,
            min_replica_size=1,
            use_async_quorum=False,
            quorum_retries=RETRIES,
            init_sync=False,  # the engine makes a fresh start equal, and donors are those who have trained
            timeout=HEALING,
            quorum_timeout=PATIENCE,
            connect_timeout=timedelta(seconds=10),
            rank=0,
            world_size=1,
            store_addr=self.address,
            store_port=self._store.port,
            lighthouse_addr=f"http://{self.coordinator}",
            replica_id=self.id,
            hostname=self.address,
            checkpoint_transport=self._healing,
        )

    @property
    def slot(self) -> int:
        """The share of the data that is this worker's, held by no other: a small number."""
        return self._slot or 0

    # -- who takes part ------------------------------------------------------------------------------------------------

    def renew(self, step: int, ahead: bool, ends: bool = False) -> bool:
        if step == self._renewed_at and self.epoch is not None and not self.epoch.broken:
            return False
        self._healed, self._ahead = False, ahead
        self._step, self._votes = step, self._votes if step == self._step else 0
        self._begun |= self._renewed_at not in (None, step)  # not before: a start that is lost is made again
        self._say_where(step, ends)
        self._told = 0, 0
        if self._asking is None:
            self._ask()
        self._hear()
        while not self._complete(ends):
            self._ask()
            self._hear()
        assert self.epoch is not None
        self.epoch.be_patient(self.epoch is not self._worked, ends)
        self._worked, self._begun, self._behind = self.epoch, self._begun or self._healed, None
        self._renewed_at = self._renewed_at if self._healed else step
        self.reporter.say(waiting=-1)
        return self._healed

    def _say_where(self, step: int, ends: bool) -> None:
        """`finish` counts its attempts onwards from the last step, which is the one to show."""
        if not ends:
            self.reporter.say(waiting=step, step=step)
        elif not self._ending:
            self.reporter.say(waiting=-1, step=step - 1)
        self._ending = ends

    def awaited(self, step: int) -> bool:
        """Somebody has waited there for half the round deadline: time to go, if the round is to count for us."""
        deadline, epoch = self.reporter.round_deadline, self.epoch
        if deadline is None or epoch is None:
            return False
        return any(self.reporter.has_waited(id, step) > deadline / 2 for id in epoch.ids if id != self.id)

    def look_ahead(self) -> None:
        """With overlap the next quorum is asked for in advance: nobody waits for it unless somebody is a round late."""
        if self._ahead and self._asking is None and self.epoch is not None and not self.epoch.broken:
            self._healing.held = True  # a joiner of this quorum may not have come for its state yet
            self._ask()
            self._healing.held = False

    def _complete(self, ends: bool) -> bool:
        """Whether a quorum was found that can work."""
        epoch = self.epoch
        if epoch is None or epoch.broken:
            return False
        if epoch.alone and not ends:
            self._refuse_a_finished_run()  # the others ended while this one joined, or was away
        here, wanted = len(epoch.members), epoch.wanted
        if here >= wanted:
            return True
        if (here, wanted) != self._told:
            self._tell("waiting", (), f"{here} of {wanted} workers are here: waiting for more")
        self._told = here, wanted
        if self.asked_to_stop():
            raise PeerLost(f"asked to stop while {here} of {wanted} workers are here")
        self._failed = True  # asks for connections anew, whoever comes
        time.sleep(1)
        return False

    def _ask(self) -> None:
        """Ask for a quorum, in a thread: it is formed when all live workers have come to their rounds."""
        self._tell_manager()
        self._position = self._behind if self._behind is not None else self._step * VOTES + self._votes
        self._manager.load_state_dict({"step": self._position, "batches_committed": self.committed})
        self._failed, self._trouble = False, None
        self._healing.turn_away()
        self._at_round.clear()
        self._staging.clear()
        self._asking = threading.Thread(target=self._quorum, name="thinwire quorum", daemon=True)
        self._asking.start()

    def _tell_manager(self) -> None:
        """How it went with the last quorum; after a failure torchft has everybody connect anew."""
        if self._failed:
            self._manager.report_error(PeerLost("a worker of the last quorum was lost"))
        if self.epoch is not None:
            self._manager.should_commit()
        # torchft calls `configure` when this number changes. It must always: a coordinator that has come back counts
        # its quorums from one again, and might just then have come to the number that we have.
        self._manager._quorum_id = -1

    def _quorum(self) -> None:
        said = False
        while self._trouble is None and not self._closed:
            try:
                self._manager.start_quorum()
                return
            except Exception as error:  # torchft raises several kinds when the coordinator is away
                if not said and self._trouble is None:
                    self._tell("coordinator", (), f"no quorum from {self.coordinator}: {_line(error)}; trying on")
                said = True
                time.sleep(1)

    def _hear(self) -> None:
        """Wait for the quorum that was asked for, and take it."""
        assert self._asking is not None
        self._wait(lambda: self._staging.is_set() or not self._asking_on())
        if self._pending is not None and self.epoch is not None:
            self.newcomers.drain()
        self._healing.disallow_checkpoint()  # the rounds have landed for which it was held
        self._at_round.set()
        self._wait(lambda: not self._asking_on())
        self._asking = None
        if self._trouble is not None:
            self.leave("refused")
            raise self._trouble
        error = self._manager.errored()
        self._failed = error is not None
        if error is not None:
            self._tell(
                "quorum", (), f"step {self._step}: this quorum came to nothing: {_line(error.original_exception)}"
            )
        fresh = self._pending
        if fresh is not None:
            self._adopt(fresh)
        if self._failed and self.epoch is not None:
            self.epoch.broken = True
        if self._failed and fresh is not None:
            self.reporter.say(quorum=-fresh.number)  # nobody need wait for us there

    def _asking_on(self) -> bool:
        return self._asking is not None and self._asking.is_alive()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Who stops waiting leaves: Python would not end while torchft's thread waits for a quorum."""
        try:
            self._wait_patiently(ready)
        except BaseException:
            self.leave("waits no longer")
            raise

    def _wait_patiently(self, ready: Callable[[], bool]) -> None:
        started, said = time.monotonic(), False
        while not ready():
            time.sleep(0.005)
            waited = time.monotonic() - started
            if waited > STOPPING and self.asked_to_stop():
                raise PeerLost(f"asked to stop while waiting for a quorum at step {self._step}")
            if not said and waited > SLOW:
                said = True
                away = "" if self.reporter.reachable else f", and the coordinator {self.coordinator} does not answer"
                self._tell("slow", (), f"step {self._step}: over {SLOW:.0f} s without a quorum{away}")

    def _connect(self, number: int, place: tuple[str, int, int]) -> None:
        """Called by torchft, in a thread, with each quorum: who is new, or lost somebody, connects anew."""
        word = self.reporter.word()
        number += int(word[:8], 16) * QUORUMS
        if self.epoch is not None and number == self.epoch.number and not self.epoch.broken:
            return
        facts, sought = self.newcomers.facts(), self._sought(number // QUORUMS)
        me = Introduction(self.id, self._slot, self._begun, facts, self.min_workers, self._position, sought)
        assert self.address is not None
        store, rank, size = place
        try:
            where = f"{store}/{word}", rank, size
            epoch = connect(number, where, self.address, self._open, me)
            check_facts(me, epoch.members)
        except ValueError as error:
            self._trouble = error
            raise
        self._pending = epoch

    def _sought(self, coordinator: int) -> list[str]:
        """When the coordinator has just come back, those who were here before it went are waited for a little."""
        if self._worked is None or self._worked.coordinator == coordinator:
            return []
        if self._returned[0] != coordinator:
            self._returned = coordinator, time.monotonic()
        return self._worked.ids if time.monotonic() - self._returned[1] < RETURN else []

    def _open(self, transport: Transport) -> None:
        transport.notify = self._tell
        transport.open(1, self._header_length)

    def _adopt(self, epoch: Epoch) -> None:
        before, self.epoch, self._pending = self.epoch, epoch, None
        if before is not None:
            before.retire()
            self._tell_changes(before.ids, epoch.ids)
        self.worker, self.workers, self.parts = epoch.transport.worker, epoch.transport.workers, epoch.transport.parts
        self._slot = epoch.members[epoch.ids.index(self.id)].slot
        self.beginning = epoch.beginning
        if hasattr(epoch.transport, "watch"):
            epoch.transport.watch(lambda: self._gone(epoch))
        self.reporter.say(quorum=epoch.number, taking_part=epoch.ids, alone=epoch.alone)

    def _tell_changes(self, before: Sequence[str], now: Sequence[str]) -> None:
        came, left = sorted({*now} - {*before}), sorted({*before} - {*now})
        texts = [f"{', '.join(came)} joined"] * bool(came) + [f"{', '.join(left)} left"] * bool(left)
        if texts:
            self._tell("members", (), f"{'; '.join(texts)}: {len(now)} workers")

    def _gone(self, epoch: Epoch) -> list[int]:
        """Members that are silent, or have given this epoch up."""
        silent = self.reporter.silent()
        return [rank for rank, id in enumerate(epoch.ids) if id != self.id and (id in silent or self._left(id, epoch))]

    def _left(self, id: str, epoch: Epoch) -> bool:
        quorum = self.reporter.said(id, "quorum")
        if quorum is None or abs(quorum) // QUORUMS != epoch.coordinator:  # nothing said since a restart
            return False
        return quorum == -epoch.number or abs(quorum) > epoch.number

    # -- healing -------------------------------------------------------------------------------------------------------

    def _give(self) -> dict[str, Any]:
        """A newcomer needs our state: torchft asks in its thread, and waits until we are between two rounds."""
        self._staging.set()
        self._at_round.wait()
        extras = {name: save() for name, (save, _) in self._extras.items()}
        return {"engine": self.newcomers.save(), "extras": extras, "renewed_at": self._step, "ahead": self._ahead}

    def _take(self, state: dict[str, Any]) -> None:
        """In torchft's thread, as `_give`: with a quorum asked for in advance this worker may be amid a step."""
        self._staging.set()
        self._at_round.wait()
        if self._closed:
            raise PeerLost("this worker has left")
        try:
            self._refuse_other_extras(state["extras"])
            self.newcomers.load(state["engine"])
            for name, (_, load) in self._extras.items():
                load(state["extras"][name])
        except Exception as error:
            self._trouble = error
            raise
        self._healed, self._renewed_at = True, state["renewed_at"]
        self._step, self._votes, self._ahead = state["renewed_at"], 0, state["ahead"]
        self.reporter.say(step=state["engine"]["steps"])
        self._tell("healed", (), f"took over the fleet's state at step {state['engine']['steps']}")

    def _refuse_other_extras(self, handed: dict[str, Any]) -> None:
        if handed.keys() != self._extras.keys():
            theirs, mine = (", ".join(sorted(names)) or "nothing" for names in (handed, self._extras))
            raise ValueError(f"the fleet hands on {theirs}, this worker {mine}: carry the same on all")

    # -- rounds --------------------------------------------------------------------------------------------------------

    def exchange(self, order: Order) -> Exchange:
        assert self.epoch is not None, "renew comes before any round"
        epoch = self.epoch
        return Committing(
            epoch, order, self._header_length, lambda agreed, certain: self._voted(epoch, agreed, certain)
        )

    def _voted(self, epoch: Epoch, agreed: bool, certain: bool) -> None:
        """Count a round; who is not certain falls behind, and lets itself be healed if others went on."""
        if agreed:
            self._votes += 1
            self.committed += 1
            self._count_alone(epoch)
        else:
            self.lost += 1
        if not certain and self._behind is None:
            self._behind = self._step * VOTES + self._votes
        if epoch.broken:
            self._failed = True
            self.reporter.say(quorum=-epoch.number)
        self.reporter.say(committed=self.committed, lost=self.lost)

    def _count_alone(self, epoch: Epoch) -> None:
        if epoch.alone:
            self.alone_rounds += 1
            self._tell("alone", (), f"step {self._step}: this round was made alone")
            self.reporter.say(alone_rounds=self.alone_rounds)

    def _tell(self, kind: str, workers: Sequence[int], text: str) -> None:
        self.notify(kind, workers, text)
        if self.aloud is not None and kind in ("waiting", "slow", "coordinator"):
            self.aloud(text)

    def _among(self, call: Callable[[Transport], Any]) -> Any:
        epoch = self.epoch
        assert epoch is not None
        return epoch.attempt(lambda: call(epoch.transport))

    def talk(self, blobs: Sequence[bytes]) -> list[bytes]:
        return self._among(lambda transport: transport.talk(blobs))

    def meet(self, key: Key, headers: list[bytes], on_ahead: Callable[[Key], None]) -> list[bytes]:
        return self._among(lambda transport: transport.meet(key, headers, on_ahead))

    def broadcast(self, buffers: Sequence[Tensor], source: int) -> Tensor:
        return self._among(lambda transport: transport.broadcast(buffers, source))

    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        return self._among(lambda transport: transport.add(buffers))

    def leave(self, why: str) -> None:
        """Stop taking part; the others go on without this worker. After `leave("finished")` latecomers are told so."""
        if why == FINISHED and self._opened:
            self.reporter.tell(finished=True)
        self._closed = True
        self._at_round.set()
        for close in reversed(self._opened):
            close()
        self._opened.clear()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _Connections(ProcessGroup):
    """What torchft reconfigures: it only passes the place of a new quorum on."""

    def __init__(self, connect: Callable[[int, tuple[str, int, int]], None]) -> None:
        super().__init__(0, 1)
        self._connect = connect

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        self._connect(quorum_id or 0, (store_addr, rank, world_size))

    def errored(self) -> Exception | None:
        return None

    def getBackendName(self) -> str:
        return "thinwire"
