"""A worker is killed (kill -9) and replaced: what each method promises of the others and of its successor."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torchft")

import thinwire as tw
from tests.cluster import free_port
from tests.elastic.member import METHODS, backward, held_loss, model_of, some
from tests.elastic.pack import Line, Member
from tests.elastic.test_chaos import distance, each
from thinwire.elastic.coordinator import Coordinator

pytestmark = pytest.mark.xdist_group("chaos")
EVERY, WORKERS, LATER = 4, 3, 72  # steps that are taken together with the replacement
BATCH, WINDOW = 256, 32  # large enough, and steps enough to average over, for a loss to mean something
PLACES = ("inner", "exchange", "vote", "commit")


@dataclass
class Pack:
    """Three workers of one method; one is killed at a place in its fifth round, and later another joins."""

    method: str
    place: str = "exchange"
    later: int = LATER
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(port=free_port(), heartbeat_timeout=3.0)
        self.started: list[Member] = []

    def start(self, name: str, *more: str) -> None:
        words = ["--seconds", "0.1", "--batch", str(BATCH), "--seed", str(len(self.members)), *more]
        self.started.append(Member(self.coordinator.address, self.method, 4000, name, *words))
        self.members.append(self.started[-1])

    def begin(self) -> None:
        stop = () if self.place == "inner" else ("--stop-at", f"{self.place}:5")
        for name in "abx":
            self.start(name, "--together", str(WORKERS), *(stop if name == "x" else ()))

    def kill(self) -> None:
        victim = self.members.pop()
        if self.place == "inner":
            victim.step(4 * EVERY + 1)
            victim.signal(signal.SIGKILL)
        victim.died()

    def replace(self) -> None:
        """The others have gone on without it: another comes."""
        for member in self.members:
            gone_on = member.wait_for(lambda line: line["kind"] == "step" and line["workers"] == WORKERS - 1)
            assert gone_on["lost"] <= 1
        self.between = (gone_on["step"] // EVERY + 1) * EVERY
        for member in self.members:
            member.step(self.between)
        self.start("y")

    def train_on(self) -> None:
        self.joined = self.members[2].wait_for(lambda line: line["kind"] == "begun")["step"]
        for member in self.members:
            last = member.step(self.joined + self.later)
            assert last["workers"] == WORKERS and last["lost"] <= (member is not self.members[2])
        # the others keep their own state, but for one who could not know whether that round counted
        assert all(len(member.events("healed")) <= 1 for member in self.members[:2])

    def end(self) -> None:
        for member in self.started:
            member.end()
        self.coordinator.close()

    def are_equal(self, step: int, what: str) -> bool:
        return len(each(self.members, step, what)) == 1

    def are_apart(self, step: int, what: str) -> bool:
        return len(each(self.members, step, what)) == WORKERS

    def widest(self, step: int) -> float:
        return width([member.at(step) for member in self.members])

    def worker_steps(self) -> int:
        """Steps committed by the whole fleet until the end, as the first worker saw it."""
        lines = [line for line in self.members[0].lines if line["kind"] == "step"]
        met = [b["workers"] for a, b in zip(lines, lines[1:], strict=False) if b["committed"] > a["committed"]]
        return EVERY * sum(met)


def at_once(packs: dict[str, Pack]) -> dict[str, Pack]:
    """Have all packs do all of it. Nearly all of the time is waiting for heartbeats: they wait together."""
    try:
        for act in (Pack.begin, Pack.kill, Pack.replace, Pack.train_on):
            for pack in packs.values():
                act(pack)
    finally:
        for pack in packs.values():
            pack.end()
    return packs


@pytest.fixture(scope="module")
def places() -> dict[str, Pack]:
    return at_once({place: Pack("diloco", place, later=2 * EVERY) for place in PLACES})


@pytest.fixture(scope="module")
def methods() -> dict[str, Pack]:
    names = ("consensus", "desloc", "eager", "streaming", "sparseloco", "paper", "mean")
    return at_once({name: Pack(name) for name in names})


def width(told: list[Line]) -> float:
    return max(distance(one, other) for one in told for other in told)


def calm(method: str, steps: int) -> list[list[Line]]:
    """What the three would have told, step by step, had nobody died."""
    pairs = [model_of(0) for _ in range(WORKERS)]
    fleet = tw.Fleet([tw.Replica(*pair) for pair in pairs], METHODS[method](), tw.Local())
    told = []
    while fleet.steps < steps:
        for slot, (model, _) in enumerate(pairs):
            backward(model, fleet.steps, slot, BATCH)
        fleet.step()
        fleet.zero_grad()
        told.append([{"some": some(model), "held": held_loss(model, BATCH)} for model, _ in pairs])
    return told


@pytest.mark.parametrize("place", PLACES)
def test_kill_9_costs_at_most_that_round(places: dict[str, Pack], place: str) -> None:
    pack = places[place]
    survivors = pack.members[:2]
    for what in ("params", "outer"):
        assert len(each(survivors, pack.between, what)) == 1
        assert pack.are_equal(pack.joined + EVERY, what)
    if place == "exchange":
        assert [member.lines[-1]["lost"] for member in survivors] == [1, 1]


@pytest.mark.parametrize("method", ["consensus", "sparseloco"])
def test_methods_that_make_workers_equal_do_so_in_the_first_round(methods: dict[str, Pack], method: str) -> None:
    pack = methods[method]
    for what in ("params", "outer"):
        assert pack.are_equal(pack.joined + EVERY, what)
    assert pack.are_apart(pack.joined + EVERY - 1, "params"), "between rounds each trains on its own data"


def test_desloc_is_equal_in_each_part_after_its_own_round(methods: dict[str, Pack]) -> None:
    pack = methods["desloc"]
    for what, period in (("params", EVERY), ("exp_avg", 3 * EVERY), ("exp_avg_sq", 6 * EVERY)):
        first = (pack.joined // period + 1) * period
        assert pack.are_equal(first, what) and pack.are_apart(first - 1, what)


@pytest.mark.parametrize("method", ["eager", "streaming"])
def test_workers_stay_within_the_distance_of_a_run_without_a_death(methods: dict[str, Pack], method: str) -> None:
    pack, last = methods[method], methods[method].joined + LATER
    usual = max(width(told) for told in calm(method, last))
    assert max(pack.widest(step) for step in range(pack.joined + EVERY, last + 1)) <= usual


@pytest.mark.parametrize("method", ["paper", "mean"])
def test_the_loss_is_that_of_a_run_without_a_death_at_equal_committed_steps(
    methods: dict[str, Pack], method: str
) -> None:
    pack, last = methods[method], methods[method].joined + LATER
    undisturbed = calm(method, pack.worker_steps() // WORKERS)[-WINDOW:]
    expected = [sum(line["held"] for line in told) / WORKERS for told in undisturbed]
    for member in pack.members:
        held = [member.at(step)["held"] for step in range(last - WINDOW + 1, last + 1)]
        assert sum(held) / sum(expected) < 1.02  # and finite
