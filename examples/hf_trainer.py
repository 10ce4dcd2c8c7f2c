"""transformers' Trainer on two workers, each in a torchrun of its own: a callback joins them.

    torchrun --standalone --nproc-per-node 1 examples/hf_trainer.py --worker 0      # in one shell
    torchrun --standalone --nproc-per-node 1 examples/hf_trainer.py --worker 1      # in another

On two machines, give both --connect HOST:PORT with worker 0's address. The Trainer of each worker believes that it is
alone, so that it never crosses the line: only the callback does, every 10 steps.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import thinwire as tw
from thinwire.integrations.hf import ThinwireCallback


def windows(worker: int, workers: int, context: int = 64) -> list[dict[str, torch.Tensor]]:
    """This worker's share of a text that every machine has: the source of Python's argparse, as bytes."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // context * context].view(-1, context)[worker::workers]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", default="127.0.0.1:29510")
    parser.add_argument("--folder", default="runs/hf_trainer")
    chosen = parser.parse_args()

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    transport = tw.Group.connect(chosen.connect, worker=chosen.worker, workers=chosen.workers)
    data = windows(chosen.worker, chosen.workers)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{chosen.folder}/{chosen.worker}",  # checkpoints hold a worker's own part: a folder each
            max_steps=60,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=30,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=data[8:],
        eval_dataset=windows(0, 1)[:32],
        callbacks=[ThinwireCallback(tw.desloc(every=10), transport)],
    )
    trainer.train()  # or trainer.train(resume_from_checkpoint=True), on both workers
    trainer.save_model()  # the common model: the callback has finished the fleet
    print(f"worker {chosen.worker}: loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
