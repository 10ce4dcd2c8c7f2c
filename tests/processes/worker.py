"""One worker of a small run, as a program: `worker.py PORT WORKER WORKERS METHOD STEPS [--die-at N] [--pause N S]`.

Prints one line a step, then one JSON line with what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time

import torch

import thinwire as tw
from tests.toy import adamw, backward, small_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("worker", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("method")
    parser.add_argument("steps", type=int)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--timeout", type=float, default=30)
    parser.add_argument("--host", default="127.0.0.1")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(chosen)), flush=True)


def run(chosen: argparse.Namespace) -> dict:
    where = f"{chosen.host}:{chosen.port}"
    transport = tw.Group.connect(where, chosen.worker, chosen.workers, timeout=chosen.timeout)
    model = small_model()
    optimizer = adamw(model.parameters())
    fleet = tw.attach(model, optimizer, eval(chosen.method, {"tw": tw}), transport)
    try:
        for step in range(chosen.steps):
            backward(model, step, chosen.worker)
            if step == chosen.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == chosen.stop_at:
                time.sleep(3600)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}", flush=True)
        fleet.finish()
    except tw.PeerLost as error:
        facts = {"row": error.row, "round": error.round, "step": error.step, "workers": error.workers}
        return {"lost": str(error), **facts, "events": [event.text for event in fleet.events]}
    return {"sum": float(sum(p.double().sum() for p in model.parameters())), "events": [e.text for e in fleet.events]}


if __name__ == "__main__":
    main()
