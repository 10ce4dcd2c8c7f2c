"""How a joiner receives the state of the fleet: torchft's `CheckpointTransport` without pickle.

The donor stages a copy of its state on the host; a joiner that has proved the secret fetches it, tensor by tensor.
Structure travels as JSON, tensors as raw bytes; sizes are announced and checked before anything is allocated.
Without a secret only this machine is served, and asked.

    joiner -> donor   {"step", "timeout"}
    donor -> joiner   {"manifest": bytes, "tensors": bytes}, or {"sorry": why}; then the manifest, then each tensor
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.checkpointing import CheckpointTransport

from . import address as addresses
from .channel import Channel
from .door import PATIENCE, Door, Guest, Refused
from .parcel import MANIFEST, Parcel, pack, raw, read_manifest, size_of, unpack

log = logging.getLogger("thinwire")

LIMIT = 1 << 36  # bytes of a state: 64 GiB
STALL = 30.0  # seconds that one frame may take before the donor gives the joiner up
LONGEST = 3600.0  # seconds that a joiner may ask the donor to wait for its own staging
AGAIN = 5.0  # seconds to wait for a step that was staged before: after a lost round it may be once more


class Healing(CheckpointTransport[Any]):
    """Serves the state of this worker to joiners, and fetches that of a donor.

    `timeout` of `recv_checkpoint` bounds the wait for the donor and each frame's time, not the whole transfer: a large
    model on a slow line takes as long as it takes.

    >>> from datetime import timedelta
    >>> donor, joiner = Healing(secret=b"s" * 32), Healing(secret=b"s" * 32)
    >>> donor.send_checkpoint([1], 5, {"weights": torch.ones(2)}, timedelta(seconds=5))
    >>> joiner.recv_checkpoint(0, donor.metadata(), 5, timedelta(seconds=5))
    {'weights': tensor([1., 1.])}
    >>> donor.shutdown(), joiner.shutdown()
    (None, None)
    """

    def __init__(self, secret: bytes | None, address: str = "127.0.0.1", limit: int = LIMIT, port: int = 0) -> None:
        try:
            everywhere = addresses.is_wildcard(address)
        except socket.gaierror as error:
            raise ValueError(f"healing at {address}: no such address ({error.strerror}): use this machine's") from error
        if everywhere:
            raise ValueError(f"healing at {address}: give the one address by which other workers reach this machine")
        if secret is None and not addresses.is_loopback(address):
            raise ValueError(f"healing at {address} needs a secret (--secret-file); without one it must be loopback")
        self._secret, self._address, self._limit = secret, address, limit
        self._staged: tuple[int, Parcel] | None = None
        self._serving: set[Guest] = set()
        self._change = threading.Condition()
        self._patience = STALL
        self.held = False  # torchft ends the healing with each vote: here the staged state outlives the next one
        self._turns, self._over = 0, -1  # the last step whose state was served here, and is not any more
        self._door = Door("healing", address, port, self._welcome)

    def metadata(self) -> str:
        return addresses.join(self._address, self._door.port)

    # -- the donor -----------------------------------------------------------------------------------------------------

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Stage a copy of the state; joiners fetch it until `disallow_checkpoint`."""
        self.held = False
        self.disallow_checkpoint()
        parcel = pack(state_dict)
        if parcel.size > self._limit:
            raise ValueError(f"a state of {parcel.size} bytes is over the limit of {self._limit}: raise the limit")
        with self._change:
            self._staged, self._patience = (step, parcel), timeout.total_seconds()
            self._change.notify_all()

    def disallow_checkpoint(self) -> None:
        """Serve no more, unless `held`; wait for transfers under way, at most as long as `send_checkpoint` was told."""
        if self.held:
            return
        with self._change:
            self._over = self._over if self._staged is None else self._staged[0]
            self._staged = None
            if not self._change.wait_for(lambda: not self._serving, self._patience):
                for guest in self._serving:
                    guest.refuse(f"its transfer took longer than {self._patience:g} s after the round had ended")

    def turn_away(self) -> None:
        """What guests are waiting for will not be staged any more: its round is over."""
        with self._change:
            self._turns += 1
            self._change.notify_all()

    def shutdown(self, wait: bool = True) -> None:
        with self._change:
            self._staged = None
        self._door.close()

    def _welcome(self, guest: Guest) -> None:
        channel = Channel.serve(guest.link, self._secret, PATIENCE)
        request = channel.receive_json()
        step, wait = _number(request, "step"), _number(request, "timeout")
        guest.befriend()
        channel.patience = STALL
        try:
            self._serve(guest, channel, step, min(max(wait, 0.0), LONGEST))
        finally:
            with self._change:
                self._serving.discard(guest)
                self._change.notify_all()

    def _serve(self, guest: Guest, channel: Channel, step: float, wait: float) -> None:
        parcel = self._await(guest, step, wait)
        if parcel is None:
            channel.send_json({"sorry": f"step {step:.0f} is not served here"})
            raise Refused(f"it asked for step {step:.0f}, which is not served")
        channel.send_json({"manifest": len(parcel.manifest), "tensors": parcel.size})
        channel.send(parcel.manifest)
        for tensor in parcel.tensors:
            channel.send(raw(tensor))

    def _await(self, guest: Guest, step: float, wait: float) -> Parcel | None:
        """The staged state of that step, waited for: a joiner may ask before its donor has come to the round."""
        with self._change:
            deadline = time.monotonic() + (wait if step > self._over else min(wait, AGAIN))
            turn = self._turns
            while self._staged is None or self._staged[0] < step:
                if time.monotonic() > deadline or turn != self._turns:
                    return None
                self._change.wait(min(1.0, wait))
                if guest.has_gone():
                    raise Refused("it went away while it waited for its state")
            if self._staged[0] != step:
                return None
            self._serving.add(guest)
            return self._staged[1]

    # -- the joiner ----------------------------------------------------------------------------------------------------

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """The state of that step, from the donor whose `metadata()` this is."""
        try:
            host, port = addresses.split(metadata)
            if self._secret is None and not addresses.is_loopback(host):
                raise Refused("without a secret (--secret-file) only loopback is asked")
            with socket.create_connection((host, port), timeout=min(timeout.total_seconds(), PATIENCE)) as link:
                return self._fetch(link, step, timeout.total_seconds())
        except (Refused, OSError, ValueError) as error:
            why = f"healing from {metadata[:200]}: {' '.join(str(error).split())}"
            log.warning("%s", why)
            raise Refused(why) from error

    def _fetch(self, link: socket.socket, step: int, timeout: float) -> Any:
        channel = Channel.join(link, self._secret, min(timeout, PATIENCE))
        channel.patience = timeout
        channel.send_json({"step": step, "timeout": timeout})
        answer = channel.receive_json(timeout + PATIENCE)  # the donor itself waits that long for its staging
        if "sorry" in answer:
            raise Refused(f"the donor says: {str(answer['sorry'])[:200]}")
        manifest, size = _number(answer, "manifest"), _number(answer, "tensors")
        if not 0 < manifest <= MANIFEST or not 0 <= size <= self._limit:
            raise Refused(f"{manifest:.0f} + {size:.0f} bytes were announced; {MANIFEST} + {self._limit} are the limit")
        text = bytearray(int(manifest))
        channel.receive_into(memoryview(text))
        structure, kinds = read_manifest(text, self._limit)
        if size_of(kinds) != size:
            raise Refused(f"the manifest lists {size_of(kinds)} bytes, {size:.0f} were announced")
        return unpack(structure, [_receive(channel, dtype, shape) for dtype, shape in kinds])


def _receive(channel: Channel, dtype: torch.dtype, shape: list[int]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    channel.receive_into(raw(tensor))
    return tensor


def _number(message: dict[str, Any], name: str) -> float:
    value = message.get(name)
    if not isinstance(value, (int, float)) or not abs(value) < 1 << 62:
        raise Refused(f"its message has no number {name!r}")
    return value
