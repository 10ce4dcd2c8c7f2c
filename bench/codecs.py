"""How fast codecs write and read, beside a plain copy of the same bytes in the same run.

    python bench/codecs.py                        # every device there is; a table
    python bench/codecs.py --device cuda --out codecs.json
    python bench/codecs.py --only DCT             # and what it is held against

The message is one row of 124M parameters in GPT-2's shapes. `encode` gives the payload; `with residual` also what the
others will read, and what is left when that is subtracted; `decode` reads one payload, `merge of 4` four.
The last lines hold DCT + top-k against the published way: one tensor at a time, `torch.topk`, 8-byte indices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codec import DCT, E3M0, BFloat16, Codec, Float32, Int8, Layout, TopK, TwoBit

CODECS: list[Codec] = [
    Float32(),
    BFloat16(),
    Int8(),
    E3M0(),
    TwoBit(),
    TopK(64, values=TwoBit()),
    DCT(TopK(32, values=BFloat16())),
]
PER_LAYER = [(768,)] * 2 + [(768, 2304), (2304,), (768, 768), (768,)] + [(768,)] * 2
PER_LAYER += [(768, 3072), (3072,), (3072, 768), (768,)]
GPT2 = [(50257, 768), (1024, 768), *PER_LAYER * 12, (768,), (768,)]
WORKERS = 4
PUBLISHED = "published DCT + top-k"
Part = tuple[str, str]  # a codec, and what it does


@dataclass
class Timing:
    device: str
    what: str
    part: str
    ms: float
    gb_per_s: float
    times_copy: float


def medians(works: dict[Part, Callable[[], object]], device: torch.device, repeats: int) -> dict[Part, float]:
    """Milliseconds, of `repeats` runs after two that warm up; all in turn, so that what else the machine does at the
    time slows all of them."""
    times: dict[Part, list[float]] = {part: [] for part in works}
    for _ in range(repeats + 2):
        for part, work in works.items():
            settle(device)
            start = time.perf_counter()
            work()
            settle(device)
            times[part].append(1e3 * (time.perf_counter() - start))
    return {part: statistics.median(found[2:]) for part, found in times.items()}


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def message(codec: Codec, device: torch.device, seed: int = 0) -> tuple[Layout, Tensor]:
    """Random values, never zeros: those are faster."""
    layout = Layout(tuple(torch.Size(shape) for shape in GPT2), codec.align)
    buffer = layout.zeros(device)
    for view in layout.views(buffer):
        view.view(-1).copy_(noise(device)[seed : seed + view.numel()])
    return layout, buffer


@cache
def noise(device: torch.device) -> Tensor:
    return torch.randn(50257 * 768 + WORKERS, generator=torch.Generator(device).manual_seed(0), device=device)


def ours(codec: Codec, device: torch.device) -> dict[str, Callable[[], object]]:
    layout, buffer = message(codec, device)
    payloads = [codec.encode(message(codec, device, seed)[1], layout).clone() for seed in range(WORKERS)]

    def with_residual() -> Tensor:
        _, own = codec.encode_with_own(buffer, layout)
        return torch.sub(buffer, own, out=own)

    return {
        "encode": lambda: codec.encode(buffer, layout),
        "with residual": with_residual,
        "decode": lambda: codec.decode(payloads[0], layout),
        "merge of 4": lambda: codec.merge(payloads, [1.0] * WORKERS, layout),
    }


class PerTensor:
    """DCT + top-k as published: a loop over tensors, blocks of the largest divisor up to 64, einsum, topk, scatter."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.k, self.bases = k, {size: basis(size).to(device) for size in range(1, 65)}

    def blocks(self, x: Tensor) -> Tensor:
        """(rows, columns) -> (down, across, high, wide); a vector -> (across, wide)."""
        wide = divisor(x.shape[-1])
        if x.dim() == 1:
            return x.view(-1, wide)
        high = divisor(x.shape[0])
        return x.view(-1, high, x.shape[1] // wide, wide).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.blocks(x)
        if x.dim() == 1:
            return torch.einsum("ai,ki->ak", blocks, self.bases[blocks.shape[-1]])
        left, right = self.bases[blocks.shape[-2]], self.bases[blocks.shape[-1]]
        return torch.einsum("abij,ki,lj->abkl", blocks, left, right).flatten(2).flatten(0, 1)

    def inverse(self, coefficients: Tensor, like: Tensor) -> Tensor:
        if like.dim() == 1:
            return torch.einsum("ak,ki->ai", coefficients, self.bases[coefficients.shape[-1]]).reshape(like.shape)
        grid = self.blocks(like).shape
        left, right = self.bases[grid[2]], self.bases[grid[3]]
        out = torch.einsum("abkl,ki,lj->abij", coefficients.view(grid), left, right)
        return out.permute(0, 2, 1, 3).reshape(like.shape)

    def encode(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Indices and values of each tensor; what they say is taken off the tensor."""
        sent = []
        for x in tensors:
            found = self.forward(x)
            index = found.abs().topk(min(self.k, found.shape[1]), dim=1, sorted=False).indices
            sent.append((index, found.gather(1, index)))
            x.sub_(self.inverse(torch.zeros_like(found).scatter_(1, *sent[-1]), x))
        return sent

    def merge(self, received: list[list[tuple[Tensor, Tensor]]], like: list[Tensor]) -> list[Tensor]:
        out = []
        for which, x in enumerate(like):
            index = torch.cat([worker[which][0] for worker in received], 1)
            values = torch.cat([worker[which][1] for worker in received], 1)
            blocks = self.blocks(x)
            empty = x.new_zeros(len(index), x.numel() // len(index))
            assert blocks.numel() == empty.numel()
            merged = empty.scatter_reduce_(1, index, values, reduce="mean", include_self=False)
            out.append(self.inverse(merged, x))
        return out


def basis(size: int) -> Tensor:
    place, frequency = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    rows = torch.cos(torch.pi * (2 * place + 1) * frequency / (2 * size)) * (2 / size) ** 0.5
    rows[0] /= 2**0.5
    return rows.float()


def divisor(size: int) -> int:
    return max(d for d in range(1, 65) if size % d == 0)


def published(device: torch.device) -> dict[str, Callable[[], object]]:
    codec = PerTensor(32, device)
    layout, buffer = message(Float32(), device)
    tensors = layout.views(buffer)
    received = [codec.encode(layout.views(message(Float32(), device, seed)[1])) for seed in range(WORKERS)]
    return {"with residual": lambda: codec.encode(tensors), "merge of 4": lambda: codec.merge(received, tensors)}


def measure(device: torch.device, repeats: int, only: str = "") -> list[Timing]:
    layout, buffer = message(Float32(), device)
    other, gigabytes = torch.empty_like(buffer), 4e-9 * layout.values
    found = medians({("copy", "copy"): lambda: other.copy_(buffer)}, device, repeats)
    for codec in (codec for codec in CODECS[:-1] if only in repr(codec)):
        found |= medians(named(repr(codec), ours(codec, device)), device, repeats)
    held = named(repr(CODECS[-1]), ours(CODECS[-1], device)) | named(PUBLISHED, published(device))
    found |= medians(held, device, repeats)
    copy = found["copy", "copy"]
    return [Timing(device.type, *part, ms, 1e3 * gigabytes / ms, ms / copy) for part, ms in found.items()]


def named(what: str, works: dict[str, Callable[[], object]]) -> dict[Part, Callable[[], object]]:
    return {(what, part): work for part, work in works.items()}


def show(timings: list[Timing]) -> None:
    print(f"{'device':6} {'codec':64} {'part':13} {'ms':>9} {'GB/s':>8} {'x copy':>7}")
    for t in timings:
        print(f"{t.device:6} {t.what:64} {t.part:13} {t.ms:9.2f} {t.gb_per_s:8.1f} {t.times_copy:7.2f}")


def gains(timings: list[Timing]) -> dict[str, float]:
    """How many times faster than published DCT + top-k is, per device and part."""
    at = {(t.device, t.what, t.part): t.ms for t in timings}
    mine = repr(CODECS[-1])
    return {
        f"{device} {part}": ms / at[device, mine, part] for (device, what, part), ms in at.items() if what == PUBLISHED
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only this one")
    parser.add_argument("--only", default="", help="codecs whose name has this in it, and DCT + top-k")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    there = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    devices = [options.device] if options.device else there
    timings = [t for name in devices for t in measure(torch.device(name), options.repeats, options.only)]
    show(timings)
    for what, times in gains(timings).items():
        print(f"{what}: {times:.1f}x faster than published")
    if options.out:
        machine = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
        machine["load"] = os.getloadavg()[0]  # other work on the machine makes a CPU's numbers worse
        machine["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        report = {
            "torch": torch.__version__,
            **machine,
            "timings": [asdict(t) for t in timings],
            "gains": gains(timings),
        }
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
