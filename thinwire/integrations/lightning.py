"""thinwire in Lightning's `Trainer`."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

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
)

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "thinwire.integrations.lightning needs lightning: pip install 'thinwire[lightning]'", name=error.name
    ) from None

AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}  # by name: the second is newer than 2.4


class ThinwireCallback(Callback):
    """Trains a `LightningModule` as one worker of a fleet; nothing else of the script changes.

    Each worker runs its own `Trainer` with its own data and folder, and the callbacks join them:
    `transport=tw.Group.connect(HOST:PORT, worker=i, workers=n)`. A process group set up by hand serves as well.

    It attaches once the Trainer has its optimizers; keeps the fleet's state, this worker's part only, in Lightning's
    checkpoints; logs `bytes_sent` and `waiting_share`; validates the consensus of the workers; and finishes after the
    last step, so that the last validation and the last checkpoint are those of the common model.

    The arguments are those of `tw.attach`; `fleet` is there once training has begun. With Fabric, whose loop is your
    own, use `tw.attach(model.module, optimizer.optimizer, ...)` on what `fabric.setup` returns.

    >>> import thinwire as tw
    >>> callback = ThinwireCallback(tw.desloc(every=256))
    >>> callback.method.name, callback.state_dict()
    ('desloc', {})
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
        self.loaded: dict[str, Any] = {}
        self.finished = False
        self.swapped = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.transport is not None and self.transport.elastic:
            raise ValueError(
                "Lightning's Trainer counts its own steps, and a worker that joins goes on at the fleet's: "
                "for tw.Elastic use a loop of your own, or Fabric's"
            )
        if stage == "fit" and shares_the_line(self.transport, trainer.world_size):
            refuse_shared_world("Lightning", crossing_settings(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers' state has been restored by now."""
        if self.fleet is not None and self.transport is not None:
            raise ValueError(
                "this callback's transport has served one training: make a new ThinwireCallback for the next"
            )
        fleet = attach(
            trainer.model, trainer.optimizers, self.method, self.transport, self.offload, self.weight, self.clip
        )  # fmt: skip
        self.fleet, self.finished = fleet, False
        warn_if_alone(fleet, self.transport)
        refuse_shared_folder(fleet, getattr(trainer.checkpoint_callback, "dirpath", None))
        if fleet.workers > 1:
            refuse_settings(trainer)
        refuse_unequal_plans(fleet, _plan(trainer))
        if self.loaded:
            fleet.load_state_dict(self.loaded)
        elif trainer.global_step:
            raise ValueError(
                f"Lightning resumed at step {trainer.global_step} from a checkpoint without a fleet's state: "
                "load its weights into the model instead, and begin without ckpt_path"
            )
        self.meter, self.first = Meter(fleet), FirstBatch()

    # -- a step ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.first.note(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.fleet is not None
        self.first.compare(self.fleet)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Before the checkpoint callbacks, which Lightning puts last."""
        pl_module.log_dict(self.meter.read())
        if is_last_step(trainer):
            self._finish()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish()

    def _finish(self) -> None:
        """Once, all workers together: afterwards every model is the common one, and there is nothing left to swap."""
        assert self.fleet is not None
        if not self.finished:
            self.finished = True
            self.fleet.finish()
            self.fleet.detach()

    # -- evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.fleet is not None and not self.finished:  # None: Lightning's check before training
            self.swapped.enter_context(self.fleet.evaluating())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.swapped.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.swapped.close()  # a checkpoint made now holds the live weights

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self.fleet.state_dict() if self.fleet is not None else self.loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def is_last_step(trainer: Any) -> bool:
    steps_are_up = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    return steps_are_up or (last_epoch and trainer.is_last_batch)


def refuse_settings(trainer: Any) -> None:
    """Settings with which workers would part, or end with different models, without a word."""
    clocks = {
        "max_time": any(isinstance(c, Timer) and c._duration is not None for c in trainer.callbacks),
        f"val_check_interval={trainer.val_check_interval!r}": getattr(trainer, "_val_check_time_interval", None),
    }
    for name, used in clocks.items():
        if used:
            raise ValueError(f"{name} goes by each worker's own clock: give a number of steps or batches instead")
    for callback in trainer.callbacks:
        if AVERAGING & {kind.__name__ for kind in type(callback).__mro__}:
            raise ValueError(
                f"{type(callback).__name__} would put the average of each worker's own weights in the place of the "
                "common model: leave it out, and average the checkpoints you want afterwards"
            )


def _plan(trainer: Any) -> dict[str, Any]:
    """What makes the workers take steps and validate, by the names of the settings."""
    plan: dict[str, Any] = {"validation": trainer.enable_validation}
    with suppress(MisconfigurationException):  # a schedule of accumulation: then nobody knows
        plan["optimizer steps"] = trainer.estimated_stepping_batches
    if trainer.enable_validation:
        every = {
            "val_check_interval in batches": trainer.val_check_batch,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        }
        plan |= every | {"accumulate_grad_batches": trainer.accumulate_grad_batches}
    return plan


def crossing_settings(trainer: Any) -> list[str]:
    """What a Trainer of several processes does at every step, and which setting asks for it."""
    found = {
        f"strategy {type(trainer.strategy).__name__} (world size {trainer.world_size})": True,
        "sync_batchnorm=True": getattr(trainer.strategy, "_layer_sync", None) is not None,
        "the check for SIGTERM at every batch": True,
    }
    return [name for name, used in found.items() if used]
