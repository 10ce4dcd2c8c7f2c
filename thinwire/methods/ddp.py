"""Data-parallel training: `g = E[g_m]` before every step."""

from __future__ import annotations

from ..replica import grads
from ..rule import Overwrite
from ..schedule import Every
from ..table import Method, Sync
from .common import table


def ddp() -> Method:
    """Gradients meet at every step: the yardstick.

    >>> print(ddp().rows[0])
    grads | every 1 | Overwrite() | Float32()
    """
    return table("ddp", Sync(grads, Every(1), Overwrite()), every=1)
