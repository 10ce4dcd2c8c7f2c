"""Inner optimizers and learning-rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from thinwire.train.config import Optimizer as OptimizerConfig
from thinwire.train.config import Schedule
from thinwire.train.errors import UserError


def build(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """The optimizers of one replica: one, or Muon for the inner matrices and AdamW for the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.name == "muon":
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        inner = [p for name, p in named if p.ndim == 2 and not _outer(name) and id(p) not in tables]
        rest = [p for name, p in named if p.ndim != 2 or _outer(name) or id(p) in tables]
        if not inner:
            raise UserError("optimizer.name = 'muon' is for matrices, and this model has none within: use adamw")
        muon = tw.Muon(inner, lr=config.lr, momentum=config.momentum or 0.95, weight_decay=config.weight_decay)
        return [muon, _adamw(rest, config)] if rest else [muon]
    params = [p for _, p in named]
    if config.name == "adamw":
        return [_adamw(params, config)]
    if config.name == "adopt":
        first, second = config.betas
        return [tw.ADOPT(_groups(params, config.weight_decay), lr=config.lr, betas=(first, second), eps=config.eps)]
    return [torch.optim.SGD(_groups(params, config.weight_decay), lr=config.lr, momentum=config.momentum)]


def _outer(name: str) -> bool:
    """Embeddings and heads are tables of vectors, not maps: Muon is not for them. Some models call them otherwise."""
    return "embed" in name or "head" in name


def _groups(params: Sequence[Tensor], weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, norms and biases do not."""
    groups = ([p for p in params if p.ndim > 1], weight_decay), ([p for p in params if p.ndim <= 1], 0.0)
    return [{"params": part, "weight_decay": decay} for part, decay in groups if part]


def _adamw(params: Sequence[Tensor], config: OptimizerConfig) -> Optimizer:
    first, second = config.betas
    fused = params[0].is_cuda  # one kernel for all tensors: launches are what hosting many replicas costs
    groups = _groups(params, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=fused)


def lr_factor(step: int, steps: int, config: Schedule) -> float:
    """The share of the peak learning rate at a step, counted from 1. No state: a resume needs the step alone."""
    if step <= config.warmup:
        return step / max(1, config.warmup)
    if config.name == "constant":
        return 1.0
    if config.name == "wsd":
        tail = max(1, round(config.decay * steps))
        into = step - (steps - tail)  # steps of decay behind us
        return 1.0 if into <= 0 else max(0.0, 1 - math.sqrt(into / tail))
    progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizers: list[Optimizer], factor: float, peak: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
