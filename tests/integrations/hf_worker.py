"""One worker that trains a tiny Llama, by a plain loop and by `transformers.Trainer`. Run in processes of a cluster."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw

STEPS, BATCH, ACCUMULATE, RATE, EVERY_EVAL = 12, 4, 2, 1e-2, 5
Example = dict[str, Tensor]


def method_of(name: str) -> tw.Method:
    return {
        "desloc": lambda: tw.desloc(3, delay=2),
        "eager": lambda: tw.eager_diloco(4, codec=tw.Int8()),
        "local_sgd": lambda: tw.local_sgd(4),
    }[name]()


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def examples(seed: int, count: int = STEPS * BATCH * ACCUMULATE) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 32, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def stacked(part: list[Example]) -> Example:
    return {name: torch.stack([example[name] for example in part]) for name in part[0]}


def connected(port: int, worker: int, timeout: float = 60) -> tw.Group:
    return tw.Group.connect(f"127.0.0.1:{port}", worker=worker, workers=2, timeout=timeout)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# -- the plain loop --------------------------------------------------------------------------------------------------


def plain(worker: int, port: int, name: str) -> tuple[list[Tensor], dict[int, list[float]]]:
    """The final parameters, and the losses of the consensus on two sets after every few steps."""
    from transformers import get_linear_schedule_with_warmup

    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, STEPS)
    fleet = tw.attach(model, optimizer, method_of(name), connected(port, worker))
    data, losses = examples(worker), {}
    for step in range(STEPS):
        micro_batches = [stacked(data[at : at + BATCH]) for at in starts_of(step)]
        predicted = sum(batch["labels"][:, 1:].numel() for batch in micro_batches)
        for batch in micro_batches:
            model(**batch, num_items_in_batch=torch.tensor(predicted)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step + 1 == STEPS:
            fleet.finish()
        if (step + 1) % EVERY_EVAL == 0:
            with fleet.evaluating():
                losses[step + 1] = [loss_on(model, seed) for seed in (100, 101)]
    return values(model), losses


def starts_of(step: int) -> list[int]:
    return [(step * ACCUMULATE + micro) * BATCH for micro in range(ACCUMULATE)]


def loss_on(model: nn.Module, seed: int) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(model(**stacked(examples(seed, 8))).loss)
    model.train()
    return loss


# -- the Trainer -----------------------------------------------------------------------------------------------------


def settings(folder: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    chosen: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "save_steps": EVERY_EVAL,
        "eval_strategy": "steps",
        "eval_steps": EVERY_EVAL,
        "eval_on_start": True,
        "logging_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**chosen, **changes})


def trainer_of(worker: int, folder: str, callback: Any, seed: int | None = None, **changes: Any) -> Any:
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    trainer = Trainer(
        model=tiny_llama(),
        args=settings(os.path.join(folder, str(worker)), **changes),
        train_dataset=examples(worker if seed is None else seed),
        eval_dataset={"one": examples(100, 8), "two": examples(101, 8)},
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def sampling() -> Any:
    """What a user may do after an evaluation, before the Trainer makes a checkpoint."""
    from transformers import TrainerCallback

    class Sampling(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            loss_on(others["model"], 102)

    return Sampling()


def with_trainer(worker: int, port: int | None, name: str, folder: str, resume_at: int = 0) -> dict[str, Any]:
    """Without a port, the workers are joined by the process group that the test has set up."""
    from thinwire.integrations.hf import ThinwireCallback

    transport = None if port is None else connected(port, worker)
    callback = ThinwireCallback(method_of(name), transport)
    trainer = trainer_of(worker, folder, callback)
    trainer.add_callback(sampling())
    resume = os.path.join(folder, str(worker), f"checkpoint-{resume_at}") if resume_at else None
    trainer.train(resume_from_checkpoint=resume)
    last = os.path.join(folder, str(worker), f"checkpoint-{STEPS}")
    return {
        "values": values(trainer.model),
        "saved": values(type(trainer.model).from_pretrained(last)),
        "history": trainer.state.log_history,
        "bytes": callback.fleet.bytes_sent,
        "events": callback.fleet.events.counts,
    }


def elastic(worker: int, address: str, folder: str) -> dict[str, Any]:
    """The second worker comes when the first is some steps on; both have as many steps to make."""
    from transformers import TrainerCallback

    from thinwire.integrations.hf import ThinwireCallback

    mark = os.path.join(folder, "is on its way")

    class Pace(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            time.sleep(0.1)
            if state.global_step == 8:
                open(mark, "w").close()

    while worker and not os.path.exists(mark):
        time.sleep(0.05)
    callback = ThinwireCallback(tw.local_sgd(4), tw.Elastic(address, name="ab"[worker]))
    changes = {"max_steps": 60, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1}
    trainer = trainer_of(worker, folder, callback, **changes)
    trainer.add_callback(Pace())
    trainer.train()
    rates = {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry}
    return {"values": values(trainer.model), "step": trainer.state.global_step, "rates": rates,
            "fleet": callback.fleet.steps, "own": len(rates)}  # fmt: skip
