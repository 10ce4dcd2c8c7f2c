"""Models and optimizers in the wrappers people use: the names stay clean, the values the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thinwire as tw
from tests.cluster import free_port
from tests.toy import adamw, backward, small_model

NAMES = [name for name, _ in small_model().named_parameters()]


@pytest.fixture
def alone() -> Any:
    """A process group of one, for wrappers that want one."""
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(wrap: Callable[[nn.Module, Any], tuple[nn.Module, Any]]) -> tuple[tw.Fleet, list[torch.Tensor]]:
    model = small_model()
    wrapped, optimizer = wrap(model, adamw(model.parameters()))
    fleet = tw.attach(wrapped, optimizer, tw.diloco(2), tw.Local())
    for step in range(5):
        backward(wrapped, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    return fleet, [p.detach().clone() for p in model.parameters()]


def compiled(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return torch.compile(model, backend="eager"), optimizer  # type: ignore[return-value]


def checkpointed(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    model[0] = checkpoint_wrapper(model[0])
    return model, optimizer


def in_ddp(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return nn.parallel.DistributedDataParallel(model), optimizer


def accelerated(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(model, optimizer)


@pytest.mark.parametrize("wrap", [compiled, checkpointed, in_ddp, accelerated])
def test_a_wrapped_model_trains_as_a_plain_one(wrap: Any, alone: None) -> None:
    fleet, values = trained(wrap)
    _, plain = trained(lambda model, optimizer: (model, optimizer))
    torch.testing.assert_close(values, plain, rtol=0, atol=0)
    assert list(fleet.consensus()) == NAMES and fleet.steps == 5


def test_wrapping_after_attaching_changes_nothing(alone: None) -> None:
    model = small_model()
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, tw.diloco(2), tw.Local())
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    for step in range(5):
        backward(wrapped, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    _, plain = trained(lambda model, optimizer: (model, optimizer))
    torch.testing.assert_close([p.detach() for p in model.parameters()], plain, rtol=0, atol=0)
    assert fleet.steps == 5


def lora(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    peft = pytest.importorskip("peft")
    model = small_model()
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    return adapted, adamw([p for p in adapted.parameters() if p.requires_grad])


def test_only_adapters_travel_and_two_seeds_start_equal() -> None:
    replicas = [tw.Replica(*lora(seed)) for seed in (1, 2)]
    fleet = tw.Fleet(replicas, tw.local_sgd(1), tw.Local())
    for i, replica in enumerate(replicas):
        backward(replica.model, 0, i)
    fleet.step()
    adapters = [p for p in replicas[0].model.parameters() if p.requires_grad]
    assert fleet.bytes_sent == 4 * sum(p.numel() for p in adapters)
    assert fleet.events.counts == {"start": 1}
    assert all(name.startswith(("0.lora", "2.lora")) for name in fleet.consensus())
    for name, value in replicas[0].trainable.items():
        assert torch.equal(value, replicas[1].trainable[name])
