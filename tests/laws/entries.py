"""One table of all methods and of what composes: a new method enters the common suite by one line here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw

OptimizerOf = Callable[[Any], Any]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9))


def adopt(parameters: Any) -> torch.optim.Optimizer:
    return tw.ADOPT(parameters, lr=0.01, betas=(0.8, 0.9))


class Odd(nn.Module):
    """A 0-d, an empty and a never used parameter among ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 19)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.linspace(-1, 1, 3))
        self.head = nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)) * self.gain) + self.empty.sum()


FRAGMENTS = [["inner.*", "empty"], ["gain", "unused", "head.*"]]
TOPK, WAVES = tw.TopK(5, 16), tw.DCT(tw.TopK(6), 4)


def desloc_with(params: tw.Codec, first: tw.Codec, delay: int = 0) -> tw.Method:
    return tw.table(
        "desloc",
        tw.Sync(tw.params, tw.Every(3, delay=delay), tw.Average(), params),
        tw.Sync(tw.moment("exp_avg"), tw.Every(6, delay=delay), tw.Overwrite(), first),
        tw.Sync(tw.moment("exp_avg_sq"), tw.Every(9, delay=delay), tw.Overwrite(), tw.BFloat16()),
        every=3,
    )


@dataclass(frozen=True)
class Entry:
    """A method, the optimizer it runs on, and what the design says of it."""

    method: tw.Method
    optimizer: OptimizerOf = adamw
    equal: int | None = None  # replicas are equal after every step that is a multiple of this
    copy: bool = False  # there is a shared outer copy: consensus costs nothing, at any time
    phased: bool = False  # eager and delayed: the outer step is taken at launch
    gradients: bool = False  # rows on gradients


ENTRIES: dict[str, Entry] = {
    "ddp": Entry(tw.ddp(), equal=1, gradients=True),
    "local_sgd": Entry(tw.local_sgd(3), sgd, equal=3),
    "local_sgd delay": Entry(tw.local_sgd(3, delay=2), momentum),
    "local_adam": Entry(tw.local_adam(3), equal=3),
    "local_adam momentum": Entry(tw.local_adam(3), momentum, equal=3),
    "local_adam delay": Entry(tw.local_adam(4, delay=3)),
    "desloc": Entry(tw.desloc(2), equal=2),
    "desloc adopt": Entry(tw.desloc(2), adopt, equal=2),
    "desloc periods": Entry(tw.desloc(3, moments={"exp_avg": 4, "exp_avg_sq": 5}), equal=3),
    "desloc nesterov": Entry(tw.desloc(3, outer=tw.Nesterov(1.0, 0.9)), equal=3, copy=True),
    "desloc delay": Entry(tw.desloc(2, delay=1)),
    "desloc delay of a period": Entry(tw.desloc(2, delay=2)),
    "local_states": Entry(tw.local_states(3), equal=3),
    "reset_states": Entry(tw.reset_states(3), equal=3),
    "diloco": Entry(tw.diloco(3), equal=3, copy=True),
    "diloco bf16": Entry(tw.diloco(3, codec=tw.BFloat16()), equal=3, copy=True),
    "diloco int8": Entry(tw.diloco(3, codec=tw.Int8()), equal=3, copy=True),
    "streaming": Entry(tw.streaming_diloco(6, FRAGMENTS, delay=2), copy=True),
    "streaming dense": Entry(tw.streaming_diloco(4, FRAGMENTS, delay=0, mix=0.0, codec=None), copy=True),
    "delayed": Entry(tw.delayed_diloco(3, outer_lr=0.2), phased=True),
    "delayed fragments": Entry(tw.delayed_diloco(4, FRAGMENTS, outer_lr=0.2, codec=tw.E3M0()), phased=True),
    "eager": Entry(tw.eager_diloco(3, outer_lr=0.2), phased=True),
    "eager fragments": Entry(tw.eager_diloco(4, FRAGMENTS, outer_lr=0.2), phased=True),
    "eager two phases": Entry(tw.eager_diloco(3, outer_lr=0.2, phases=2), sgd, phased=True),
    "eager e3m0": Entry(tw.eager_diloco(3, outer_lr=0.2, codec=tw.E3M0()), phased=True),
    "carry": Entry(tw.carry_diloco(3), copy=True),
    "carry short": Entry(tw.carry_diloco(4, delay=2, codec=tw.E3M0()), copy=True),
    "relay": Entry(tw.relay_diloco(6, FRAGMENTS), copy=True),
    "relay short": Entry(tw.relay_diloco(3, FRAGMENTS, codec=tw.E3M0()), copy=True),
    "decoupled paper": Entry(tw.decoupled_momentum(3, 4, 4, 0.5, 0.3, "paper")),
    "decoupled mean": Entry(tw.decoupled_momentum(3, 4, 4, 0.5, 0.3, "mean")),
    "decoupled consensus": Entry(tw.decoupled_momentum(3, 4, 4, variant="consensus"), equal=3, copy=True),
    "demo": Entry(tw.demo(4, 4), sgd, equal=1, gradients=True),
    "sparseloco": Entry(tw.sparseloco(3, 16, 4), equal=3, copy=True),
    "sparse_averaging": Entry(tw.sparse_averaging(3, 8), equal=3, copy=True),
    "two_bit": Entry(tw.two_bit_averaging(3), equal=3, copy=True),
    # compositions
    "desloc top-k": Entry(desloc_with(TOPK, WAVES)),
    "desloc dct": Entry(desloc_with(WAVES, TOPK)),
    "desloc overlapped e3m0": Entry(desloc_with(tw.E3M0(), tw.Float32(), delay=2)),
    "desloc overlapped int8": Entry(desloc_with(tw.Int8(), tw.Int8(), delay=1)),
    "streaming dct": Entry(tw.streaming_diloco(6, FRAGMENTS, codec=WAVES), copy=True),
    "streaming top-k": Entry(tw.streaming_diloco(4, FRAGMENTS, delay=3, codec=TOPK), copy=True),
    "eager dct": Entry(tw.eager_diloco(3, outer_lr=0.2, codec=WAVES), phased=True),
    "eager top-k": Entry(tw.eager_diloco(4, FRAGMENTS, outer_lr=0.2, codec=TOPK, phases=2), phased=True),
    "carry top-k": Entry(tw.carry_diloco(3, codec=TOPK), copy=True),
}


def odd_model() -> nn.Module:
    torch.manual_seed(3)
    return Odd()


def replicas(workers: int, optimizer: OptimizerOf, model: nn.Module | None = None) -> list[tw.Replica]:
    models = [copy.deepcopy(model or odd_model()) for _ in range(workers)]
    return [tw.Replica(m, optimizer(m.parameters())) for m in models]


def fleet_of(
    method: tw.Method,
    workers: int = 2,
    optimizer: OptimizerOf = adamw,
    model: nn.Module | None = None,
    lose: Callable[[int, int], bool] | None = None,
    clip: float | None = None,
) -> tw.Fleet:
    return tw.Fleet(replicas(workers, optimizer, model), method, tw.Local(lose), clip=clip)


def backward(model: nn.Module, step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    inputs, targets = torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)
    dtype = next(model.parameters()).dtype
    loss = (model(inputs.to(dtype)) - targets.to(dtype)).square().mean()
    loss.backward()
    return loss.detach()


def train(fleet: tw.Fleet, steps: int, begin: int = 0, each: Callable[[], Any] | None = None) -> tw.Fleet:
    for _ in range(steps):
        for worker, replica in enumerate(fleet.replicas):
            backward(replica.model, begin + fleet.steps, worker)
        fleet.step()
        fleet.zero_grad()
        if each is not None:
            each()
    return fleet


def snapshot(fleet: tw.Fleet) -> list[Tensor]:
    """Parameters, buffers and optimizer state of all replicas."""
    found: list[Tensor] = []
    for replica in fleet.replicas:
        found += [v.detach().clone() for v in replica.model.state_dict().values()]
        for optimizer in replica.optimizers:
            for state in optimizer.state.values():
                found += [torch.as_tensor(v).detach().clone() for v in state.values() if v is not None]
    return found


def weights_of(fleet: tw.Fleet) -> list[list[Tensor]]:
    return [[p.detach().clone() for p in replica.model.parameters()] for replica in fleet.replicas]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def all_equal(fleet: tw.Fleet) -> bool:
    values = weights_of(fleet)
    return all(same(values[0], other) for other in values[1:])


def mean_of(values: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same_tensor).mean(0) for same_tensor in zip(*values, strict=True)]


def doubled(method: tw.Method) -> tw.Method:
    """Every row at twice its period."""
    rows = [replace(r, when=tw.Every(2 * r.every.period, r.every.offset, r.every.delay)) for r in method.rows]
    return replace(method, rows=tuple(rows))
