"""Accelerate in a loop of one's own, LoRA through peft: two workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.integrations import hf_worker
from tests.integrations.environment import forget_accelerate
from tests.integrations.hf_worker import connected, method_of, tiny_llama, values
from tests.toy import adamw, batch, small_model

pytest.importorskip("accelerate")
pytestmark = pytest.mark.xdist_group("integrations")
STEPS, ACCUMULATE, SAVED_AT, PATIENCE = 12, 2, 7, 60


def loss_of(model: nn.Module, micro_batch: int, worker: int) -> Tensor:
    inputs, targets = batch(micro_batch, worker)
    return nn.functional.mse_loss(model(inputs), targets)


def plain(worker: int, port: int, name: str) -> list[Tensor]:
    model = small_model()
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, method_of(name), connected(port, worker))
    for step in range(STEPS):
        for micro in range(ACCUMULATE):
            (loss_of(model, ACCUMULATE * step + micro, worker) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert fleet.steps == STEPS
    fleet.finish()
    return values(model)


def with_accelerate(worker: int, port: int, name: str, folder: str) -> list[Tensor]:
    """Saved in the middle, and taken up again by new objects."""
    from accelerate import Accelerator

    forget_accelerate()
    here = os.path.join(folder, str(worker))

    def build(port: int) -> tuple[Any, nn.Module, Any, tw.Fleet]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        model = small_model()
        model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
        fleet = tw.attach(model, optimizer, method_of(name), connected(port, worker))
        accelerator.register_for_checkpointing(fleet)
        return accelerator, model, optimizer, fleet

    def go_on(accelerator: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
        for micro_batch in range(ACCUMULATE * steps.start, ACCUMULATE * steps.stop):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, micro_batch, worker))
                optimizer.step()
                optimizer.zero_grad()

    accelerator, model, optimizer, fleet = build(port)
    go_on(accelerator, model, optimizer, range(SAVED_AT))
    accelerator.save_state(here)
    accelerator, model, optimizer, fleet = build(port + 1)
    accelerator.load_state(here)
    go_on(accelerator, model, optimizer, range(SAVED_AT, STEPS))
    assert fleet.steps == STEPS
    fleet.finish()
    return values(model)


@pytest.mark.parametrize("name", ["desloc", "eager"])
def test_accelerate_is_a_plain_loop_resume_included(cluster: Cluster, tmp_path: Any, name: str) -> None:
    expected = cluster.run(plain, 2, free_port(), name, timeout=PATIENCE, join=False)
    ours = cluster.run(with_accelerate, 2, free_port(), name, str(tmp_path), timeout=PATIENCE, join=False)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


# -- LoRA ------------------------------------------------------------------------------------------------------------


def adapted() -> Any:
    import peft

    base = tiny_llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def with_lora(worker: int, port: int, folder: str) -> dict[str, Any]:
    from transformers import Trainer

    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.diloco(4), connected(port, worker))
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = {"eval_strategy": "no", "eval_on_start": False, "save_steps": 6}
    args = hf_worker.settings(os.path.join(folder, str(worker)), **changes)
    trainer = Trainer(model=model, args=args, train_dataset=hf_worker.examples(worker), callbacks=[callback])
    trainer.train()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    again = Trainer(
        model=adapted(),
        args=args,
        train_dataset=hf_worker.examples(worker),
        callbacks=[ThinwireCallback(tw.diloco(4), connected(port + 1, worker))],
    )
    again.train(resume_from_checkpoint=os.path.join(args.output_dir, "checkpoint-6"))
    return {
        "bytes": callback.fleet.bytes_sent,
        "wire": callback.fleet.wire_sent,
        "moved": moved,
        "after": [after[name] for name in moved],
        "resumed": [p.detach() for name, p in again.model.named_parameters() if name in moved],
    }


def test_only_adapters_travel_and_a_resumed_run_is_the_same(cluster: Cluster, tmp_path: Any) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    one, other = cluster.run(with_lora, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False)
    adapters = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    rounds = hf_worker.STEPS // 4
    assert one["bytes"] == other["bytes"] == rounds * 4 * adapters
    assert one["moved"] and all("lora_" in name for name in one["moved"])
    torch.testing.assert_close(one["after"], other["after"], rtol=0, atol=0)
    torch.testing.assert_close(one["resumed"], one["after"], rtol=0, atol=0)
