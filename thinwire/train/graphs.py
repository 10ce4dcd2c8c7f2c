"""Hosted replicas on a GPU as one CUDA graph: small models spend their time on launches, and a graph has one.

Each replica's forward and backward is captured on a stream of its own, so that their kernels run side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.train.config import Config
from thinwire.train.data import Batch
from thinwire.train.place import Place
from thinwire.train.work import Team, Work

WARM_UP = 3  # runs before the capture: libraries choose their kernels and workspaces


def can_capture(team: Team, config: Config, place: Place) -> bool:
    """A graph repeats what it saw: it needs a GPU, no inner processes, and nothing random."""
    random = any(isinstance(m, nn.Dropout) and m.p > 0 for module in team.modules for m in module.modules())
    return place.device.type == "cuda" and config.train.graphs and place.mesh is None and not random


class GraphWork(Work):
    def __init__(self, team: Team, config: Config, place: Place) -> None:
        super().__init__(team, config, place)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: int) -> Tensor:
        fresh = [self.batches(shard) for shard in self.team.shards]
        if self.graph is None:
            self._capture(fresh)
        for static, batches in zip(self.inputs, fresh, strict=True):
            for old, new in zip(static, batches, strict=True):
                old[0].copy_(new[0])
                old[1].copy_(new[1])
        for parameter, gradient in self.gradients:  # zero_grad drops them; the graph writes to these very tensors
            parameter.grad = gradient
        assert self.graph is not None
        self.graph.replay()
        return self.losses.clone()

    def _capture(self, batches: list[list[Batch]]) -> None:
        self.inputs = [[(x.clone(), y.clone()) for x, y in own] for own in batches]
        self.streams = [torch.cuda.Stream() for _ in self.team.modules]
        statistics = [b for module in self.team.modules for b in module.buffers()]
        before = [b.clone() for b in statistics]
        for _ in range(WARM_UP):
            self._all_replicas()
        torch.cuda.synchronize()
        for now, saved in zip(statistics, before, strict=True):  # warming up is not training
            now.copy_(saved)
        self._drop_gradients()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = self._all_replicas()
        own = (p for module in self.team.modules for p in module.parameters())
        self.gradients = [(p, p.grad) for p in own if p.grad is not None]

    def _all_replicas(self) -> Tensor:
        main, losses = torch.cuda.current_stream(), []
        for stream, module, batches in zip(self.streams, self.team.modules, self.inputs, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                losses.append(self._replica(module, batches))
        for stream in self.streams:
            main.wait_stream(stream)
        return torch.stack(losses)

    def _drop_gradients(self) -> None:
        for module in self.team.modules:
            for parameter in module.parameters():
                parameter.grad = None


def work_for(team: Team, config: Config, place: Place) -> Work:
    """The hosted replicas' work, captured where that is possible."""
    return GraphWork(team, config, place) if can_capture(team, config, place) else Work(team, config, place)
