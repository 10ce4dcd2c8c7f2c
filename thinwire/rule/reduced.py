"""The answer of a round."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..codec.base import STRIP
from .state import strips


class Reduced:
    """The answer of a round. `mean` is the rule's to use up.

    `own` is this replica's contribution as decoded, or None where x is still exactly what was sent.
    `sick`: this replica's message was not finite and was left out, so it takes the result outright.
    `held` says which tensors any worker had at launch, `had` which this one had; None means all.
    With a `divisor` it is made of a sum, which becomes the mean when it is asked for: whole, or by `part`.

    >>> Reduced(mean=torch.ones(3), own=None, share=0.25, divisor=4).mean
    tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(
        self,
        mean: Tensor,
        own: Tensor | None,
        share: float,
        sick: bool = False,
        kept: Tensor | None = None,
        held: list[bool] | None = None,
        had: list[bool] | None = None,
        divisor: float = 1.0,
        measured: bool = False,
    ) -> None:
        self.own, self.share, self.sick, self.kept, self.held, self.had = own, share, sick, kept, held, had
        self.divisor, self.measured = divisor, measured
        self.square = 0.0  # of the norm of what was divided, if it is `measured`
        self._values = mean
        self._scratch: Tensor | None = None

    @property
    def mean(self) -> Tensor:
        if self.divisor != 1:
            for (part,) in strips(self._values):
                self._divide(part, out=part)
            self.divisor = 1.0
        return self._values

    def part(self, which: slice) -> Tensor:
        """The mean of some values, divided in the pass that uses them: to be taken once each, and used up at once.

        A strip on a CPU is divided into a scratch that never leaves the cache, so that the sum is not written again.
        """
        part = self._values[which]
        if self.divisor == 1:
            return part
        if not part.is_cpu or part.numel() > STRIP:
            return self._divide(part, out=part)
        if self._scratch is None:
            self._scratch = torch.empty(STRIP, dtype=torch.float32, device="cpu")
        return self._divide(part, out=self._scratch[: part.numel()])

    def _divide(self, part: Tensor, out: Tensor) -> Tensor:
        if math.frexp(self.divisor)[0] == 0.5:  # a power of two: the same bits in half the time
            torch.mul(part, 1 / self.divisor, out=out)
        else:
            torch.div(part, self.divisor, out=out)
        if self.measured:
            self.square += float(torch.linalg.vector_norm(out)) ** 2 if out.is_cuda else float(torch.dot(out, out))
        return out
