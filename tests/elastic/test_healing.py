"""Healing: every state arrives as it was staged, to those who know the secret, within the limits."""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torchft")

from tests.elastic.garbage import until  # noqa: E402
from thinwire.elastic import healing as module  # noqa: E402
from thinwire.elastic.channel import Channel  # noqa: E402
from thinwire.elastic.door import Refused  # noqa: E402
from thinwire.elastic.healing import Healing  # noqa: E402
from thinwire.elastic.parcel import DTYPES, raw  # noqa: E402

SECRET = b"s" * 32
SOON, PATIENT = timedelta(seconds=0.2), timedelta(seconds=10)


@pytest.fixture(scope="module")
def shared():
    """A donor and a joiner for tests that leave nothing behind."""
    pair = Healing(SECRET), Healing(SECRET)
    yield pair
    for one in pair:
        one.shutdown()


@pytest.fixture
def healing():
    """Make transports that are shut down in the end."""
    made: list[Healing] = []

    def make(secret: bytes | None = SECRET, **options: Any) -> Healing:
        made.append(Healing(secret, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def carried(pair: tuple[Healing, Healing], state: Any) -> Any:
    donor, joiner = pair
    donor.send_checkpoint([1], 3, state, PATIENT)
    try:
        return joiner.recv_checkpoint(0, donor.metadata(), 3, PATIENT)
    finally:
        donor.disallow_checkpoint()


def same(one: Any, other: Any) -> bool:
    """The same types, keys in the same order, and the same bits, NaNs included."""
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes(raw(one.contiguous())) == bytes(
            raw(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # nan is nan, and 1 is not True


# -- what arrives ------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=300)
tensors = st.builds(
    lambda shape, name: torch.randint(0, 2, shape).to(DTYPES[name]),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from([name for name in DTYPES if not name.startswith("complex32")]),
)
states = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_any_state_arrives_as_it_was(shared, state: Any) -> None:
    assert same(state, carried(shared, state))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_bit_for_bit(shared, name: str) -> None:
    dtype = DTYPES[name]
    count = 24
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
    state = {"flat": tensor, "scalar": tensor[0], "empty": tensor[:0], "matrix": tensor.view(4, 6)}
    assert same(state, carried(shared, state))


def test_views_parameters_and_large_tensors(shared) -> None:
    large = torch.randn(700, 1001)  # several frames, the last one short
    state = {"turned": large.t()[::3], "parameter": torch.nn.Parameter(large), "conjugate": torch.tensor(1 + 2j).conj()}
    expected = {"turned": large.t()[::3], "parameter": large, "conjugate": torch.tensor(1 - 2j)}
    assert same(expected, carried(shared, state))


def test_what_manager_and_optimizer_keep_travels(shared) -> None:
    """torchft's own wrapping, and a real optimizer's state with its whole-number keys and tuples."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "user": {"default": {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}},
        "torchft": {"step": 3, "batches_committed": 12},
    }
    assert same(state, carried(shared, state))


def test_the_staged_state_is_a_copy(shared) -> None:
    donor, joiner = shared
    weights = torch.zeros(5)
    donor.send_checkpoint([1], 4, {"weights": weights}, PATIENT)
    weights += 1
    assert same({"weights": torch.zeros(5)}, joiner.recv_checkpoint(0, donor.metadata(), 4, PATIENT))


@pytest.mark.parametrize(
    "thing", [{1, 2}, object(), torch.ones(2).to_sparse(), {1.5: 0}, {True: 0}, {(1, 2): 0}, torch.Size([1]).numel]
)
def test_what_cannot_travel_is_named(shared, thing: Any) -> None:
    with pytest.raises(ValueError, match=r"state\['outer'\]\[1\]"):
        shared[0].send_checkpoint([1], 5, {"outer": [0, thing]}, PATIENT)


def test_a_state_that_is_nested_without_end_is_refused(shared) -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ValueError, match="nested"):
        shared[0].send_checkpoint([1], 5, state, PATIENT)


# -- when --------------------------------------------------------------------------------------------------------------


def test_a_joiner_may_ask_before_its_donor_has_staged(healing) -> None:
    donor, joiner = healing(), healing()
    got: list[Any] = []
    asking = threading.Thread(target=lambda: got.append(joiner.recv_checkpoint(0, donor.metadata(), 9, PATIENT)))
    asking.start()
    donor.send_checkpoint([1], 8, "too early", PATIENT)
    donor.send_checkpoint([1], 9, "right", PATIENT)
    asking.join(10)
    assert got == ["right"]


def test_a_joiner_that_dies_while_it_waits_takes_no_place(healing) -> None:
    donor = healing()
    host, port = donor.metadata().split(":")
    with socket.create_connection((host, int(port))) as link:
        Channel.join(link, SECRET, 10).send_json({"step": 9, "timeout": 1000})
        until(lambda: any(guest.friend for guest in donor._door._present()))
    until(lambda: not donor._door._present())


def test_what_is_over_is_not_waited_for_as_long_as_what_is_to_come_unless_it_is_held(healing, monkeypatch) -> None:
    monkeypatch.setattr(module, "AGAIN", 0.1)
    donor, joiner = healing(), healing()
    donor.send_checkpoint([1], 8, "state", PATIENT)
    donor.held = True
    donor.disallow_checkpoint()
    assert joiner.recv_checkpoint(0, donor.metadata(), 8, PATIENT) == "state"
    donor.held = False
    donor.disallow_checkpoint()
    with pytest.raises(Refused, match="step 8 is not served"):
        joiner.recv_checkpoint(0, donor.metadata(), 8, PATIENT)
    donor.send_checkpoint([1], 8, "once more", PATIENT)  # the round was lost, and its step comes again
    assert joiner.recv_checkpoint(0, donor.metadata(), 8, PATIENT) == "once more"


def test_what_is_over_or_never_staged_is_refused(healing) -> None:
    donor, joiner = healing(), healing()
    donor.send_checkpoint([1], 8, "state", PATIENT)
    with pytest.raises(Refused, match="step 7 is not served"):
        joiner.recv_checkpoint(0, donor.metadata(), 7, PATIENT)
    donor.disallow_checkpoint()
    with pytest.raises(Refused, match="step 8 is not served"):
        joiner.recv_checkpoint(0, donor.metadata(), 8, SOON)


def test_several_joiners_at_once(healing) -> None:
    donor = healing()
    state = {"weights": torch.randn(300_000)}
    donor.send_checkpoint([1, 2, 3, 4], 2, state, PATIENT)
    joiners = [healing() for _ in range(4)]
    got: list[Any] = []
    threads = [
        threading.Thread(target=lambda j=joiner: got.append(j.recv_checkpoint(0, donor.metadata(), 2, PATIENT)))
        for joiner in joiners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == 4 and all(same(state, one) for one in got)


class SlowJoiner:
    """Asks for a state and reads no further than its announcement, until told to."""

    def __init__(self, donor: Healing, step: int) -> None:
        host, port = donor.metadata().split(":")
        self.link = socket.create_connection((host, int(port)))
        self.channel = Channel.join(self.link, SECRET, 10)
        self.channel.send_json({"step": step, "timeout": 10})
        self.sizes = self.channel.receive_json()

    def read_on(self) -> None:
        self.channel.receive_into(memoryview(bytearray(self.sizes["manifest"])))
        self.channel.receive_into(memoryview(bytearray(self.sizes["tensors"])))


LARGE = 1 << 23  # floats: more than any socket buffer holds


def test_a_transfer_under_way_is_waited_for(healing) -> None:
    donor = healing()
    donor.send_checkpoint([1], 2, torch.zeros(LARGE), PATIENT)
    slow = SlowJoiner(donor, 2)
    done = threading.Event()
    ending = threading.Thread(target=lambda: (donor.disallow_checkpoint(), done.set()))
    ending.start()
    assert not done.wait(0.3)
    slow.read_on()
    assert done.wait(10)
    slow.link.close()


def test_but_not_for_ever(healing, caplog: pytest.LogCaptureFixture) -> None:
    donor = healing()
    donor.send_checkpoint([1], 2, torch.zeros(LARGE), SOON)
    slow = SlowJoiner(donor, 2)
    donor.disallow_checkpoint()
    with pytest.raises((Refused, OSError)):
        slow.read_on()
    slow.link.close()
    assert [record.getMessage() for record in caplog.records if "took longer" in record.getMessage()]


def test_shutdown_leaves_no_thread_and_no_port(healing) -> None:
    before = threading.active_count()
    donor = Healing(SECRET)
    donor.send_checkpoint([1], 2, torch.zeros(LARGE), PATIENT)
    slow = SlowJoiner(donor, 2)
    host, port = donor.metadata().split(":")
    donor.shutdown()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    slow.link.close()


# -- who ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "here"), [(SECRET, b"t" * 32), (SECRET, None), (None, SECRET)])
def test_a_different_secret_gets_nothing_and_is_one_line(healing, caplog, there, here) -> None:
    donor, joiner = healing(there), healing(here)
    donor.send_checkpoint([1], 2, "state", PATIENT)
    with caplog.at_level(logging.WARNING, "thinwire"), pytest.raises(Refused, match="--secret-file") as caught:
        joiner.recv_checkpoint(0, donor.metadata(), 2, PATIENT)
    assert "\n" not in str(caught.value)
    said = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("healing: refused 127.0.0.1: ") for line in said) == 1
    assert sum(line.startswith("healing from 127.0.0.1:") for line in said) == 1 and len(said) == 2


def test_without_a_secret_only_this_machine_is_served(healing) -> None:
    donor, joiner = healing(None), healing(None)
    donor.send_checkpoint([1], 2, "state", PATIENT)
    assert joiner.recv_checkpoint(0, donor.metadata(), 2, PATIENT) == "state"
    with pytest.raises(ValueError, match="needs a secret"):
        Healing(None, address="192.0.2.1")


def test_without_a_secret_only_this_machine_is_asked(healing, monkeypatch) -> None:
    joiner = healing(None)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connected"))
    with pytest.raises(Refused, match="only loopback"):
        joiner.recv_checkpoint(0, "192.0.2.1:80", 2, PATIENT)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_use_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="the one address"):
        Healing(SECRET, address=address)


def test_an_address_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no-such-host.invalid: no such address"):
        Healing(SECRET, address="no-such-host.invalid")


@pytest.mark.parametrize("metadata", ["", "nonsense", "127.0.0.1:0", "127.0.0.1:99999", "no-such-host.invalid:80"])
def test_a_donor_that_cannot_be_found_is_one_line(healing, metadata: str) -> None:
    with pytest.raises(Refused) as caught:
        healing().recv_checkpoint(0, metadata, 2, PATIENT)
    assert "\n" not in str(caught.value)


# -- how much ----------------------------------------------------------------------------------------------------------


def test_the_limit_holds_on_both_sides(healing) -> None:
    donor, joiner = healing(), healing(limit=999)
    with pytest.raises(ValueError, match="over the limit of 999"):
        joiner.send_checkpoint([1], 2, torch.zeros(250), PATIENT)
    donor.send_checkpoint([1], 2, torch.zeros(250), PATIENT)
    with pytest.raises(Refused, match="999 are the limit"):
        joiner.recv_checkpoint(0, donor.metadata(), 2, PATIENT)
    donor.send_checkpoint([1], 3, torch.zeros(249), PATIENT)
    assert joiner.recv_checkpoint(0, donor.metadata(), 3, PATIENT).shape == (249,)


def peak_memory() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
def test_no_second_copy_is_made_on_either_side(healing) -> None:
    donor, joiner = healing(), healing()
    part, parts = 1 << 23, 16  # 16 x 8 MiB
    donor.send_checkpoint([1], 2, [torch.ones(part // 4) for _ in range(parts)], PATIENT)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = peak_memory()
    got = joiner.recv_checkpoint(0, donor.metadata(), 2, PATIENT)
    assert len(got) == parts and peak_memory() - before < part * (parts + 3)
