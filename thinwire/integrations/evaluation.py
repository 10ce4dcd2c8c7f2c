"""The consensus in the model for as long as transformers' Trainer evaluates, and no longer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..fleet import Fleet


class Evaluation:
    """Holds the consensus in the model for as long as the Trainer evaluates.

    The Trainer tells when an evaluation has ended, but not when one begins. So between two steps the model is watched:
    where an evaluation is due, the first forward pass in evaluation mode without gradients swaps the consensus in, and
    `on_evaluate` swaps it out; so does whatever asks for the model's state, since checkpoints hold the live weights.
    """

    def __init__(self, model: nn.Module, fleet: Fleet) -> None:
        self.model, self.fleet = model, fleet
        self.over = self.due = self.inside = False
        self.swapped, self.watches = ExitStack(), ExitStack()

    def watch(self, control: Any, due: bool = False) -> None:
        """From here to the next step."""
        self.stop()
        self.control, self.due = control, due
        if not self.over:
            before = self.model.register_forward_pre_hook(lambda module, args: self._forward())
            saving = self.model.register_state_dict_pre_hook(lambda module, prefix, keep: self.swap_out())
            self.watches.callback(before.remove)
            self.watches.callback(saving.remove)

    def _forward(self) -> None:
        if self.model.training or torch.is_grad_enabled():
            return
        self.due = self.due or self.control.should_evaluate  # false again before the second of several datasets
        if self.due and not self.inside:
            self.swapped.enter_context(self.fleet.evaluating())
            self.inside = True

    def swap_out(self) -> None:
        self.inside = False
        self.swapped.close()

    def stop(self) -> None:
        self.swap_out()
        self.watches.close()
