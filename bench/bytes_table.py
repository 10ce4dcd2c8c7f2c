"""The README's table: bytes of each method against DDP, from `tw.cost`, on GPT-2's shapes (124M parameters).

python bench/bytes_table.py
"""

from __future__ import annotations

import torch
from torch import nn

import thinwire as tw


def gpt2() -> nn.Module:
    """GPT-2's parameters, without memory."""
    width = 768
    with torch.device("meta"):
        model = nn.Module()
        model.wte, model.wpe = nn.Embedding(50257, width), nn.Embedding(1024, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 12, 4 * width)  # noqa: E731 - the same shapes as GPT-2's block
        model.blocks = nn.ModuleList(layer() for _ in range(12))
        model.norm = nn.LayerNorm(width)
    return model


def main() -> None:
    model = gpt2()
    fragments = tw.by_layer(model, 4)
    methods = {
        "ddp()": tw.ddp(),
        "local_sgd(32)": tw.local_sgd(32),
        "local_adam(32)": tw.local_adam(32),
        "desloc(32)": tw.desloc(32),
        "desloc(256)": tw.desloc(256),
        "diloco(32)": tw.diloco(32),
        "streaming_diloco(32, by_layer(model, 4))": tw.streaming_diloco(32, fragments),
        "eager_diloco(32, codec=E3M0())": tw.eager_diloco(32, codec=tw.E3M0()),
        "carry_diloco(32)": tw.carry_diloco(32),
        "relay_diloco(32, by_layer(model, 4))": tw.relay_diloco(32, fragments),
        "decoupled_momentum(128)": tw.decoupled_momentum(128),
        "decoupled_momentum(128, topk=256)": tw.decoupled_momentum(128, topk=256),
        "sparseloco(32)": tw.sparseloco(32),
        "sparse_averaging(4)": tw.sparse_averaging(4),
        "two_bit_averaging(64)": tw.two_bit_averaging(64),
        "demo()": tw.demo(),
    }
    base = tw.cost(methods["ddp()"], model, 4).bytes_per_step
    print("| method | bytes a step and worker | fewer than DDP | received at 4 workers, fewer than DDP |")
    print("|---|---|---|---|")
    steps = 3 * 2**12
    ddp_received = tw.cost(methods["ddp()"], model, 4).wire(steps)[1]
    for name, method in methods.items():
        price = tw.cost(method, model, 4)
        fewer, received = base / price.bytes_per_step, ddp_received / price.wire(steps)[1]
        print(f"| `{name}` | {price.bytes_per_step / 1e6:,.3f} MB | {fewer:,.1f}x | {received:,.1f}x |")


if __name__ == "__main__":
    main()
