"""A newcomer goes on with the learning rate of those who train, whatever its schedule began with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire as tw
from tests.laws.entries import fleet_of, train
from thinwire import joining
from thinwire.elastic.parcel import pack, read_manifest, unpack

LIMIT = 1 << 20


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


SCHEDULES = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle, with its betas": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 40),
}


def numbers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [[group["lr"], tuple(group["betas"])] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_the_donor_is(kind: str) -> None:
    donor, newcomer = (fleet_of(tw.local_sgd(2), 1, adamw) for _ in range(2))
    optimizers = [fleet.replicas[0].optimizers[0] for fleet in (donor, newcomer)]
    schedules = [SCHEDULES[kind](optimizer) for optimizer in optimizers]
    train(donor, 6, each=schedules[0].step)
    train(newcomer, 0)
    parcel = pack({"engine": joining.save(donor), "schedule": schedules[0].state_dict()})
    state = unpack(read_manifest(parcel.manifest, limit=LIMIT)[0], parcel.tensors)
    newcomer.begin()
    joining.load(newcomer, state["engine"])
    schedules[1].load_state_dict(state["schedule"])
    assert numbers_of(optimizers[0]) == numbers_of(optimizers[1]) and optimizers[1].param_groups[0]["lr"] != 1e-2
    for fleet, schedule in zip((donor, newcomer), schedules, strict=True):
        train(fleet, 3, begin=6, each=schedule.step)
    assert numbers_of(optimizers[0]) == numbers_of(optimizers[1])
