"""Inner optimizers that the papers use: `ADOPT`, and `Muon` (torch's own where it has one)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .adopt import ADOPT

if TYPE_CHECKING or not hasattr(torch.optim, "Muon"):  # torch before 2.9
    from .muon import Muon
else:
    from torch.optim import Muon

__all__ = ["ADOPT", "Muon"]
