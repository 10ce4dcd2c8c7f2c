"""The ranks that hold one replica together: shards of it (FSDP2) or equal copies (DDP inside a worker).

How they meet the other workers' ranks is decided once, when the transport opens:

    shards   each rank exchanges its shards with the same rank of every other worker: equal islands, and no blocks
             of a codec that cross a shard
    shares   equal copies: each rank exchanges its share of every message, and all gather the answer inside
    led      one rank exchanges whole messages, and the others lend it their parts (lead.py): everything else
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .lead import Line
from .replica import Replica
from .shares import Shares
from .transport import Transport

if TYPE_CHECKING:
    from .fleet import Fleet


class Island:
    """The processes of one worker; often just this one."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.line: Line | None = None
        self.led = False
        self.kind, self.ranks, self.groups, self.coordinates = _members(replicas[0])

    @property
    def shard(self) -> str | None:
        """This rank's place among the shards, for the keys of a checkpoint; None where it saves whole tensors."""
        sharded = self.kind == "shards" and not self.led
        return "-".join(map(str, self.coordinates)) if sharded else None

    # -- decided once ----------------------------------------------------------------------------------------------

    def agree(self, norm: float, weight: float) -> tuple[float, float]:
        """The norm over all ranks, not finite if one is not, and the least weight."""
        if self.led or self.line is None:
            return norm, weight
        if self.kind == "shards":
            norm = self.line.reduce([norm * norm], dist.ReduceOp.SUM)[0] ** 0.5
        elif not self.all(math.isfinite(norm)):
            norm = math.nan
        return norm, self.line.reduce([weight], dist.ReduceOp.MIN)[0]

    def all(self, true: bool) -> bool:
        """Whether it is true on every rank."""
        return true if self.led or self.line is None else bool(self.line.reduce([true], dist.ReduceOp.MIN)[0])

    def total(self, count: int) -> int:
        """The sum over the shards."""
        if self.led or self.line is None or self.kind != "shards":
            return count
        return int(self.line.reduce([count], dist.ReduceOp.SUM)[0])

    def compare_copies(self, blobs: Sequence[bytes]) -> None:
        """Ranks that say different things at the start would send shares of different messages."""
        if self.led or self.line is None or self.kind != "copies":
            return
        digest = int.from_bytes(hashlib.sha256(b"|".join(blobs)).digest()[:6], "little")
        least, most = self.line.reduce([digest, -digest], dist.ReduceOp.MIN)
        if least != -most:
            raise ValueError(
                "the processes of this worker have different parameters or settings: wrap the model in DDP, or load "
                "the same values on each, before the first step"
            )

    def cure(self, replica: Replica) -> set[str]:
        """Start anew the optimizer state of every parameter for which it is not finite; their names."""
        if self.line is not None:
            return self.line.cure(replica) if self.led else self.line.cured(replica)
        ill = {name for name in replica.trainable if not replica.has_finite_state(name)}
        replica.restart_states(ill)
        return ill

    def conduct(self, fleet: Fleet, call: Callable[[], Any]) -> Any:
        """Make a call of the fleet: on every rank, or on the lead alone."""
        return self.line.conduct(fleet, call) if self.led and self.line is not None else call()

    # -- meeting the other workers ---------------------------------------------------------------------------------

    def join(self, fleet: Fleet) -> Transport:
        """Open the transport, on every rank or on the lead alone, whichever the workers need; what to use of it."""
        transport = fleet.transport
        self._refuse_overlap(transport)
        if len(self.ranks) == 1:
            self._open(fleet)
            self._decide(fleet, able=True)
            return transport
        self.line = Line(self.ranks, self.groups, self.replicas)
        members = transport.members()
        able = self.all(members is None or dist.get_rank() in members)
        self.line.conduct(fleet, lambda: self._lead_in(fleet, able))
        if self.led:
            self._follow_the_lead()
            return transport
        if not self.line.leads:
            self._open(fleet)
        transport.share_line(len(self.ranks))
        others = transport.workers > len(fleet.replicas)
        return Shares(transport, self) if self.kind == "copies" and others else transport

    def _refuse_overlap(self, transport: Transport) -> None:
        shared = set(transport.members() or ()).intersection(self.ranks)
        if len(shared) > 1:
            raise ValueError(
                f"the transport joins the ranks {sorted(shared)}, which are one worker: pass the group that joins the "
                'workers, as in tw.Group(mesh["workers"]), and keep FSDP or DDP to the ranks of one worker'
            )

    def _open(self, fleet: Fleet) -> None:
        fleet.transport.open(len(fleet.replicas), fleet.header_length)

    def _lead_in(self, fleet: Fleet, able: bool) -> None:
        if fleet.transport.elastic:
            raise ValueError("an elastic worker is one process: use tw.Group for workers of several")
        self._open(fleet)
        self.led = self._decide(fleet, able)

    def _decide(self, fleet: Fleet, able: bool) -> bool:
        """Whether the workers meet by their leads: all of them must, or none."""
        if fleet.transport.elastic:
            return False
        fact = json.dumps([self.kind, len(self.ranks), able and not self._needs_lead(fleet)]).encode()
        heard = [json.loads(blob) for blob in fleet.transport.talk([fact] * len(fleet.replicas))]
        alike = len({(kind, size) for kind, size, _ in heard}) == 1
        return not (alike and all(fits for _, _, fits in heard))

    def _needs_lead(self, fleet: Fleet) -> bool:
        """A codec's blocks would cross the shards, or some values lie on several ranks and would travel twice."""
        coarse = any(sync.codec.coarse and not sync.rule.silent for sync in fleet.method.rows)
        return self.kind == "shards" and (coarse or not self.replicas[0].is_sharded_throughout)

    def turns_to_leads(self, fleet: Fleet) -> bool:
        """The method has changed: workers that met shard by shard may need their leads now; never the other way."""
        if self.led or self.line is None or not self._decide(fleet, able=True):
            return False
        self.led = True
        self._follow_the_lead()
        return True

    def _follow_the_lead(self) -> None:
        for replica in self.replicas:
            replica.line, replica.is_whole = self.line, True


def _members(replica: Replica) -> tuple[str, list[int], list[Any], list[int]]:
    """What the ranks of the worker hold, their numbers, the groups that join them, this one's coordinates."""
    mesh = replica.island_mesh()
    if mesh is not None and mesh.size() > 1:
        groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        return "shards", mesh.mesh.flatten().tolist(), groups, mesh.get_coordinate()
    if replica.copies is not None and dist.get_world_size(replica.copies) > 1:
        return "copies", dist.get_process_group_ranks(replica.copies), [replica.copies], []
    return "alone", [dist.get_rank() if dist.is_initialized() else 0], [], []
