"""`transformers.Trainer`, two workers: the parameters are those of a plain loop, to the bit."""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.integrations import hf_worker
from tests.integrations.environment import environment
from tests.integrations.hf_worker import EVERY_EVAL, STEPS, connected, method_of, plain, tiny_llama, with_trainer

pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("integrations")
PATIENCE = 120


@pytest.fixture(scope="module", params=["desloc", "eager"])
def runs(request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training by a plain loop, by the Trainer, and by a Trainer that resumes in the middle."""
    folder = str(tmp_path_factory.mktemp("trainer"))
    name = request.param
    return {
        "name": name,
        "plain": cluster.run(plain, 2, free_port(), name, timeout=PATIENCE, join=False),
        "trainer": cluster.run(with_trainer, 2, free_port(), name, folder, timeout=PATIENCE, join=False),
        "resumed": cluster.run(with_trainer, 2, free_port(), name, folder, 5, timeout=PATIENCE, join=False),
    }


@pytest.mark.parametrize("which", ["trainer", "resumed"])
def test_parameters_are_those_of_the_plain_loop(runs: dict[str, Any], which: str) -> None:
    for (expected, _), ours in zip(runs["plain"], runs[which], strict=True):
        torch.testing.assert_close(ours["values"], expected, rtol=0, atol=0)
        assert ours["events"] == {}


def test_the_last_checkpoint_is_the_common_model(runs: dict[str, Any]) -> None:
    one, other = runs["trainer"]
    torch.testing.assert_close(one["saved"], one["values"], rtol=0, atol=0)
    torch.testing.assert_close(other["saved"], one["values"], rtol=0, atol=0)


def test_every_set_is_evaluated_on_the_consensus(runs: dict[str, Any]) -> None:
    for (_, losses), ours in zip(runs["plain"], runs["trainer"], strict=True):
        for step in range(EVERY_EVAL, STEPS, EVERY_EVAL):
            entries = [entry for entry in ours["history"] if entry["step"] == step]
            found = [entry[f"eval_{s}_loss"] for s in ("one", "two") for entry in entries if f"eval_{s}_loss" in entry]
            assert found == pytest.approx(losses[step], rel=1e-5)


def test_the_log_shows_bytes_and_waiting(runs: dict[str, Any]) -> None:
    model = tiny_llama()
    price = tw.cost(method_of(runs["name"]), model, workers=2, optimizer=torch.optim.AdamW(model.parameters()))
    for ours in runs["trainer"]:
        entries = [entry for entry in ours["history"] if "loss" in entry]
        assert [entry["step"] for entry in entries] == list(range(2, STEPS + 1, 2))
        assert [entry["bytes_sent"] for entry in entries] == [price.bytes(entry["step"]) for entry in entries]
        assert all(0 <= entry["waiting_share"] <= 1 for entry in entries)


def test_a_process_group_set_up_by_hand_serves_too(cluster: Cluster, tmp_path: Any) -> None:
    apart = cluster.run(with_trainer, 2, free_port(), "local_sgd", str(tmp_path / "a"), timeout=PATIENCE, join=False)
    by_hand = cluster.run(with_trainer, 2, None, "local_sgd", str(tmp_path / "b"), timeout=PATIENCE)
    resumed = cluster.run(with_trainer, 2, None, "local_sgd", str(tmp_path / "b"), 5, timeout=PATIENCE)
    for one, other, third in zip(apart, by_hand, resumed, strict=True):
        torch.testing.assert_close(one["values"], other["values"], rtol=0, atol=0)
        torch.testing.assert_close(one["values"], third["values"], rtol=0, atol=0)


def trained(worker: int, port: int, folder: str, changes: dict[str, Any]) -> tuple[list[torch.Tensor], str]:
    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.diloco(4), connected(port, worker))
    chosen = {"eval_strategy": "no", "save_strategy": "no", "gradient_accumulation_steps": 1, **changes}
    trainer = hf_worker.trainer_of(worker, folder, callback, **chosen)
    trainer.train()
    return hf_worker.values(trainer.model), callback.fleet.island.kind


COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.parametrize("changes", [COMPILED, {"gradient_checkpointing": True}], ids=["compiled", "checkpointed"])
def test_a_trainers_other_settings_change_nothing(cluster: Cluster, tmp_path: Any, changes: dict[str, Any]) -> None:
    """But for rounding: a compiled graph may add in another order."""
    plainly = cluster.run(trained, 2, free_port(), str(tmp_path), {}, timeout=PATIENCE, join=False)
    ours = cluster.run(trained, 2, free_port(), str(tmp_path), changes, timeout=PATIENCE, join=False)
    torch.testing.assert_close([v for v, _ in ours], [v for v, _ in plainly], rtol=1e-3, atol=1e-5)


# -- several processes inside a worker -------------------------------------------------------------------------------


def ddp_inside(rank: int, port: int, folder: str) -> tuple[list[torch.Tensor], str]:
    """Processes 0 and 1 are one worker's torchrun, 2 and 3 the other's."""
    worker, inner = divmod(rank, 2)
    world = {"RANK": str(inner), "LOCAL_RANK": str(inner), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with environment(**world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + 1 + worker)):
        return trained(worker, port, folder, {"per_device_train_batch_size": 4})


def test_ddp_inside_a_worker_stays_inside(cluster: Cluster, tmp_path: Any) -> None:
    """DDP adds two halves of a batch up in another order than one process does: equal to rounding."""
    whole_batch = {"per_device_train_batch_size": 8}
    alone = cluster.run(trained, 2, free_port(), str(tmp_path), whole_batch, timeout=PATIENCE, join=False)
    inside = cluster.run(ddp_inside, 4, free_port(), str(tmp_path), timeout=PATIENCE, join=False)
    for rank, (found, kind) in enumerate(inside):
        assert kind == "copies"  # so that each rank carries its share of a message
        torch.testing.assert_close(found, alone[rank // 2][0], rtol=1e-3, atol=1e-5)


# -- what is refused, and what is warned of --------------------------------------------------------------------------


def in_one_world(rank: int, port: int, folder: str) -> str:
    """As one torchrun of two processes would start it."""
    from thinwire.integrations.hf import ThinwireCallback

    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with environment(**world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        changes = {"include_num_input_tokens_seen": True, "logging_steps": 1}
        with pytest.raises(ValueError) as caught:
            hf_worker.trainer_of(rank, folder, ThinwireCallback(tw.local_sgd(2)), **changes)
    return str(caught.value)


def test_one_shared_world_is_refused_by_the_names_of_the_settings(cluster: Cluster, tmp_path: Any) -> None:
    for text in cluster.run(in_one_world, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False):
        for setting in (
            "DistributedDataParallel (WORLD_SIZE=2)",
            "average_tokens_across_devices=True",
            "include_num_input_tokens_seen='all'",
            "logging_steps=1",
            "tw.Group.connect",
        ):
            assert setting in text
        assert "\n" not in text


@pytest.mark.parametrize("setting", ["load_best_model_at_end", "auto_find_batch_size"])
def test_settings_that_would_undo_the_fleet_are_refused(setting: str, tmp_path: Any) -> None:
    from thinwire.integrations.hf import ThinwireCallback

    with pytest.raises(ValueError, match=setting):
        hf_worker.trainer_of(0, str(tmp_path), ThinwireCallback(tw.local_sgd(2)), **{setting: True})


def warned(worker: int, port: int, folder: str, seeds: list[int]) -> list[str]:
    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.local_sgd(2), connected(port, worker))
    trainer = hf_worker.trainer_of(worker, folder, callback, seed=seeds[worker], max_steps=2, save_strategy="no")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(warning.message) for warning in caught if "same batch" in str(warning.message)]


@pytest.mark.parametrize(("seeds", "count"), [([7, 7], 1), ([7, 8], 0)])
def test_equal_first_batches_are_warned_of(cluster: Cluster, tmp_path: Any, seeds: list[int], count: int) -> None:
    found = cluster.run(warned, 2, free_port(), str(tmp_path), seeds, timeout=PATIENCE, join=False)
    assert [len(texts) for texts in found] == [count, count]
    assert all("workers 0, 1" in text for texts in found for text in texts)


def test_a_worker_that_is_alone_is_told_so(tmp_path: Any) -> None:
    from thinwire.integrations.hf import ThinwireCallback

    trainer = hf_worker.trainer_of(0, str(tmp_path), ThinwireCallback(tw.local_sgd(2)), max_steps=1, save_strategy="no")
    with pytest.warns(UserWarning, match="trains alone"):
        trainer.train()


def test_a_transport_serves_one_training(tmp_path: Any) -> None:
    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.local_sgd(2), tw.Local())
    trainer = hf_worker.trainer_of(0, str(tmp_path), callback, max_steps=1, save_strategy="no")
    trainer.train()
    with pytest.raises(ValueError, match="make a new ThinwireCallback"):
        trainer.train()


def in_one_folder(worker: int, port: int, folder: str) -> str:
    from thinwire.integrations.hf import ThinwireCallback

    trainer = hf_worker.trainer_of(0, folder, ThinwireCallback(tw.local_sgd(2), connected(port, worker)), seed=worker)
    with pytest.raises(ValueError, match="a folder of its own") as caught:
        trainer.train()
    return str(caught.value)


def test_two_workers_do_not_write_to_one_folder(cluster: Cluster, tmp_path: Any) -> None:
    assert all(cluster.run(in_one_folder, 2, free_port(), str(tmp_path), timeout=PATIENCE, join=False))


def unequal(worker: int, port: int, folder: str, changes: list[dict[str, Any]]) -> str:
    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.local_sgd(2), connected(port, worker))
    trainer = hf_worker.trainer_of(worker, folder, callback, save_strategy="no", **changes[worker])
    with pytest.raises(ValueError) as caught:
        trainer.train()
    assert callback.fleet is not None and callback.fleet.steps == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"max_steps": 4}, {"max_steps": 6}, "max_steps: worker 0 has 4, worker 1 has 6"),
        ({"eval_steps": 2}, {"eval_steps": 3}, "eval_steps: worker 0 has 2, worker 1 has 3"),
        (
            {"eval_strategy": "epoch"},
            {"eval_strategy": "epoch", "per_device_train_batch_size": 2},
            "steps of an epoch: worker 0 has 12, worker 1 has 24",
        ),
    ],
)
def test_workers_that_would_part_later_are_told_at_the_start(
    cluster: Cluster, tmp_path: Any, one: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    for text in cluster.run(unequal, 2, free_port(), str(tmp_path), [one, other], timeout=PATIENCE, join=False):
        assert text.startswith(said) and "\n" not in text


def test_resuming_without_the_fleets_state_is_refused(tmp_path: Any) -> None:
    from thinwire.integrations.hf import ThinwireCallback

    folder = tmp_path / "0"
    hf_worker.trainer_of(0, str(tmp_path), ThinwireCallback(tw.local_sgd(2), tw.Local()), max_steps=5).train()
    state = folder / "checkpoint-5" / "thinwire_worker0.pt"
    kept = torch.load(state, weights_only=True)
    torch.save({**kept, "weights": kept["weights"] + 1}, state)  # another run's
    trainer = hf_worker.trainer_of(0, str(tmp_path), ThinwireCallback(tw.local_sgd(2), tw.Local()))
    with pytest.raises(ValueError, match="resumed at step 5"):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))


def test_a_checkpoint_that_was_moved_is_found_by_its_name(tmp_path: Any) -> None:
    from thinwire.integrations.hf import ThinwireCallback

    callback = ThinwireCallback(tw.diloco(4), tw.Local())
    hf_worker.trainer_of(0, str(tmp_path / "old"), callback, max_steps=5).train()
    moved = str(shutil.move(tmp_path / "old" / "0" / "checkpoint-5", tmp_path / "moved"))
    callback = ThinwireCallback(tw.diloco(4), tw.Local())
    trainer = hf_worker.trainer_of(0, str(tmp_path / "new"), callback, max_steps=8, resume_from_checkpoint=moved)
    trainer.train(resume_from_checkpoint=moved)
    assert callback.fleet.steps == 8


def test_where_workers_change_their_numbers_a_file_keeps_its_name() -> None:
    from thinwire.integrations.hf import _file_name

    class Changing(tw.Local):
        elastic = True

    model, transport = torch.nn.Linear(2, 1), Changing()
    fleet = tw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), tw.diloco(4), transport)
    transport.worker = 1
    saved = _file_name(fleet, SimpleNamespace(world_size=1))
    transport.worker = 0  # after everybody has started again
    assert _file_name(fleet, SimpleNamespace(world_size=1)) == saved


def test_a_worker_that_joins_an_elastic_fleet_goes_on_at_its_step(cluster: Cluster, tmp_path: Any) -> None:
    pytest.importorskip("torchft")
    from thinwire.elastic.coordinator import Coordinator

    coordinator = Coordinator(port=free_port(), heartbeat_timeout=3.0)
    try:
        first, newcomer = cluster.run(
            hf_worker.elastic, 2, coordinator.address, str(tmp_path), timeout=PATIENCE, join=False
        )
    finally:
        coordinator.close()
    assert (first["step"], newcomer["step"]) == (first["fleet"], newcomer["fleet"]) == (60, 60)
    assert first["own"] == 60 and newcomer["own"] < 52
    for mine, theirs in zip(first["values"], newcomer["values"], strict=True):
        assert torch.equal(mine, theirs)
    assert newcomer["rates"] == pytest.approx({step: first["rates"][step] for step in newcomer["rates"]})


@pytest.mark.parametrize(("module", "library"), [("hf", "transformers"), ("lightning", "lightning.pytorch")])
def test_a_missing_library_is_one_line_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str
) -> None:
    monkeypatch.delitem(sys.modules, f"thinwire.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'thinwire\[{module}\]'") as caught:
        importlib.import_module(f"thinwire.integrations.{module}")
    assert "\n" not in str(caught.value)
