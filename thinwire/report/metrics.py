"""metrics.jsonl, TensorBoard and W&B: one record a step."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

Record = dict[str, Any]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Lines:
    """`metrics.jsonl`: each line is on its way to the disk before the next step ends."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def write(self, record: Record) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """What stands there from step `first` on is dropped: a run that was killed writes it again."""

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first)

    def write(self, record: Record) -> None:
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, project: str, folder: Path, config: Record) -> None:
        self.run = importlib.import_module("wandb").init(
            project=project, dir=str(folder), name=folder.name, config=config, resume="allow"
        )

    def write(self, record: Record) -> None:
        self.run.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


def _numbers(record: Record) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}


def read(path: Path) -> list[Record]:
    """All whole records; a run that was killed may have left half of a last one, a power loss anything behind it."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line.decode())
        except ValueError:  # also where it is no UTF-8
            break
        if not (isinstance(record, dict) and type(record.get("step")) is int):
            break
        records.append(record)
    return records


def cut_after(path: Path, step: int) -> Record | None:
    """Drop what came after a checkpoint: the resumed run writes it again. Returns the last record kept."""
    if not path.exists():
        return None
    kept = [record for record in read(path) if record["step"] <= step]
    draft = path.with_suffix(".draft")
    try:
        draft.write_text("".join(json.dumps(record) + "\n" for record in kept))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)  # of a full disk
    return kept[-1] if kept else None
