"""Lightning's Trainer and Fabric, two workers: the parameters are those of a plain loop, to the bit."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.integrations.environment import environment
from tests.integrations.hf_worker import connected, method_of, values
from tests.toy import adamw, batch, small_model

pytest.importorskip("lightning")
pytestmark = pytest.mark.xdist_group("integrations")
STEPS, PATIENCE = 12, 120
VALIDATION = 100  # stands for a worker: its batches are those to validate on


def loss_of(model: nn.Module, data: list[Tensor] | tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


def plain(worker: int, port: int, name: str) -> tuple[list[Tensor], list[float]]:
    """The final parameters, and the losses of the consensus after every third step but the last, which finishes."""
    model = small_model()
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, method_of(name), connected(port, worker))
    losses = []
    for step in range(STEPS):
        loss_of(model, batch(step, worker)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == STEPS:
            fleet.finish()
        elif (step + 1) % 3 == 0:
            with torch.no_grad(), fleet.evaluating():
                losses.append(float(loss_of(model, batch(0, VALIDATION))))
    return values(model), losses


def module(worker: int) -> Any:
    """Takes its batches by their number: Lightning begins a plain DataLoader anew when it resumes within an epoch."""
    from lightning.pytorch import LightningModule

    class Toy(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = small_model(), []

        def training_step(self, data: list[Tensor], index: int) -> Tensor:
            return loss_of(self.model, batch(index * self.trainer.world_size + self.global_rank, worker))

        def validation_step(self, data: list[Tensor], index: int) -> None:
            self.losses.append(float(loss_of(self.model, data)))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model.parameters())

    return Toy()


def loader(worker: int, steps: int = STEPS) -> DataLoader:
    return DataLoader([batch(step, worker) for step in range(steps)], batch_size=None)


def trainer_of(worker: int, folder: str, callbacks: list[Any], **changes: Any) -> Any:
    from lightning.pytorch import Trainer

    chosen: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "val_check_interval": 3,
        "num_sanity_val_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "default_root_dir": os.path.join(folder, str(worker)),
    }
    return Trainer(callbacks=callbacks, **{**chosen, **changes})


def with_trainer(worker: int, port: int | None, name: str, folder: str, resume: str = "") -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireCallback

    here = os.path.join(folder, str(worker))
    transport = None if port is None else connected(port, worker)
    callback = ThinwireCallback(method_of(name), transport)
    keep = ModelCheckpoint(here, "{step}", every_n_train_steps=4, save_top_k=-1, save_last=True)
    toy = module(worker)
    trainer = trainer_of(worker, folder, [keep, callback])
    ckpt = os.path.join(here, resume) if resume else None
    trainer.fit(toy, loader(worker), loader(VALIDATION, 1), ckpt_path=ckpt, weights_only=True)
    last = torch.load(os.path.join(here, "last.ckpt"), weights_only=True)["state_dict"]
    return {
        "values": values(toy.model),
        "last": list(last.values()),
        "losses": toy.losses[1:],  # without Lightning's check before training
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "bytes": callback.fleet.bytes_sent,
        "events": callback.fleet.events.counts,
    }


@pytest.fixture(scope="module", params=["desloc", "eager"])
def runs(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, name = str(tmp_path_factory.mktemp("lightning")), request.param
    alone = {"timeout": PATIENCE, "join": False}
    return {
        "plain": cluster.run(plain, 2, free_port(), name, **alone),
        "trainer": cluster.run(with_trainer, 2, free_port(), name, folder, **alone),
        "resumed": cluster.run(with_trainer, 2, free_port(), name, folder, "step=4.ckpt", **alone),
    }


@pytest.mark.parametrize("which", ["trainer", "resumed"])
def test_parameters_are_those_of_the_plain_loop(runs: dict[str, Any], which: str) -> None:
    for (expected, _), ours in zip(runs["plain"], runs[which], strict=True):
        torch.testing.assert_close(ours["values"], expected, rtol=0, atol=0)
        assert ours["events"] == {}


def test_validation_sees_the_consensus_and_at_last_the_common_model(runs: dict[str, Any]) -> None:
    for (parameters, losses), ours in zip(runs["plain"], runs["trainer"], strict=True):
        model = small_model()
        with torch.no_grad():
            for mine, final in zip(model.parameters(), parameters, strict=True):
                mine.copy_(final)
            assert ours["losses"] == [*losses, float(loss_of(model, batch(0, VALIDATION)))]


def test_the_last_checkpoint_is_the_common_model_and_the_log_has_the_numbers(runs: dict[str, Any]) -> None:
    one, other = runs["trainer"]
    torch.testing.assert_close(one["last"], one["values"], rtol=0, atol=0)
    torch.testing.assert_close(other["last"], one["values"], rtol=0, atol=0)
    assert one["logged"]["bytes_sent"] == one["bytes"] > 0
    assert 0 <= one["logged"]["waiting_share"] <= 1


def test_a_process_group_set_up_by_hand_serves_too(cluster: Cluster, tmp_path: Any) -> None:
    apart = cluster.run(with_trainer, 2, free_port(), "desloc", str(tmp_path / "a"), timeout=PATIENCE, join=False)
    by_hand = cluster.run(with_trainer, 2, None, "desloc", str(tmp_path / "b"), timeout=PATIENCE)
    for one, other in zip(apart, by_hand, strict=True):
        torch.testing.assert_close(one["values"], other["values"], rtol=0, atol=0)


def under_torchrun(rank: int, port: int) -> Any:
    """The environment of one process of a torchrun of two."""
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return environment(**world, TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def fitted(worker: int, port: int, folder: str, **changes: Any) -> tuple[list[Tensor], str]:
    from thinwire.integrations.lightning import ThinwireCallback

    callback, toy = ThinwireCallback(tw.diloco(3), connected(port, worker)), module(worker)
    quiet = {"val_check_interval": None, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer_of(worker, folder, [callback], **quiet, **changes).fit(toy, loader(worker))
    assert callback.fleet.steps == STEPS // 2
    return values(toy.model), callback.fleet.island.kind


def alone(worker: int, port: int, folder: str) -> tuple[list[Tensor], str]:
    return fitted(worker, port, folder, accumulate_grad_batches=2)


def ddp_inside(rank: int, port: int, folder: str) -> tuple[list[Tensor], str]:
    """Processes 0 and 1 are one worker's torchrun, 2 and 3 the other's."""
    worker, inner = divmod(rank, 2)
    with under_torchrun(inner, port + 1 + worker):
        return fitted(worker, port, folder, strategy="ddp", devices=2)


def test_ddp_inside_a_worker_stays_inside(cluster: Cluster, tmp_path: Any) -> None:
    """DDP adds two gradients up in another way than accumulation does: equal to rounding."""
    by_one = cluster.run(alone, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False)
    by_two = cluster.run(ddp_inside, 4, free_port(), str(tmp_path), timeout=PATIENCE, join=False)
    for rank, (found, kind) in enumerate(by_two):
        assert kind == "copies"  # so that each rank carries its share of a message
        torch.testing.assert_close(found, by_one[rank // 2][0], rtol=1e-3, atol=1e-5)


def in_one_world(rank: int, port: int, folder: str) -> str:
    """As one torchrun of two processes would start it."""
    from thinwire.integrations.lightning import ThinwireCallback

    with under_torchrun(rank, port), pytest.raises(ValueError) as caught:
        trainer = trainer_of(rank, folder, [ThinwireCallback(tw.local_sgd(2))], strategy="ddp", devices=2)
        trainer.fit(module(rank), loader(rank), loader(VALIDATION, 1))
    return str(caught.value)


def test_ddp_between_the_workers_is_refused_by_name(cluster: Cluster, tmp_path: Any) -> None:
    for text in cluster.run(in_one_world, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False):
        assert "DDPStrategy (world size 2)" in text and "tw.Group.connect" in text and "\n" not in text


def warned(worker: int, port: int, folder: str) -> list[str]:
    from thinwire.integrations.lightning import ThinwireCallback

    callback = ThinwireCallback(tw.local_sgd(2), connected(port, worker))
    trainer = trainer_of(worker, folder, [callback], max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module(worker), loader(7), loader(VALIDATION, 1))
    return [str(warning.message) for warning in caught if "same batch" in str(warning.message)]


def test_equal_first_batches_are_warned_of(cluster: Cluster, tmp_path: Any) -> None:
    for texts in cluster.run(warned, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False):
        assert len(texts) == 1 and "workers 0, 1" in texts[0]


def refused(worker: int, port: int, folder: str, changes: list[dict[str, Any]], averaging: bool = False) -> str:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    from thinwire.integrations.lightning import ThinwireCallback

    callback = ThinwireCallback(tw.local_sgd(2), connected(port, worker))
    more = [StochasticWeightAveraging(swa_lrs=0.1)] if averaging else []
    trainer = trainer_of(worker, folder, [callback, *more], **changes[worker])
    with pytest.raises(ValueError) as caught:
        trainer.fit(module(worker), loader(worker), loader(VALIDATION, 1))
    assert callback.fleet is not None and callback.fleet.steps == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"max_steps": 4}, {"max_steps": 6}, "optimizer steps: worker 0 has 4, worker 1 has 6"),
        ({"limit_val_batches": 0}, {}, "validation: worker 0 has False, worker 1 has True"),
        ({"val_check_interval": 4}, {}, "val_check_interval in batches: worker 0 has 4, worker 1 has 3"),
        ({"max_time": "00:00:01:00"}, {"max_time": "00:00:01:00"}, "max_time goes by each worker's own clock"),
    ],
)
def test_workers_that_would_part_later_are_told_at_the_start(
    cluster: Cluster, tmp_path: Any, one: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    for text in cluster.run(refused, 2, free_port(), str(tmp_path), [one, other], timeout=PATIENCE, join=False):
        assert text.startswith(said) and "\n" not in text


def test_averages_of_each_workers_own_weights_are_refused(cluster: Cluster, tmp_path: Any) -> None:
    for text in cluster.run(refused, 2, free_port(), str(tmp_path), [{}, {}], True, timeout=PATIENCE, join=False):
        assert text.startswith("StochasticWeightAveraging would put") and "\n" not in text


def test_several_optimizers_stepped_by_hand(tmp_path: Any) -> None:
    """Lightning counts the steps of each optimizer, the fleet those of all together: the end is not mistaken."""
    from lightning.pytorch import LightningModule

    from thinwire.integrations.lightning import ThinwireCallback

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), adamw(model[2:].parameters())]

    class ByHand(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = small_model()

        def training_step(self, data: list[Tensor], index: int) -> None:
            self.manual_backward(loss_of(self.model, data))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return optimizers(self.model)

    callback, toy, model = ThinwireCallback(tw.diloco(4), tw.Local()), ByHand(), small_model()
    trainer_of(0, str(tmp_path), [callback], val_check_interval=None).fit(toy, loader(0))
    fleet = tw.attach(model, optimizers(model), tw.diloco(4), tw.Local())
    for step in range(STEPS):
        loss_of(model, batch(step, 0)).backward()
        fleet.step()
        fleet.zero_grad()
    fleet.finish()
    assert callback.fleet is not None and callback.fleet.steps == STEPS
    torch.testing.assert_close(values(toy.model), values(model), rtol=0, atol=0)


def with_fabric(worker: int, port: int, name: str, folder: str) -> list[Tensor]:
    """A loop of one's own: saved after the seventh step, and taken up again by new objects."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    path = os.path.join(folder, f"{worker}.ckpt")

    def build(port: int) -> tuple[Any, Any, tw.Fleet]:
        model = small_model()
        model, optimizer = fabric.setup(model, adamw(model.parameters()))
        return model, optimizer, tw.attach(model.module, optimizer.optimizer, method_of(name), connected(port, worker))

    def go_on(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            fabric.backward(loss_of(model, batch(step, worker)))
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, fleet = build(port)
    go_on(model, optimizer, 0, 7)
    fabric.save(path, {"model": model, "optimizer": optimizer, "fleet": fleet.state_dict()})
    model, optimizer, fleet = build(port + 1)
    rest = fabric.load(path, {"model": model, "optimizer": optimizer}, weights_only=True)
    fleet.load_state_dict(rest["fleet"])
    go_on(model, optimizer, 7, STEPS)
    fleet.finish()
    return values(model.module)


@pytest.mark.parametrize("name", ["desloc", "eager"])
def test_fabric_is_a_plain_loop_resume_included(cluster: Cluster, tmp_path: Any, name: str) -> None:
    expected = cluster.run(plain, 2, free_port(), name, timeout=PATIENCE, join=False)
    ours = cluster.run(with_fabric, 2, free_port(), name, str(tmp_path), timeout=PATIENCE, join=False)
    for (parameters, _), found in zip(expected, ours, strict=True):
        torch.testing.assert_close(found, parameters, rtol=0, atol=0)


def test_elastic_workers_are_refused_as_lightning_counts_its_own_steps() -> None:
    from thinwire.integrations.lightning import ThinwireCallback

    class Changing(tw.Local):
        elastic = True

    with pytest.raises(ValueError, match="counts its own steps"):
        ThinwireCallback(tw.diloco(4), Changing()).setup(SimpleNamespace(world_size=1), None, "fit")
