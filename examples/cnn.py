"""A ResNet with BatchNorm on two workers, under DiLoCo and under decoupled momentum.

    torchrun --standalone --nproc-per-node 2 examples/cnn.py

Every method has one more row that carries BatchNorm's running statistics, so the common model evaluates as it should.
"""

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw

STEPS, BATCH, SIDE, CLASSES = 48, 32, 16, 4


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.skip = nn.Conv2d(inside, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (deep + self.skip(x)).relu()


def resnet() -> nn.Sequential:
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    body = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def stripes(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy stripes; the class is their direction."""
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    angle = (labels * torch.pi / CLASSES).view(-1, 1, 1)
    along, across = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    shift = torch.rand(count, 1, 1, generator=generator) * 6
    images = (along * angle.cos() + across * angle.sin() + shift).sin()
    return (images + torch.randn(images.shape, generator=generator)).unsqueeze(1), labels


def train(method: tw.Method) -> None:
    model = resnet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fleet = tw.attach(model, optimizer, method)
    generator = torch.Generator().manual_seed(fleet.worker)  # every worker has its own data
    for _ in range(STEPS):
        images, labels = stripes(BATCH, generator)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()

    images, labels = stripes(256, torch.Generator().manual_seed(99))
    with torch.no_grad():
        right = (model.eval()(images).argmax(1) == labels).float().mean()
    if fleet.worker == 0:
        print(f"{method.name}: {right:.0%} right, {fleet.bytes_sent / 1e3:.0f} kB sent")


def main() -> None:
    dist.init_process_group("gloo")
    train(tw.diloco(every=8))
    train(tw.decoupled_momentum(every=8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
