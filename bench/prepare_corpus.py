"""Turns a text file into tokens for the quality runs: a BPE of the training part, uint16 files, the end held out.

python bench/prepare_corpus.py novels.txt --out data/novels --vocabulary 4096
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = 0.025  # the end of the file, never trained on


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((text[i : i + 100_000] for i in range(0, len(text), 100_000)), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    pieces = [text[i : i + 1_000_000] for i in range(0, len(text), 1_000_000)]
    return np.concatenate([np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(pieces)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8", errors="replace")
    edge = text.index("\n\n", int(len(text) * (1 - HELD_OUT)))
    tokenizer = train_tokenizer(text[:edge], args.vocabulary)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", text[:edge]), ("held", text[edge:])):
        tokens = encode(tokenizer, part)
        tokens.tofile(args.out / f"{name}.bin")
        print(name, len(tokens), "tokens,", len(part.encode()), "bytes")
    (args.out / "facts.json").write_text(json.dumps({"vocabulary": args.vocabulary, "source": args.text.name}))


if __name__ == "__main__":
    main()
