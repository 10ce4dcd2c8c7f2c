"""What saving asks of the transport."""

from __future__ import annotations

import torch
from torch import nn

import thinwire as tw
from thinwire.transport import Exchange, Key, Order


class Noting(tw.Local):
    """Notes which rounds are voted on."""

    def __init__(self) -> None:
        super().__init__()
        self.votes: list[Key] = []

    def exchange(self, order: Order) -> Exchange:
        made = super().exchange(order)
        confirm = made.confirm

        def noted(complete: bool) -> bool:
            self.votes.append(order.key)
            return confirm(complete)

        made.confirm = noted  # type: ignore[method-assign]
        return made


def votes(save_at: int) -> list[Key]:
    model, transport = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), Noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = tw.streaming_diloco(every=8, fragments=[["0.*"], ["1.*"]], delay=5)
    fleet = tw.attach(model, optimizer, method, transport)
    for step in range(1, 30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == save_at:
            fleet.state_dict()
    return transport.votes


def test_saving_votes_in_the_order_of_landing() -> None:
    """Workers of an elastic fleet do not all save after the same step, and each waits for the others' votes."""
    assert votes(save_at=16) == votes(save_at=0)
