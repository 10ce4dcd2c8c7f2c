"""Any codec on the cosine transform of pieces: all coefficients at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .base import Codec, Weight
from .cosine import Strip
from .crew import share
from .plan import Plan


@dataclass(frozen=True, eq=False)
class Whole:
    """`inner` on all coefficients of some pieces, in one buffer.

    A strip is transformed by one thread: a matrix product of several has other bits on machines with more cores.
    """

    inner: Codec
    plan: Plan

    @cached_property
    def size(self) -> int:
        return self.inner.size(self.plan.inside)

    def encode(self, buffer: Tensor) -> Tensor:
        return self.inner.encode(self._forward(buffer), self.plan.inside)

    def encode_with_own(self, buffer: Tensor, out: Tensor) -> Tensor:
        payload, own = self.inner.encode_with_own(self._forward(buffer), self.plan.inside)
        self._inverse(own, out)
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._inverse(self.inner.decode(payload, self.plan.inside), out)

    def merge(self, payloads: Tensor, weights: Sequence[Weight], out: Tensor) -> None:
        """Payloads (workers, size); `weights` are numbers, or one number per tensor of the row."""
        spread = [self._per_coefficient(weight) for weight in weights]
        self._inverse(self.inner.merge(list(payloads), spread, self.plan.inside), out)

    def _forward(self, buffer: Tensor) -> Tensor:
        coefficients = self.plan.inside.zeros(buffer.device)
        for batch in self.plan.batches:
            tall, found = batch.read(buffer), batch.found(coefficients)

            def work(left: Iterator[Strip], tall: Tensor = tall, found: Tensor = found) -> None:
                for strip in left:
                    found[strip.mine] = strip.forward(tall, buffer.new_empty(2, strip.size))

            share(batch.blocks.strips(buffer.device), work, buffer.device)
        return coefficients

    def _inverse(self, coefficients: Tensor, out: Tensor) -> None:
        for batch in self.plan.batches:
            tall, found = batch.target(out), batch.found(coefficients)

            def work(left: Iterator[Strip], tall: Tensor = tall, found: Tensor = found) -> None:
                for strip in left:
                    strip.inverse(found[strip.mine], tall, out.new_empty(2, strip.size))

            share(batch.blocks.strips(out.device), work, out.device)
            batch.write(tall, out)

    def _per_coefficient(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor):
            return weight
        inside = self.plan.inside
        mine = weight[torch.tensor(self.plan.tensors, dtype=torch.int64, device=weight.device)]
        spans = torch.tensor(inside.spans, dtype=torch.int64, device=weight.device)
        return mine.repeat_interleave(spans, output_size=inside.total)
