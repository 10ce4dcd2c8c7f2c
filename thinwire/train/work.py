"""The hosted replicas' own work: forward and backward of each on its shard's next batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire as tw
from thinwire.train import models, optimizers
from thinwire.train.config import Config
from thinwire.train.data import Batch, Dataset, Shard
from thinwire.train.errors import UserError, as_user_error
from thinwire.train.place import Place


def loss_of(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Mean cross-entropy of next tokens, or of classes."""
    inputs, targets = batch
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
        out = model(inputs)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@dataclass
class Team:
    """What this process hosts: a replica and a shard for each of its workers."""

    replicas: list[tw.Replica]
    shards: list[Shard]
    modules: list[nn.Module]  # what is called: the replica's model, perhaps wrapped


def build_team(config: Config, place: Place, data: Dataset) -> Team:
    replicas, shards, modules = [], [], []
    weight = config.train.batch * config.train.accumulate
    for worker in place.hosted:
        model = models.build(config, data.vocabulary, data.channels).to(place.device)
        module = _wrapped(model, config, place)
        with as_user_error():
            inner = optimizers.build(model, config.optimizer)
            replicas.append(tw.Replica(module, inner if len(inner) > 1 else inner[0], weight=weight))
        shards.append(Shard(data.train, worker, config.workers, config.seed))
        if config.train.compile:
            module.compile()
        modules.append(module)
    return Team(replicas, shards, modules)


def _wrapped(model: nn.Module, config: Config, place: Place) -> nn.Module:
    if place.mesh is None:
        return model
    if config.train.batch % place.inside:
        raise UserError(
            f"train.batch = {config.train.batch} must be a multiple of the {place.inside} processes of a worker"
        )
    from torch.distributed.fsdp import fully_shard  # a second to import, for those who use it

    if config.train.inside == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=place.mesh.get_group())
    for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=place.mesh)
    fully_shard(model, mesh=place.mesh)
    return model


class Work:
    """One step's gradients for every hosted replica."""

    def __init__(self, team: Team, config: Config, place: Place) -> None:
        self.team, self.config, self.place = team, config, place

    def batches(self, shard: Shard) -> list[Batch]:
        """The micro-batches of one step; of a worker with several processes, this one's rows."""
        rows = slice(self.place.inner, None, self.place.inside)
        taken = [shard.next(self.config.train.batch) for _ in range(self.config.train.accumulate)]
        return [(x[rows].to(self.place.device), y[rows].to(self.place.device)) for x, y in taken]

    def run(self, step: int) -> Tensor:
        """Leave gradients in the replicas; the loss of each (hosted,)."""
        losses = []
        for module, shard in zip(self.team.modules, self.team.shards, strict=True):
            # drawn from the step, so that dropout is the same in every layout and after every resume
            torch.manual_seed((self.config.seed * 1_000_003 + step) * 4099 + shard.worker)
            losses.append(self._replica(module, self.batches(shard)))
        return self._over_island(torch.stack(losses))

    def _replica(self, module: nn.Module, batches: list[Batch]) -> Tensor:
        total = torch.zeros((), device=self.place.device)
        for batch in batches:
            loss = loss_of(module, batch, self.config.train.precision) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    def _over_island(self, losses: Tensor) -> Tensor:
        if self.place.mesh is not None:
            dist.all_reduce(losses, group=self.place.mesh.get_group())
            losses /= self.place.inside
        return losses


def evaluate(module: nn.Module, data: Dataset, config: Config, place: Place) -> float | None:
    """Mean loss over the held-out batches, shared out over the processes; None where nothing is held out.

    Sites may have data of their own, and more or less of it: each counts for what it has, and all get the same mean.
    """
    size = min(16, len(data.held))
    count = min(config.train.eval_batches, len(data.held) // size) if size else 0
    mine = range(place.notes.process, count, place.notes.processes)
    losses = {batch: _held_loss(module, data, range(batch * size, (batch + 1) * size), config, place) for batch in mine}
    everybody: dict[str, float] = {}
    for note in place.notes.exchange(losses):
        everybody |= note
    return sum(everybody[batch] for batch in sorted(everybody, key=int)) / len(everybody) if everybody else None


@torch.no_grad()
def _held_loss(module: nn.Module, data: Dataset, rows: range, config: Config, place: Place) -> float:
    inputs, targets = data.held.take(list(rows))
    batch = inputs.to(place.device), targets.to(place.device)
    return float(loss_of(module, batch, config.train.precision))
