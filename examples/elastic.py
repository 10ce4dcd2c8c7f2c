"""Workers that come and go: start a coordinator, then this file as often as you like, at any time; kill any of them.

    thinwire coordinator
    python examples/elastic.py --join 127.0.0.1:29510        # in other terminals; on other machines with --secret-file

A newcomer takes over parameters, moments, outer state and the step; those who stay go on without those who leave.
"""

import argparse

import torch
from torch import nn

import thinwire as tw

parser = argparse.ArgumentParser()
parser.add_argument("--join", default="127.0.0.1:29510", metavar="HOST:PORT")
parser.add_argument("--secret-file")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--min-workers", type=int, default=1)
options = parser.parse_args()

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
transport = tw.Elastic(options.join, min_workers=options.min_workers, secret_file=options.secret_file)
fleet = tw.attach(model, optimizer, tw.diloco(every=10), transport)
fleet.begin()  # here a newcomer is brought up to date

while fleet.steps < options.steps:
    data = torch.Generator().manual_seed(1000 * transport.slot + fleet.steps)  # each worker has a share of its own
    inputs = torch.randn(64, 16, generator=data)
    loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if fleet.steps % 50 == 0:
        print(f"step {fleet.steps}: loss {loss.item():.3f}, {fleet.workers} workers, {transport.committed} rounds")

fleet.finish()
print(f"finished after {fleet.steps} steps; {fleet.events.counts}")
transport.leave("finished")
