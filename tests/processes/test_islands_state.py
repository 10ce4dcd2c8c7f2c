"""What a led island hands out, saves, survives and refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.cluster import Cluster
from tests.toy import adamw, backward, fleet_of, parameters, sgd, small_model, train

pytestmark = pytest.mark.xdist_group("processes")

METHODS = {
    "shards": lambda: tw.diloco(3),
    "led": lambda: tw.eager_diloco(3, codec=tw.E3M0()),
    "led mean": lambda: tw.streaming_diloco(3, [["0.*"], ["2.*", "4.*"]], codec=tw.Int8()),
    "led sparse": lambda: tw.sparseloco(3, 16, 4),
}


def grid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))


def build(mesh: Any, method: tw.Method, optimizer_of: Any = adamw) -> tuple[Any, Any, tw.Fleet]:
    model = small_model()
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=mesh["shards"])
    optimizer = optimizer_of(model.parameters())
    return model, optimizer, tw.attach(model, optimizer, method, tw.Group(mesh["workers"]))


def go_on(model: Any, optimizer: Any, first: int, last: int, worker: int) -> None:
    for step in range(first, last):
        backward(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: Any) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def agreed(rank: int, name: str) -> dict[str, Any]:
    model, optimizer, fleet = build(grid(), METHODS[name]())
    go_on(model, optimizer, 0, 5, rank // 2)
    before = values_of(model)
    consensus = fleet.consensus()
    assert list(consensus) == list(dict(model.named_parameters()))
    assert all(isinstance(value, DTensor) for value in consensus.values())
    full = {key: value.full_tensor() for key, value in consensus.items()}
    with fleet.evaluating():
        inside = values_of(model)
    after = values_of(model)
    model.load_state_dict(consensus)
    return {"full": full, "before": before, "inside": inside, "after": after, "loaded": values_of(model)}


@pytest.mark.parametrize("name", METHODS)
def test_the_consensus_of_an_island_loads_back(cluster: Cluster, name: str) -> None:
    answers = cluster.run(agreed, 4, name)
    for seen in answers:
        torch.testing.assert_close(seen["full"], answers[0]["full"], rtol=0, atol=0)
        torch.testing.assert_close(seen["loaded"], list(seen["full"].values()), rtol=0, atol=0)
        torch.testing.assert_close(seen["inside"], list(seen["full"].values()), rtol=0, atol=0)
        torch.testing.assert_close(seen["after"], seen["before"], rtol=0, atol=0)


def checkpointed(rank: int, folder: str, name: str) -> tuple[Any, ...]:
    mesh, worker = grid(), rank // 2

    def saved(model: Any, optimizer: Any, fleet: tw.Fleet) -> dict[str, Any]:
        inner, state = get_state_dict(model, optimizer)
        return {f"worker{worker}": {"model": inner, "optimizer": state}, "fleet": fleet.state_dict()}

    model, optimizer, fleet = build(mesh, METHODS[name]())
    go_on(model, optimizer, 0, 7, worker)
    dcp.save(saved(model, optimizer, fleet), checkpoint_id=folder)
    go_on(model, optimizer, 7, 12, worker)
    again, other, restored = build(mesh, METHODS[name]())
    go_on(again, other, 100, 101, worker)  # so that there is state to be replaced
    template = saved(again, other, restored)
    dcp.load(template, checkpoint_id=folder)
    own = template[f"worker{worker}"]
    set_state_dict(again, other, model_state_dict=own["model"], optim_state_dict=own["optimizer"])
    restored.load_state_dict(template["fleet"])
    assert (restored.steps, restored.worker, restored.workers) == (7, worker, 2)
    go_on(again, other, 7, 12, worker)
    assert restored.bytes_sent == fleet.bytes_sent
    return values_of(model), values_of(again)


@pytest.mark.parametrize("name", METHODS)
def test_a_distributed_checkpoint_of_islands_resumes_to_the_bit(cluster: Cluster, tmp_path: Any, name: str) -> None:
    for straight, resumed in cluster.run(checkpointed, 4, os.path.join(str(tmp_path), "checkpoint"), name):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def sick_shard(rank: int) -> tuple[Any, ...]:
    model, optimizer, fleet = build(grid(), tw.diloco(2, codec=tw.Int8()))
    for step in range(6):
        go_on(model, optimizer, step, step + 1, rank // 2)
        if step == 0 and rank == 3:  # one shard of worker 1, on the rank that follows
            optimizer.state[model[4].weight]["exp_avg"]._local_tensor.fill_(float("inf"))
    steps = [int(optimizer.state[model[i].weight]["step"]) for i in (2, 4)]
    return values_of(model), [event.workers for event in fleet.events if event.kind == "sick"], steps


def test_a_moment_that_bursts_on_a_rank_that_follows_leaves_its_worker_out(cluster: Cluster) -> None:
    answers = cluster.run(sick_shard, 4)
    assert [sick for _, sick, _ in answers] == [[], [], [(1,)], [(1,)]]
    assert [steps for _, _, steps in answers] == [[6, 6], [6, 6], [6, 4], [6, 4]]  # started anew, on every rank
    for values, _, _ in answers:
        torch.testing.assert_close(values, answers[0][0], rtol=0, atol=0)
        assert all(bool(value.isfinite().all()) for value in values)


def losing(rank: int) -> tuple[Any, ...]:
    """One worker of two processes that loses every other round of its gradients."""
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = sgd(model.parameters())
    fleet = tw.attach(model, optimizer, tw.demo(4, 4), tw.Local(lose=lambda row, number: number % 2 == 0))
    go_on(model, optimizer, 0, 5, 0)
    return values_of(model), fleet.events.counts, fleet.island.led


def test_a_lost_round_of_gradients_skips_the_step_on_every_rank(cluster: Cluster) -> None:
    plain = fleet_of(tw.demo(4, 4), 1, sgd, lose=lambda row, number: number % 2 == 0)
    train(plain, 5)
    for values, counts, led in cluster.run(losing, 2):
        assert led and counts == plain.events.counts
        torch.testing.assert_close(values, parameters(plain)[0], rtol=0, atol=0)


def unequal_start(rank: int) -> tuple[Any, ...]:
    model, optimizer, fleet = build(grid(), tw.sparseloco(2, 16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank // 2)
    start = values_of(model)
    fleet.begin()
    return start, values_of(model), fleet.events.counts


def test_islands_that_start_differently_take_the_first_ones_values(cluster: Cluster) -> None:
    answers = cluster.run(unequal_start, 4)
    for _, values, counts in answers:
        torch.testing.assert_close(values, answers[0][0], rtol=0, atol=0)
        assert counts == {"start": 1}


def disagreeing(rank: int) -> str:
    model, optimizer, _ = build(grid(), tw.sparseloco(2, 16, 4) if rank < 2 else tw.diloco(2))
    with pytest.raises(ValueError, match="workers disagree") as raised:
        go_on(model, optimizer, 0, 1, rank // 2)
    return str(raised.value)


def test_every_rank_hears_that_the_workers_disagree(cluster: Cluster) -> None:
    assert len(set(cluster.run(disagreeing, 4))) == 1


def leaving(rank: int) -> str:
    """Worker 1 finishes early: the lead of worker 0 finds out, and its other rank is told."""
    model, optimizer, fleet = build(grid(), tw.diloco(2, codec=tw.Int8()))
    go_on(model, optimizer, 0, 4 if rank < 2 else 3, rank // 2)
    with pytest.raises(tw.PeerLost) as raised:
        go_on(model, optimizer, 4, 6, 0) if rank < 2 else fleet.finish()
    return str(raised.value)


def test_every_rank_of_an_island_raises_the_loss_of_a_peer() -> None:
    cluster = Cluster(4)  # its own: what was under way keeps gloo's threads waiting until the processes end
    try:
        answers = cluster.run(leaving, 4, timeout=60)
    finally:
        cluster.close()
    assert answers[0] == answers[1] and answers[2] == answers[3] and "finish" in answers[0]


def overlapping(rank: int) -> None:
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    fleet = tw.attach(model, sgd(model.parameters()), tw.diloco(2), tw.Group())
    with pytest.raises(ValueError, match="which are one worker"):
        fleet.begin()


def test_a_group_that_joins_the_ranks_of_one_worker_is_refused(cluster: Cluster) -> None:
    cluster.run(overlapping, 2)


def switching(rank: int) -> tuple[Any, ...]:
    model, optimizer, fleet = build(grid(), tw.diloco(2))
    go_on(model, optimizer, 0, 4, rank // 2)
    before = fleet.island.led
    fleet.switch(tw.sparseloco(2, 16, 4))
    go_on(model, optimizer, 4, 8, rank // 2)
    return values_of(model), fleet.bytes_sent, (before, fleet.island.led)


def test_shards_turn_to_leads_when_the_method_needs_them(cluster: Cluster) -> None:
    plain = fleet_of(tw.diloco(2), 2)
    train(plain, 4)
    plain.switch(tw.sparseloco(2, 16, 4))
    train(plain, 4)
    for rank, (values, sent, led) in enumerate(cluster.run(switching, 4)):
        assert led == (False, True) and sent == plain.bytes_sent
        torch.testing.assert_close(values, parameters(plain)[rank // 2], rtol=1e-4, atol=1e-5)


def both_ways(rank: int) -> tuple[Any, ...]:
    """One worker on a mesh of replicas and shards: no value must travel twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = small_model()
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, tw.diloco(2), tw.Local())
    go_on(model, optimizer, 0, 4, 0)
    return values_of(model), fleet.bytes_sent, fleet.island.led


def test_replicas_of_shards_are_led(cluster: Cluster) -> None:
    plain = fleet_of(tw.diloco(2), 1)
    train(plain, 4)
    for values, sent, led in cluster.run(both_ways, 4):
        assert led and sent == plain.bytes_sent
        torch.testing.assert_close(values, parameters(plain)[0], rtol=1e-4, atol=1e-5)


def to_gradients(rank: int, name: str) -> tuple[Any, ...]:
    """The second worker's state breaks in one shard only, so that its ranks must agree on it."""
    model, optimizer, fleet = build(grid(), METHODS[name]())
    go_on(model, optimizer, 0, 4, rank // 2)
    if rank == 3:
        for state in optimizer.state.values():
            getattr(state["exp_avg"], "_local_tensor", state["exp_avg"]).fill_(float("nan"))
    fleet.switch(tw.ddp())
    go_on(model, optimizer, 4, 7, rank // 2)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return values_of(model), fleet.island.led, steps


@pytest.mark.parametrize("name", ["shards", "led sparse"])
def test_sharded_workers_share_their_states_before_they_only_exchange_gradients(cluster: Cluster, name: str) -> None:
    found = cluster.run(to_gradients, 4, name)
    for values, led, steps in found:
        assert led == (name == "led sparse") and steps == {7.0}
        assert all(bool(value.isfinite().all()) for value in values)
        torch.testing.assert_close(values, found[0][0], rtol=0, atol=0)
