"""Turns a file of novels into tokens for the quality runs: a BPE, uint16 files, the last novels held out.

python bench/prepare_corpus.py eltec-eng.txt.xz --out data/novels --vocabulary 4096
python bench/prepare_corpus.py eltec-eng.txt.xz --out data/bytes --vocabulary 256 --share 0.25   # for a CPU
python bench/prepare_corpus.py eltec-eng.txt.xz --out data/novels --second wikitext-2/test.txt     # another test set
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = 0.025  # of the file: the novels that begin in its end are never trained on
SEPARATOR = "<|endoftext|>"  # between two novels


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


def read(path: Path, share: float) -> str:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    return text[-int(len(text) * share) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--second", type=Path, help="a text that is only tested on, in the same tokens")
    parser.add_argument("--share", type=float, default=1.0, help="of the file, from its end")
    args = parser.parse_args()
    text = read(args.text, args.share)
    edge = text.index(SEPARATOR, int(len(text) * (1 - HELD_OUT / args.share)))
    tokenizer = train_tokenizer(text[:edge], args.vocabulary)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {"train": text[:edge], "held": text[edge:]}
    if args.second:
        parts["second"] = read(args.second, 1.0)
    for name, part in parts.items():
        tokens = encode(tokenizer, part)
        tokens.tofile(args.out / f"{name}.bin")
        print(name, len(tokens), "tokens,", len(part.encode()), "bytes")
    (args.out / "facts.json").write_text(
        json.dumps({"vocabulary": args.vocabulary, "source": args.text.name, "held": "whole novels"})
    )


if __name__ == "__main__":
    main()
