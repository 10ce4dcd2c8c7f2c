"""One elastic worker in a process of its own, for the chaos tests: trains a small model and tells what happens.

    python -m tests.elastic.member COORDINATOR METHOD STEPS [--seconds 0.02] [--name a] [--stop-at exchange:3] ...

Every line on standard output is JSON. `--stop-at PLACE:N` kills this process (kill -9) at a place in the N-th round:
"exchange" (after it was launched), "vote" (before the vote), "commit" (after the vote, before it is applied);
`--stop-at start` when the first worker's values are sent to all.
`--stop-at healing` is a joiner that stops (SIGSTOP) when it is about to fetch the fleet's state, the first time;
`--stop-at fetching:SECONDS` one that only takes its time there.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.elastic import epoch
from thinwire.elastic.epoch import Committing
from thinwire.elastic.healing import Healing
from thinwire.group import Group

METHODS = {
    "diloco": lambda: tw.diloco(every=4),
    "desloc": lambda: tw.desloc(every=4),
    "eager": lambda: tw.eager_diloco(every=4, outer_momentum=0.5),
    "streaming": lambda: tw.streaming_diloco(every=4, fragments=[["0.*"], ["2.*"]], codec=tw.E3M0()),
    "consensus": lambda: tw.decoupled_momentum(every=4, chunk=8, topk=4, variant="consensus"),
    "mean": lambda: tw.decoupled_momentum(every=4, chunk=8, topk=32, decay=0.3, variant="mean"),
    "paper": lambda: tw.decoupled_momentum(every=4, chunk=8, topk=32, decay=0.3, variant="paper"),  # .9 diverges here
    "sparseloco": lambda: tw.sparseloco(every=4, chunk=64, topk=8),
    "ddp": lambda: tw.ddp(),
}


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def digest(tensors: list[torch.Tensor]) -> str:
    joined = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()[:16]


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> list[torch.Tensor]:
    return [optimizer.state[parameter][name] for parameter in model.parameters() if name in optimizer.state[parameter]]


def die_at(place: str, number: int) -> None:
    """Have this process killed at that place of its N-th round."""
    seen = {"exchange": 0, "vote": 0, "commit": 0}

    def reached(where: str) -> None:
        seen[where] += 1
        if where == place and seen[where] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    confirm, init = Committing.confirm, Committing.__init__

    def counted_init(self: Any, *args: Any) -> None:
        init(self, *args)
        reached("exchange")

    def counted_confirm(self: Any, complete: bool) -> bool:
        reached("vote")
        agreed = confirm(self, complete)
        reached("commit")
        return agreed

    Committing.__init__, Committing.confirm = counted_init, counted_confirm  # type: ignore[method-assign]


def die_at_the_start() -> None:
    Group.broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]


def pause_before_healing(pause: Callable[[], None]) -> None:
    """A slow joiner."""
    fetch, stopped = Healing.recv_checkpoint, []

    def slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not stopped:
            stopped.append(True)
            tell(kind="stopping")
            pause()
        return fetch(self, *args, **kwargs)

    Healing.recv_checkpoint = slowly  # type: ignore[method-assign]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("method")
    parser.add_argument("steps", type=int)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--name", default="w")
    parser.add_argument("--together", type=int, default=1, help="begin when so many are here; go on with fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-at", default="")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--secret")
    parser.add_argument("--transfer", type=float, default=epoch.TRANSFER)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # where does it hang?
    epoch.TRANSFER = arguments.transfer
    place, _, number = arguments.stop_at.partition(":")
    if place == "healing":
        pause_before_healing(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif place == "fetching":
        pause_before_healing(lambda: time.sleep(float(number)))
    elif place == "start":
        die_at_the_start()
    elif place:
        die_at(place, int(number))
    train(arguments)


def train(arguments: argparse.Namespace) -> None:
    model, optimizer = model_of(arguments.seed, arguments.width)  # workers need not start equal
    transport = tw.Elastic(arguments.coordinator, name=arguments.name, min_workers=arguments.together,
                           secret_file=arguments.secret)  # fmt: skip
    transport.settings = {"steps": arguments.steps}
    fleet = tw.attach(model, optimizer, METHODS[arguments.method](), transport)
    fleet.begin()
    transport.min_workers = 1
    tell(kind="begun", id=transport.id, step=fleet.steps, workers=fleet.workers, slot=transport.slot)
    noted = 0
    while fleet.steps < arguments.steps:
        loss = backward(model, fleet.steps, transport.slot, arguments.batch)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(arguments.seconds)
        fresh = list(fleet.events)[noted:]
        noted = len(fleet.events)
        tell(
            kind="step",
            step=fleet.steps,
            loss=loss,
            held=held_loss(model, arguments.batch),
            params=digest(list(model.parameters())),
            outer=digest(outer_state(fleet)),
            some=some(model),
            **{name: digest(moments(model, optimizer, name)) for name in ("exp_avg", "exp_avg_sq")},
            workers=fleet.workers,
            committed=transport.committed,
            lost=transport.lost,
            events=[f"{event.kind}: {event.text}" for event in fresh],
        )
    fleet.finish()
    tell(kind="finished", step=fleet.steps, params=digest(list(model.parameters())), workers=fleet.workers,
         committed=transport.committed, alone=transport.alone_rounds)  # fmt: skip
    transport.leave("finished")
    os._exit(0)


def model_of(seed: int, width: int = 16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def outer_state(fleet: tw.Fleet) -> list[torch.Tensor]:
    """What the method keeps of the fleet; a residual is a worker's own."""
    kept = [(name, value) for row in fleet.rows for name, value in row.lanes[0].state.items()]
    return [value for name, value in kept if value is not None and name != "residual"]


def some(model: nn.Module) -> list[float]:
    return [float(value) for value in next(model.parameters()).detach().flatten()[:16]]


def loss_of(model: nn.Module, count: int, seed: int) -> torch.Tensor:
    """What can be learnt, and as much noise that cannot."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    noise = 0.5 * torch.randn(count, 1, generator=generator)
    return (model(inputs) - inputs[:, :4].sum(1, keepdim=True).tanh() - noise).square().mean()


def backward(model: nn.Module, step: int, slot: int, batch: int) -> float:
    loss = loss_of(model, batch, 1000 * slot + step)
    loss.backward()
    return float(loss.detach())


@torch.no_grad()
def held_loss(model: nn.Module, batch: int) -> float:
    return float(loss_of(model, 4 * batch, 999_999))


if __name__ == "__main__":
    main()
