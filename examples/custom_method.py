"""Two methods of your own: one composes rows that are there, one adds a rule. Simulated in one process.

    python examples/custom_method.py

Neither touches the engine, and both get checkpoints, byte counts, prices, lost rounds and overlap for nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import thinwire as tw

WORKERS, STEPS = 2, 64


def thrifty(every: int) -> tw.Method:
    """DES-LOC whose parameters travel as their strongest DCT components, and land half a period later."""
    codec = tw.DCT(tw.TopK(32, values=tw.BFloat16()), 64)
    return tw.table(
        "thrifty",
        tw.Sync(tw.params, tw.Every(every, delay=every // 2), tw.Average(), codec),
        tw.Sync(tw.moment("exp_avg"), tw.Every(3 * every), tw.Overwrite()),
        tw.Sync(tw.moment("exp_avg_sq"), tw.Every(6 * every), tw.Overwrite()),
        every=every,
    )


@dataclass(frozen=True)
class Spring(tw.Rule):
    """Elastic averaging (arXiv 1412.6651): workers and a shared centre pull at each other, and never quite meet.

    c -= pull * E[c - x_m] ; x_m += pull * (c before - x_m)
    """

    pull: float
    agreement = "shared"  # the centre is what to evaluate: the state named "anchor"

    def init(self, x: tw.Live, scope: tw.Scope) -> dict[str, Tensor | None]:
        return {"anchor": x.read()}

    def send(self, x: tw.Live, state: dict[str, Tensor | None], scope: tw.Scope) -> Tensor:
        return x.drift(state["anchor"])

    def recv(self, x: tw.Live, state: dict[str, Tensor | None], answer: tw.Reduced, scope: tw.Scope) -> None:
        own = x.drift(state["anchor"])
        state["anchor"].sub_(answer.mean, alpha=self.pull)
        x.add(own.mul_(self.pull))

    def equalises(self, scope: tw.Scope) -> bool:
        return False


def elastic_averaging(every: int, pull: float = 0.5) -> tw.Method:
    return tw.table("elastic_averaging", tw.Sync(tw.params, tw.Every(every), Spring(pull)), every=every)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def train(method: tw.Method) -> None:
    torch.manual_seed(0)
    models = [network() for _ in range(WORKERS)]  # worker 0's values are given to all before the first step
    replicas = [tw.Replica(model, torch.optim.AdamW(model.parameters(), lr=3e-3)) for model in models]
    fleet = tw.Fleet(replicas, method, tw.Local())
    for _ in range(STEPS):
        for model in models:
            inputs = torch.rand(32, 2) * 4 - 2
            nn.functional.mse_loss(model(inputs), (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos()).backward()
        fleet.step()
        fleet.zero_grad()
    assert fleet.bytes_sent == tw.cost(method, models[0], WORKERS, replicas[0].optimizers[0]).bytes(STEPS)

    inputs = torch.rand(512, 2) * 4 - 2
    with torch.no_grad(), fleet.evaluating():
        loss = nn.functional.mse_loss(models[0](inputs), (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos())
    print(f"{method}\nloss {loss:.4f}, {fleet.bytes_sent / 1e3:.0f} kB sent\n")


if __name__ == "__main__":
    train(thrifty(every=8))
    train(elastic_averaging(every=8))
