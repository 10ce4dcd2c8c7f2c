"""A Trainer in its own network namespace: `counted_trainer.py HOST PORT WORKER FOLDER FIRST LAST`.

Prints a line after step FIRST and after step LAST, and waits for one on standard input each time, so that the kernel's
counters can be read then. The one round of the run is before FIRST.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import thinwire as tw


def main() -> None:
    from transformers import TrainerCallback

    from tests.integrations import hf_worker
    from thinwire.integrations.hf import ThinwireCallback

    host, port, worker, folder, *steps = sys.argv[1:]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step in map(int, steps):
                print(f"step {state.global_step}", flush=True)
                sys.stdin.readline()

    torch.set_num_threads(1)
    first = int(steps[0])
    transport = tw.Group.connect(f"{host}:{port}", worker=int(worker), workers=2, timeout=60)
    trainer = hf_worker.trainer_of(
        int(worker), folder, ThinwireCallback(tw.local_sgd(first - 1), transport),
        max_steps=2 * (first - 1) - 1, eval_strategy="no", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer.add_callback(Stop())
    trainer.train()


if __name__ == "__main__":
    main()
