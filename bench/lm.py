"""What a quality run is made of: tokens, gradients of all replicas at once, inner optimizers, the learning rate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import thinwire as tw
from thinwire.optim.muon import COEFFICIENTS, lr_ratio
from thinwire.train.models import PRESETS, Llama, Shape

# tiny: to see that runs start; 0.2M: for a CPU
SHAPES = {**PRESETS, "tiny": Shape(6, 32, 2, 88), "0.2M": Shape(5, 64, 2, 172)}
WARM_UP = 100


class Corpus:
    """Tokens on the device; a batch is a function of its step and the seed. `second` is another corpus to test on."""

    def __init__(self, folder: Path, device: str, context: int) -> None:
        self.vocabulary = json.loads((folder / "facts.json").read_text())["vocabulary"]
        self.device, self.context = device, context
        self.train, self.held = self._read(folder / "train.bin"), self._read(folder / "held.bin")
        self.second = self._read(folder / "second.bin") if (folder / "second.bin").exists() else None

    def _read(self, path: Path) -> Tensor:
        return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int32)).to(self.device)

    def batch(self, step: int, rows: int, seed: int) -> Tensor:  # (rows, context + 1)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - self.context - 1, (rows,), generator=generator)
        return self._windows(self.train, starts)

    def batches(self, tokens: Tensor, rows: int, count: int) -> list[Tensor]:
        """The same `rows * count` windows each time, spread over all of `tokens`."""
        starts = torch.linspace(0, len(tokens) - self.context - 2, rows * count).long()
        return [self._windows(tokens, part) for part in starts.split(rows)]

    def _windows(self, tokens: Tensor, starts: Tensor) -> Tensor:
        return tokens[starts.to(self.device)[:, None] + torch.arange(self.context + 1, device=self.device)].long()


def build(preset: str, corpus: Corpus, seed: int, compiled: bool) -> Llama:
    torch.manual_seed(seed)
    model = Llama(SHAPES[preset], corpus.vocabulary, corpus.context).to(corpus.device)
    for block in model.model.layers if compiled else ():
        block.compile(dynamic=False)  # one block's code serves all blocks of all replicas
    return model


def _head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())


_compiled_head: Callable[..., Tensor] = torch.compile(_head, dynamic=False)


def loss_of(model: Llama, tokens: Tensor, compiled: bool = False) -> Tensor:
    head = _compiled_head if compiled else _head
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        return head(model.model(tokens[:, :-1]), model.model.embed_tokens.weight, tokens[:, 1:])


class Gradients:
    """Forward and backward of all replicas; on a GPU one CUDA graph, a stream per replica."""

    def __init__(self, models: list[Llama], rows: int, corpus: Corpus, compiled: bool) -> None:
        self.models, self.compiled, self.graph = models, compiled, None
        shape = (rows, corpus.context + 1)
        self.inputs = [torch.zeros(shape, dtype=torch.long, device=corpus.device) for _ in models]
        if corpus.device == "cuda":
            self._capture()

    def _run(self) -> Tensor:
        main, losses = (torch.cuda.current_stream() if self.inputs[0].is_cuda else None), []
        for i, (model, tokens) in enumerate(zip(self.models, self.inputs, strict=True)):
            if main is None:
                losses.append(self._one(model, tokens))
                continue
            self.streams[i].wait_stream(main)
            with torch.cuda.stream(self.streams[i]):
                losses.append(self._one(model, tokens))
        for stream in self.streams if main else ():
            main.wait_stream(stream)
        return torch.stack(losses)

    def _one(self, model: Llama, tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens, self.compiled)
        loss.backward()
        return loss.detach()

    def _capture(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in self.models]
        for _ in range(3):
            self._run()
        torch.cuda.synchronize()
        for model in self.models:
            model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = self._run()
        self.parameters = [p for model in self.models for p in model.parameters()]
        self.grads = [p.grad for p in self.parameters]

    def step(self, tokens: Tensor) -> Tensor:
        for static, part in zip(self.inputs, tokens.chunk(len(self.inputs)), strict=True):
            static.copy_(part)
        if self.graph is None:
            return self._run()
        torch._foreach_zero_(self.grads)
        for parameter, gradient in zip(self.parameters, self.grads, strict=True):
            parameter.grad = gradient
        self.graph.replay()
        return self.losses


class StackedMuon(Optimizer):
    """Muon with Adam's scale (0.2 sqrt(longer side)), matrices of one shape in one batched Newton-Schulz.

    The numbers are those of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, up to the order of bf16 sums; dozens of
    small matrices in M replicas would otherwise be bound by their launches. `momentum` is how slowly the buffer
    forgets, `share` what it counts for beside the fresh gradient: torch's Muon has one number for both.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95, share: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "share": share})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in alike.items():
                self._update(parameters, group, lr_ratio(shape, "match_rms_adamw"))

    def _update(self, parameters: list[nn.Parameter], group: dict, ratio: float) -> None:
        gradients, momentum, lr = [p.grad for p in parameters], group["momentum"], group["lr"]
        for parameter in parameters:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        directions = orthogonal(torch.stack(torch._foreach_lerp(gradients, buffers, group["share"])))
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, list(directions.float().unbind()), alpha=-lr * ratio)


class SlowAdam(Optimizer):
    """AdamW with a slow first moment u beside the fresh gradient, as MT-DAO (arXiv 2510.05361) has it.

    x -= lr * ((1 - share) * g + share * u) / (sqrt(v) + eps), u and v corrected for their start.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], share: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "share": share, "weight_decay": 0.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            slow, fast = group["betas"]
            held = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in held]
            for p in held:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(name, torch.zeros_like(p))
            u, v = ([self.state[p][name] for p in held] for name in ("exp_avg", "exp_avg_sq"))
            torch._foreach_lerp_(u, gradients, 1 - slow)
            torch._foreach_mul_(v, fast)
            torch._foreach_addcmul_(v, gradients, gradients, 1 - fast)
            roots = torch._foreach_sqrt(torch._foreach_div(v, 1 - fast**self.count))
            torch._foreach_add_(roots, 1e-8)
            updates = torch._foreach_div(u, (1 - slow**self.count) / group["share"])
            torch._foreach_add_(updates, gradients, alpha=1 - group["share"])
            torch._foreach_mul_(held, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_addcdiv_(held, updates, roots, -group["lr"])


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns) -> the same in bf16, with singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def optimizers_of(name: str, model: Llama, lr: float, decay: float = 0.1) -> list[Optimizer]:
    """Weight decay on matrices; with Muon the embedding and the norms stay with AdamW at the same rate.

    So they do with "adopt+adamw". ADOPT's second moment begins as the first gradient's square and with the published
    beta of .9999 hardly moves in a short run; "adopt.99+adamw" has .99. "slow adamw" and "slow muon" have a slow
    momentum beside the fresh gradient; the first moment of "quick adamw" forgets twice as fast.
    """
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" in n]
    others = [p for p in model.parameters() if p.ndim < 2]
    fused = embeddings[0].is_cuda
    if name == "adopt":
        return [tw.ADOPT(model.parameters(), lr=lr)]
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=lr)]
    matrices = embeddings + inner if name.endswith("adamw") and "+" not in name else embeddings
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    adam = AdamW(groups, lr=lr, betas=(0.8 if name == "quick adamw" else 0.9, 0.95), fused=fused)
    if name in ("adamw", "quick adamw"):
        return [adam]
    if name in ("adopt+adamw", "adopt.99+adamw"):
        betas = (0.95, 0.99 if ".99" in name else 0.9999)
        return [tw.ADOPT(inner, lr=lr, betas=betas, weight_decay=decay), adam]
    if name == "slow adamw":
        return [SlowAdam(groups, lr, betas=(0.99, 0.95), share=0.9)]
    if name in ("muon", "slow muon"):
        return [StackedMuon(inner, lr, decay, momentum=0.99 if "slow" in name else 0.95), adam]
    known = "adamw, slow adamw, quick adamw, muon, slow muon, adopt, adopt+adamw, adopt.99+adamw or sgd"
    raise ValueError(f"optimizer must be {known}, not {name!r}")


def rate_at(step: int, steps: int, peak: float) -> float:
    """Warm-up, then a cosine to a tenth."""
    warm = min(WARM_UP, steps // 5)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))
