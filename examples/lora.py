"""LoRA on two workers: frozen weights never travel, so a round costs the adapters and no more.

    python examples/lora.py --worker 0      # in one shell
    python examples/lora.py --worker 1      # in another

The base weights must be the same on every worker (here they come from one seed; usually, from one checkpoint): a
frozen tensor that differs is an error that names it.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import thinwire as tw

STEPS, BATCH, CONTEXT = 40, 8, 64


def adapted_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": CONTEXT}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", default="127.0.0.1:29550")
    chosen = parser.parse_args()

    model = adapted_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    method = tw.diloco(every=10)
    transport = tw.Group.connect(chosen.connect, worker=chosen.worker, workers=chosen.workers)
    fleet = tw.attach(model, optimizer, method, transport)

    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    text = text.chunk(chosen.workers)[chosen.worker]  # every worker has its own data
    generator = torch.Generator().manual_seed(chosen.worker)
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - CONTEXT, (BATCH,), generator=generator).tolist()
        tokens = torch.stack([text[at : at + CONTEXT] for at in starts])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.finish()

    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    rounds = STEPS // 10
    print(
        f"worker {chosen.worker}: {fleet.bytes_sent} bytes in {rounds} rounds: {4 * adapters} a round; "
        f"all weights would be {4 * whole}"
    )


if __name__ == "__main__":
    main()
