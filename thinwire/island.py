"""The ranks that share one replica: what must be decided once for all shards of a worker."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Island:
    """The processes that hold shards of the same replica; without a mesh, just this one."""

    def __init__(self, mesh: Any | None) -> None:
        dimensions = mesh.ndim if mesh is not None else 0
        self.groups = [mesh.get_group(i) for i in range(dimensions)] if mesh is not None else []
        self.rank = mesh.get_rank() if mesh is not None else 0
        self.shard = _position(mesh) if mesh is not None else None

    def agree(self, norm: float, weight: float) -> tuple[float, float]:
        """The norm over all shards, not finite if one is not, and the least weight."""
        if not self.groups:
            return norm, weight
        squares = self._reduce([norm * norm], dist.ReduceOp.SUM)[0]
        return squares**0.5, self._reduce([weight], dist.ReduceOp.MIN)[0]

    def all(self, true: bool) -> bool:
        return bool(self._reduce([float(true)], dist.ReduceOp.MIN)[0]) if self.groups else true

    def total(self, count: int) -> int:
        return int(self._reduce([float(count)], dist.ReduceOp.SUM)[0]) if self.groups else count

    def _reduce(self, values: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        for group in self.groups:
            tensor = tensor.cuda() if dist.get_backend(group) == "nccl" else tensor.cpu()
            dist.all_reduce(tensor, how, group=group)
        return tensor.tolist()


def _position(mesh: Any) -> str:
    """This rank's coordinates in the mesh, for the keys of a checkpoint."""
    return "-".join(str(c) for c in mesh.get_coordinate())
