"""A ResNet for small images: three or four stages of basic blocks with BatchNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.train.errors import UserError, nearest

# blocks of each stage and the width of the first; each next stage halves the image and doubles the width
PRESETS = {"tiny": ((1, 1), 16), "20": ((3, 3, 3), 16), "18": ((2, 2, 2, 2), 64)}


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, classes)."""

    def __init__(self, stages: tuple[int, ...], width: int, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, before = [], width
        for stage, count in enumerate(stages):
            after = width * 2**stage
            blocks += [Residual(before if i == 0 else after, after, 2 if stage and i == 0 else 1) for i in range(count)]
            before = after
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def resnet(preset: str, channels: int, classes: int) -> ResNet:
    preset = "tiny" if preset == "1M" else preset  # the text presets' default name
    if preset not in PRESETS:
        raise UserError(f"model.preset = {preset!r}: {nearest(preset, PRESETS)}")
    if not channels:
        raise UserError("model.kind = 'resnet' needs images: set data.kind = 'digits', or data.files to an .npz file")
    stages, width = PRESETS[preset]
    return ResNet(stages, width, channels, classes)
