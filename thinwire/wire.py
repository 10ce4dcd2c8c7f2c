"""How a row's messages are written, what they weigh, and how answers are read: the codec's side of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codec.base import Codec, Layout, Part, Weight, divide_by_weights
from .cost import exchange_kind, wire_bytes
from .flight import Answer
from .header import Header
from .transport import AllSick, Order

if TYPE_CHECKING:
    from .fleet import Fleet


class Wire:
    """One row's messages between `encode` and the mean."""

    def __init__(self, codec: Codec, layout: Layout, fleet: Fleet) -> None:
        self.codec, self.layout, self.fleet = codec, layout, fleet

    @property
    def kind(self) -> str:
        return exchange_kind(self.codec, self.fleet.workers)

    @property
    def second(self) -> Codec:
        assert self.codec.second is not None
        return self.codec.second

    def size(self) -> int:
        """Bytes of a message of the whole worker."""
        return self.fleet.island.total(self.codec.size(self.layout))

    def count(self, size: int) -> None:
        """One round more has been sent."""
        fleet = self.fleet
        back = fleet.island.total(self.second.size(self.layout)) if self.kind == "two_shot" else 0
        moved = wire_bytes(self.kind, size, back, fleet.workers) + (fleet.workers - 1) * fleet.header_length
        fleet.bytes_sent += size
        fleet.wire_sent += moved
        fleet.wire_received += moved

    def parts(self) -> list[Part]:
        if self.kind == "two_shot":
            return self.layout.parts(self.fleet.transport.parts)
        return [Part(0, self.layout.total, self.layout)]

    # -- out -------------------------------------------------------------------------------------------------------

    def encode(self, message: Tensor, weight: float, own: bool) -> tuple[Tensor | list[Tensor], Tensor | None]:
        """What to send, and if wanted the message as the others will read it; a linear one is scaled in place."""
        if self.codec.linear:
            kept = message.clone() if own else None
            return message if weight == 1 else message.mul_(weight), kept
        pieces = [(message[part.start : part.stop], part.layout) for part in self.parts()]
        if own:
            both = [self.codec.encode_with_own(*piece) for piece in pieces]
            payloads, owns = [payload for payload, _ in both], [own for _, own in both]
            kept = owns[0] if len(owns) == 1 else torch.cat(owns)
        else:
            payloads, kept = [self.codec.encode(*piece) for piece in pieces], None
        return payloads if self.kind == "two_shot" else payloads[0], kept

    def plan_second_leg(self, order: Order) -> None:
        parts = self.parts()

        def reduce(index: int, payloads: Sequence[Tensor], headers: list[bytes]) -> Tensor:
            part = parts[index]
            weights, _ = self.weights(self.unpacked(headers), payloads[0].device)
            local = [w[part.start : part.stop] if isinstance(w, Tensor) else w for w in weights]
            return self.second.encode(self.codec.merge(payloads, local, part.layout), part.layout)

        order.reduce = reduce
        order.second_sizes = [self.second.size(part.layout) for part in parts]

    # -- back ------------------------------------------------------------------------------------------------------

    def unpacked(self, headers: list[bytes]) -> list[Header]:
        return [Header.unpack(blob, len(self.layout.shapes)) for blob in headers]

    def weights(self, headers: list[Header], device: torch.device) -> tuple[list[Weight], list[bool] | None]:
        """One weight a worker; one a value where some worker lacks some tensor."""
        if all(all(header.present) for header in headers):
            return [header.weight for header in headers], None
        spans = torch.tensor(self.layout.spans, device=device)
        masks = [torch.tensor(header.present, device=device).repeat_interleave(spans) for header in headers]
        held = [any(h.present[i] and h.weight for h in headers) for i in range(len(self.layout.shapes))]
        return [mask.float() * header.weight for mask, header in zip(masks, headers, strict=True)], held

    def answer(self, headers: list[Header], result: Tensor | list[Tensor], device: torch.device) -> Answer:
        total = sum(header.weight for header in headers)
        if total == 0:
            raise AllSick("no worker had a finite message of any weight")
        weights, held = self.weights(headers, device)
        first = self.fleet.worker
        shares = [header.weight / total for header in headers[first : first + len(self.fleet.replicas)]]
        unequal = len({header.checksum for header in headers}) > 1
        source = next(i for i, header in enumerate(headers) if header.weight) if unequal else None
        if isinstance(result, Tensor) and held is None:
            return Answer(result, shares, held, source, total, headers)
        return Answer(self._mean(result, weights), shares, held, source, headers=headers)

    def _mean(self, result: Tensor | list[Tensor], weights: list[Weight]) -> Tensor:
        if isinstance(result, Tensor):
            return divide_by_weights(result, weights)
        if self.kind == "gather":
            return self.codec.merge(result, weights, self.layout)
        pieces = zip(result, self.parts(), strict=True)
        return torch.cat([self.second.decode(payload, part.layout) for payload, part in pieces])
