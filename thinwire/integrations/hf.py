"""thinwire in `transformers.Trainer`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ..attach import attach
from ..fleet import Fleet
from ..table import Method
from ..transport import Transport
from .common import (
    FirstBatch,
    Meter,
    refuse_shared_folder,
    refuse_shared_world,
    refuse_unequal_plans,
    shares_the_line,
    warn_if_alone,
    weights_checksum,
)
from .evaluation import Evaluation

try:
    import safetensors.torch
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.trainer_utils import has_length
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thinwire.integrations.hf needs transformers: pip install 'thinwire[hf]'", name=error.name
    ) from None


class ThinwireCallback(TrainerCallback):
    """Trains a `transformers.Trainer`'s model as one worker of a fleet; nothing else of the script changes.

    Each worker runs its own Trainer with its own data and `output_dir`, in its own torchrun, and the callbacks join
    them: `transport=tw.Group.connect(HOST:PORT, worker=i, workers=n)`. A process group set up by hand serves as well.

    It attaches once the Trainer has made its optimizer; saves the fleet's state with every checkpoint, this worker's
    part only, and restores it when the Trainer resumes; logs `bytes_sent` and `waiting_share` beside the loss (put a
    reporter of your own behind this callback to have it see them); evaluates the consensus of the workers; and
    finishes after the last step, so that the last evaluation and the last checkpoint are those of the common model.

    The arguments are those of `tw.attach`; `fleet` is there once training has begun.

    >>> import thinwire as tw
    >>> callback = ThinwireCallback(tw.desloc(every=256))
    >>> callback.method.name, callback.fleet
    ('desloc', None)
    """

    def __init__(
        self,
        method: Method,
        transport: Transport | None = None,
        offload: bool = False,
        weight: float = 1,
        clip: float | None = None,
    ) -> None:
        self.method, self.transport = method, transport
        self.offload, self.weight, self.clip = offload, weight, clip
        self.fleet: Fleet | None = None
        self.finished = False

    def on_init_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        refuse_settings(args, self.transport)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        refuse_settings(args, self.transport)
        if self.fleet is not None and self.transport is not None:
            raise ValueError(
                "this callback's transport has served one training: make a new ThinwireCallback for the next"
            )
        model: nn.Module = others["model"]
        if self.transport is not None and self.transport.elastic:  # all must take their last step together
            self.transport.settings["max_steps"] = state.max_steps
        fleet = self.fleet = self._attach(args, model, others["optimizer"])
        self.finished = False
        warn_if_alone(fleet, self.transport)
        refuse_shared_folder(fleet, None if args.save_strategy == "no" else args.output_dir)
        refuse_unequal_plans(fleet, _plan(args, state, others.get("train_dataloader")))
        if state.global_step:
            self._restore(fleet, args, state)
        if fleet.transport.elastic:
            fleet.begin()
            self._follow_the_fleet(state, others["lr_scheduler"])
        self.meter, self.first = Meter(fleet), FirstBatch()
        self.evaluation = Evaluation(model, fleet)
        self.evaluation.watch(control, due=args.eval_on_start)
        self.watching_first = model.register_forward_pre_hook(self._note_first_batch, with_kwargs=True)

    def _attach(self, args: Any, model: nn.Module, optimizer: Any) -> Fleet:
        """The Trainer hides what it has wrapped the model in."""
        copies = dist.group.WORLD if args.world_size > 1 and not args.fsdp else None
        return attach(model, optimizer, self.method, self.transport, self.offload, self.weight, self.clip, copies)

    def _note_first_batch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and not torch.compiler.is_compiling():
            self.first.note([args, kwargs])

    # -- a step ----------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluation.stop()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.fleet is not None
        self.watching_first.remove()
        self.first.compare(self.fleet)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.fleet is not None
        if self.fleet.transport.elastic:
            self._follow_the_fleet(state, others["lr_scheduler"])
            control.should_training_stop |= state.global_step >= state.max_steps
        if state.global_step >= state.max_steps:
            self._finish()
        self.evaluation.watch(control)

    def _follow_the_fleet(self, state: Any, schedule: Any) -> None:
        """Who comes to an elastic fleet, or was away, goes on at its step; the Trainer counts its own."""
        assert self.fleet is not None
        if state.global_step == self.fleet.steps:
            return
        state.global_step = self.fleet.steps
        schedule = getattr(schedule, "scheduler", schedule)  # Accelerate's holds the real one
        if isinstance(schedule, LambdaLR):  # as all of transformers' are, but for those that look at the loss
            schedule.last_epoch = state.global_step
            rules = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            schedule._last_lr = [base * rule(state.global_step) for base, rule in rules]
            for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluation.stop()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluation.watch(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.fleet is not None:  # else the user evaluates before training
            self.evaluation.swap_out()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.evaluation.stop()
        self._finish()
        if self.fleet is not None and self.fleet.transport.elastic:
            self.fleet.transport.leave("finished")  # whoever comes later is told

    def _finish(self) -> None:
        """Once, all workers together: afterwards every model is the common one, and there is nothing left to swap."""
        assert self.fleet is not None
        if not self.finished:
            self.finished = True
            self.evaluation.stop()
            self.evaluation.over = True
            self.fleet.finish()
            self.fleet.detach()

    # -- records ---------------------------------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The Trainer has put the entry into its history already, so the numbers go there too."""
        logs = others["logs"]
        if self.fleet is not None and "loss" in logs:
            numbers = self.meter.read()
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.fleet is not None
        _save_weights(args, _checkpoint(args, state), others["model"])
        if not args.save_only_model:
            kept = {"weights": weights_checksum(self.fleet), "fleet": self.fleet.state_dict()}
            torch.save(kept, os.path.join(_checkpoint(args, state), _file_name(self.fleet, args)))

    def _restore(self, fleet: Fleet, args: Any, state: Any) -> None:
        """The Trainer does not tell where it resumed from: the weights tell whether a file belongs to them."""
        folders = [folder for folder in (_checkpoint(args, state), args.resume_from_checkpoint) if folder]
        for folder in folders:
            path = os.path.join(folder, _file_name(fleet, args))
            kept = torch.load(path, map_location="cpu", weights_only=True) if os.path.isfile(path) else None
            if kept is not None and kept["weights"] == weights_checksum(fleet):
                fleet.load_state_dict(kept["fleet"])
                return
        raise ValueError(
            f"the Trainer resumed at step {state.global_step}, but no state of worker {fleet.worker} that belongs to "
            f"its weights is in {' or '.join(folders)}: resume from a checkpoint in output_dir, or name its folder in "
            "TrainingArguments(resume_from_checkpoint=...)"
        )


def _plan(args: Any, state: Any, loader: Any) -> dict[str, Any]:
    """What makes the workers take steps and evaluate, by the names of the settings."""
    plan = {"max_steps": state.max_steps, "eval_strategy": args.eval_strategy, "eval_on_start": args.eval_on_start}
    if args.eval_strategy == "steps":
        plan |= {"eval_steps": state.eval_steps, "eval_delay": args.eval_delay}
    if args.eval_strategy == "epoch" and has_length(loader):
        plan["steps of an epoch"] = -(-len(loader) // args.gradient_accumulation_steps)
    return plan


def _checkpoint(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def _save_weights(args: Any, folder: str, model: nn.Module) -> None:
    """In a process group, transformers writes weights on the first rank alone, though each worker has its own."""
    alone = args.world_size == 1  # as the Trainer sees it
    if alone and dist.is_initialized() and dist.get_rank() and isinstance(model, PreTrainedModel):
        safetensors.torch.save_model(model, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        model.config.save_pretrained(folder)


def _file_name(fleet: Fleet, args: Any) -> str:
    inner = f"_process{args.process_index}" if args.world_size > 1 else ""
    number = 0 if fleet.transport.elastic else fleet.worker  # there numbers change with those who take part
    return f"thinwire_worker{number}{inner}.pt"


def refuse_settings(args: Any, transport: Transport | None) -> None:
    """Settings with which a fleet would be slow, or wrong, without a word."""
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True would load each worker's own weights, not the consensus that was evaluated: "
            "leave it out, and keep the checkpoints you want with save_total_limit"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True would begin again on one worker alone: set the batch size yourself")
    if shares_the_line(transport, args.world_size):
        refuse_shared_world("the Trainer", crossing_settings(args))


def crossing_settings(args: Any) -> list[str]:
    """What a Trainer in a world of several processes does at every step, and which setting asks for it."""
    wrapped = "fsdp" if args.fsdp else "deepspeed" if args.deepspeed else "DistributedDataParallel"
    found = {
        f"{wrapped} (WORLD_SIZE={args.world_size})": True,
        "average_tokens_across_devices=True": args.average_tokens_across_devices,
        f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r}": args.include_num_input_tokens_seen
        not in ("no", False),
        "accelerator_config dispatch_batches=True": args.accelerator_config.dispatch_batches,
        "parallelism_config": getattr(args, "parallelism_config", None) is not None,  # newer than 4.55
        "logging_steps=1": args.logging_strategy == "steps" and args.logging_steps == 1,
    }
    return [name for name, used in found.items() if used]
