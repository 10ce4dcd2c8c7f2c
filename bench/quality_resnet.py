"""A ResNet-20 on Fashion-MNIST at equal images: decoupled momentum against DiLoCo, M replicas in one process.

    python bench/quality_resnet.py --data data/fashion --out bench/results/resnet_fashion.json
    python bench/quality_resnet.py --blocks 1 --images 128 --steps 1536 --parallel 2 --out small.json  # for a CPU

The folder holds the four idx files (.gz) of the Debian package dataset-fashion-mnist. Runs share the device, several
at a time, and the file is written again after each: what a time limit cuts off, the same command again adds.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lm import Gradients
from quality_cnn import evaluate
from results import machine, save, say
from torch import Tensor, nn

import thinwire as tw

RATE, WEIGHT_DECAY = 2e-3, 0.05  # of AdamW
METHODS = {
    "ddp": tw.ddp(),
    "diloco 128": tw.diloco(128),
    "diloco 512": tw.diloco(512),
    "consensus": tw.decoupled_momentum(128, variant="consensus"),
    "consensus, 256": tw.decoupled_momentum(128, topk=256, variant="consensus"),
    "mean": tw.decoupled_momentum(128, variant="mean"),
    "paper": tw.decoupled_momentum(128, variant="paper"),
}
Data = tuple[Tensor, Tensor, Tensor, Tensor]  # images and labels to train on, and those held out


class Block(nn.Module):
    """Two convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.beside: nn.Module = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.beside(x))


def resnet(seed: int, widths: tuple[int, ...] = (16, 32, 64), blocks: int = 3) -> nn.Module:
    """ResNet-20 with 3 blocks a stage, ResNet-8 with one."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(inputs, width, 2 if stage and not block else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def read_idx(path: Path) -> Tensor:
    """Numbers of one byte: two zeros, the type (8), the number of dimensions, each as four bytes, then the values."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no idx file of bytes; take those of the package dataset-fashion-mnist")
    shape = np.frombuffer(raw, ">u4", raw[3], 4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(*shape).copy())


def read_images(folder: Path, device: str) -> Data:
    found = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz").to(device)
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz").to(device)
        found += [(images[:, None].float() / 255 - 0.286) / 0.353, labels.long()]  # mean and deviation of all pixels
    return found[0], found[1], found[2], found[3]


class ImageGradients(Gradients):
    """Forward and backward of all replicas, each on its part of the picked images; one CUDA graph on a GPU."""

    def __init__(self, models: list[nn.Module], images: Tensor, labels: Tensor, count: int) -> None:
        self.models, self.images, self.labels, self.graph = models, images, labels, None  # type: ignore[assignment]
        self.inputs = [torch.zeros(count, dtype=torch.long, device=images.device) for _ in models]
        if images.is_cuda:
            self._capture()
            for norm in (m for model in models for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
                norm.reset_running_stats()  # from before the warm-up of the capture

    def _one(self, model: nn.Module, picks: Tensor) -> Tensor:
        loss = F.cross_entropy(model(self.images[picks]), self.labels[picks])
        loss.backward()
        return loss.detach()


def rate_at(step: int, steps: int) -> float:
    """A short warm-up, then a cosine to zero."""
    warm = max(1, steps // 20)
    return RATE * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    method: tw.Method, workers: int, steps: int, count: int, seed: int, data: Data, base: nn.Module
) -> dict[str, Any]:
    """`count` images a step over all workers."""
    images, labels, held, answers = data
    models = [copy.deepcopy(base).to(images.device) for _ in range(workers)]
    inner = [
        torch.optim.AdamW(m.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY, fused=images.is_cuda) for m in models
    ]
    fleet = tw.Fleet([tw.Replica(*pair) for pair in zip(models, inner, strict=True)], method, tw.Local())
    gradients = ImageGradients(models, images, labels, count // workers)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(labels), (steps, count), generator=generator).to(images.device)
    began, losses = time.monotonic(), torch.zeros(workers)
    for step in range(steps):
        for group in (group for optimizer in inner for group in optimizer.param_groups):
            group["lr"] = rate_at(step, steps)
        losses = gradients.step(picks[step])
        fleet.step()
        fleet.zero_grad()
    facts = {"bytes_sent": fleet.bytes_sent, "wire_received": fleet.wire_received, "train": float(losses.mean())}
    return {**facts, **evaluate(fleet, held, answers), "seconds": time.monotonic() - began}


def one_run(name: str, workers: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    data = read_images(args.data, args.device)
    base = resnet(seed, blocks=args.blocks)
    found = train(METHODS[name], workers, args.steps, args.images, seed, data, base)
    return {"method": name, "workers": workers, "seed": seed, **found}


def of_earlier_calls(out: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that the file holds already, of the same settings."""
    if not out.exists():
        return []
    results = json.loads(out.read_text())["results"]
    runs: list[dict[str, Any]] = results.pop("runs")
    if results != facts:
        raise ValueError(f"{out} holds runs of other settings, {results} instead of {facts}; write to another --out")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/fashion"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--images", type=int, default=256, help="a step, over all workers")
    parser.add_argument("--blocks", type=int, default=3, help="of each of the three stages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    started = machine()
    facts = {"steps": args.steps, "images": args.images, "lr": RATE, "torch": torch.__version__}
    facts |= {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    facts |= {"parameters": sum(p.numel() for p in resnet(0, blocks=args.blocks).parameters())}
    runs = of_earlier_calls(args.out, facts)
    done = {(run["method"], run["workers"], run["seed"]) for run in runs}
    asked = [(name, workers, seed) for seed in args.seeds for workers in (8, 4, 2) for name in METHODS]
    wanted = [run for run in asked if run not in done]
    with ProcessPoolExecutor(args.parallel, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(one_run, *run, args) for run in wanted]):
            runs.append(future.result())
            say(str(runs[-1]))
            save(args.out, args.seeds[0], {**facts, "runs": runs}, started)


if __name__ == "__main__":
    main()
