"""What the workers agree on when somebody wants to evaluate or export the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codec.base import Layout
from .replica import Replica, local

if TYPE_CHECKING:
    from .fleet import Fleet
    from .row import Row


class Agreement:
    """One call's worth of agreement. `finished`: the parameters themselves, no outer copies."""

    def __init__(self, fleet: Fleet, finished: bool = False) -> None:
        self.fleet, self.finished = fleet, finished
        self.live = self.live_tensors(fleet.replicas[0])
        if not fleet._begun:
            fleet._begin()

    @staticmethod
    def live_tensors(replica: Replica) -> dict[str, Tensor]:
        parameters = {name: local(parameter.detach()) for name, parameter in replica.trainable.items()}
        return {**parameters, **replica.statistics}

    def tensors(self) -> dict[str, Tensor]:
        shared = {} if self.finished else self._outer_copies()
        if self.fleet.transport.elastic and not self.finished:  # nobody may be waited for outside of a round
            return {name: shared[name] if name in shared else self.live[name].clone() for name in self.live}
        first = [name for name in self._names_with("first") if name not in shared]
        mean = [name for name in self.live if name not in shared and name not in first]
        agreed = {**shared, **self._first(first), **self._mean(mean)}
        return {name: agreed[name] for name in self.live}

    def _rows(self) -> list[Row]:
        return [row for row in self.fleet.rows if row.sync.view.kind in ("params", "buffers")]

    def _names_with(self, agreement: str) -> list[str]:
        return [name for row in self._rows() if row.sync.rule.agreement == agreement for name in row.names]

    def _outer_copies(self) -> dict[str, Tensor]:
        found = {}
        for row in self._rows():
            if row.sync.rule.agreement == "shared" and row.names:
                found.update(self._anchor(row))
        return found

    def _anchor(self, row: Row) -> dict[str, Tensor]:
        with row.lanes[0].borrowed(write=False) as state:
            anchor = state["anchor"]
            assert anchor is not None
            views = row.layout.views(anchor.clone())
        return {name: view.to(self.live[name].dtype) for name, view in zip(row.names, views, strict=True)}

    def _first(self, names: list[str]) -> dict[str, Tensor]:
        """Worker 0's outer copy; at the end, its parameters."""
        if not names:
            return {}
        self.fleet._meet("consensus")
        layout = self._layout(names)
        buffers = [
            self._flat(names, layout, lane, copies=not self.finished) for lane in range(len(self.fleet.replicas))
        ]
        return self._named(names, layout, self.fleet.transport.broadcast(buffers, 0))

    def _mean(self, names: list[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        headers = self.fleet._meet("consensus", equal=self._equal(names))
        if all(header.equal for header in headers):
            return {name: self.live[name].clone() for name in names}
        layout = self._layout(names)
        buffers = [self._flat(names, layout, lane, copies=False) for lane in range(len(self.fleet.replicas))]
        total = self.fleet.transport.add(buffers).div_(self.fleet.workers)
        moved = 2 * (self.fleet.workers - 1) * total.nbytes // self.fleet.workers
        self.fleet.wire_sent += moved
        self.fleet.wire_received += moved
        return self._named(names, layout, total)

    def _equal(self, names: list[str]) -> bool:
        """Whether nothing has moved since these tensors were made the same on all workers."""
        equal = {name for row in self._rows() if row.equal_at == self.fleet.steps for name in row.names}
        equal |= {name for row in self.fleet._gradient_rows() for name in row.names}  # equal steps from equal values
        return equal.issuperset(names)

    def _layout(self, names: list[str]) -> Layout:
        return Layout(tuple(self.live[name].shape for name in names))

    def _flat(self, names: list[str], layout: Layout, lane: int, copies: bool) -> Tensor:
        live = self.live_tensors(self.fleet.replicas[lane])
        if copies:
            for row in self._rows():
                anchor = row.lanes[lane].state.get("anchor")
                if anchor is not None:
                    live.update(zip(row.names, row.layout.views(anchor), strict=True))
        buffer = layout.zeros(self.fleet.replicas[lane].device)
        torch._foreach_copy_(layout.views(buffer), [live[name] for name in names])
        return buffer

    def _named(self, names: list[str], layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
        views = layout.views(buffer)
        return {name: view.to(self.live[name].dtype) for name, view in zip(names, views, strict=True)}
