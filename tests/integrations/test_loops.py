"""What people put into a training loop: gradient accumulation, a GradScaler, compiled and checkpointed models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from tests.cluster import Cluster, free_port
from tests.integrations.hf_worker import connected, method_of, values
from tests.toy import adamw, batch, small_model

pytestmark = pytest.mark.xdist_group("integrations")
STEPS, PATIENCE = 8, 90


def loss_of(model: Any, micro_batch: int, worker: int) -> Tensor:
    inputs, targets = batch(micro_batch, worker)
    return nn.functional.mse_loss(model(inputs), targets)


class Loop:
    """One worker's model, optimizer and fleet."""

    def __init__(self, port: int, worker: int, name: str = "desloc") -> None:
        self.worker, self.model = worker, small_model()
        self.optimizer = adamw(self.model.parameters())
        self.fleet = tw.attach(self.model, self.optimizer, method_of(name), connected(port, worker))

    def done(self) -> list[Tensor]:
        assert self.fleet.steps == STEPS
        self.fleet.finish()
        return values(self.model)


def plain(worker: int, port: int, left_out: int = -1) -> list[Tensor]:
    """One batch a step; worker 1 never sees `left_out`, and takes one more at the end."""
    loop = Loop(port, worker)
    batches = [b for b in range(STEPS + 1) if not (worker == 1 and b == left_out)][:STEPS]
    for number in batches:
        loss_of(loop.model, number, worker).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.done()


def scaled(worker: int, port: int, overflows_at: int) -> list[Tensor]:
    """A GradScaler whose steps are all taken on worker 0, and all but one on worker 1."""
    loop, number = Loop(port, worker), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    while loop.fleet.steps < STEPS:
        loss = loss_of(loop.model, number, worker)
        scaler.scale(loss * float("inf") if (worker, number) == (1, overflows_at) else loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        number += 1
    assert number == STEPS + worker
    return loop.done()


@pytest.mark.parametrize("batch_number", [0, 4])
def test_a_step_that_a_grad_scaler_skips_never_happened(cluster: Cluster, batch_number: int) -> None:
    """Powers of two scale and unscale without rounding, so the bits agree; the first batch is before any meeting."""
    expected = cluster.run(plain, 2, free_port(), batch_number, timeout=PATIENCE, join=False)
    ours = cluster.run(scaled, 2, free_port(), batch_number, timeout=PATIENCE, join=False)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def compiled(worker: int, port: int) -> list[Tensor]:
    loop = Loop(port, worker)
    model = torch.compile(loop.model, backend="aot_eager")
    for number in range(STEPS):
        loss_of(model, number, worker).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.done()


def checkpointed(worker: int, port: int) -> list[Tensor]:
    loop = Loop(port, worker)
    for number in range(STEPS):
        again = lambda inputs: checkpoint(loop.model, inputs, use_reentrant=False)  # noqa: E731
        loss_of(again, number, worker).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.done()


@pytest.mark.parametrize("loop", [compiled, checkpointed])
def test_compiled_and_checkpointed_models_train_as_plain_ones(cluster: Cluster, loop: Any) -> None:
    expected = cluster.run(plain, 2, free_port(), timeout=PATIENCE, join=False)
    ours = cluster.run(loop, 2, free_port(), timeout=PATIENCE, join=False)
    torch.testing.assert_close(ours, expected)  # a compiled graph may round another way


def compiled_once(worker: int, port: int) -> tuple[int, int]:
    """How often the model was compiled before and after rounds have written into its parameters."""
    from torch._dynamo.utils import counters

    loop = Loop(port, worker, "local_sgd")
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(loop.model, backend="aot_eager")
    seen = []
    for number in range(STEPS):
        loss_of(model, number, worker).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        seen.append(counters["stats"]["unique_graphs"])
    return seen[0], seen[-1]


def test_a_round_does_not_make_a_model_compile_again(cluster: Cluster) -> None:
    for first, last in cluster.run(compiled_once, 2, free_port(), timeout=PATIENCE, join=False):
        assert first == last > 0


def accumulated(worker: int, port: int) -> tuple[list[Tensor], int]:
    loop = Loop(port, worker)
    for number in range(2 * STEPS):
        (loss_of(loop.model, number, worker) / 2).backward()
        if number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return loop.done(), loop.fleet.bytes_sent


def test_micro_batches_do_not_count_as_steps(cluster: Cluster) -> None:
    model = small_model()
    price = tw.cost(method_of("desloc"), model, workers=2, optimizer=adamw(model.parameters()))
    for _, sent in cluster.run(accumulated, 2, free_port(), timeout=PATIENCE, join=False):
        assert sent == price.bytes(STEPS)
