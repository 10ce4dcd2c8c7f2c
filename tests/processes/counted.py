"""One worker in its own network namespace: `counted.py HOST PORT WORKER WORKERS STEPS LOOKS METHOD...`.

Waits for a line on standard input before and after each method's steps, so that the kernel's counters can be read then.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import thinwire as tw


def main() -> None:
    host, port, worker, workers, steps, looks, *methods = sys.argv[1:]
    torch.set_num_threads(1)
    for i, method in enumerate(methods):
        transport = tw.Group.connect(f"{host}:{int(port) + i}", int(worker), int(workers), timeout=60)
        count(method, transport, int(steps), int(looks))


def count(method: str, transport: tw.Transport, steps: int, looks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))  # 4.2 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fleet = tw.attach(model, optimizer, eval(method, {"tw": tw}), transport)
    take_steps(fleet, 1)
    for _ in range(looks):
        before = fleet.wire_sent, fleet.wire_received
        pause({})
        take_steps(fleet, steps)
        pause({"sent": fleet.wire_sent - before[0], "received": fleet.wire_received - before[1]})


def pause(counted: dict[str, int]) -> None:
    print(json.dumps(counted), flush=True)
    sys.stdin.readline()


def take_steps(fleet: tw.Fleet, steps: int) -> None:
    for _ in range(steps):
        for parameter in fleet.replicas[0].model.parameters():
            parameter.grad = torch.randn_like(parameter)
        fleet.replicas[0].optimizers[0].step()


if __name__ == "__main__":
    main()
