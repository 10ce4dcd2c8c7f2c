"""Sharded tensors without the import of them, half a second that only those who shard should pay."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Where nobody has imported DTensor, nothing is one.

    >>> import torch
    >>> is_dtensor(torch.zeros(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
