"""Lightning's Trainer on two workers, each a program of its own: a callback joins them.

    python examples/lightning_trainer.py --worker 0      # in one shell
    python examples/lightning_trainer.py --worker 1      # in another

On two machines, give both --connect HOST:PORT with worker 0's address. Lightning's checkpoints hold the worker's part
of the fleet's state, so `trainer.fit(..., ckpt_path=...)` takes up the run where it was.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import ThinwireCallback


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))  # of the consensus

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(seed: int, count: int) -> DataLoader:
    """Points of a surface; every worker has its own."""
    inputs = torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    targets = (inputs[:, :1] * 2).sin() * inputs[:, 1:].cos()
    return DataLoader(TensorDataset(inputs, targets), batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", default="127.0.0.1:29520")
    parser.add_argument("--folder", default="runs/lightning_trainer")
    chosen = parser.parse_args()

    transport = tw.Group.connect(chosen.connect, worker=chosen.worker, workers=chosen.workers)
    callback = ThinwireCallback(tw.diloco(every=16), transport)
    trainer = Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        default_root_dir=f"{chosen.folder}/{chosen.worker}",  # checkpoints hold a worker's own part: a folder each
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader(chosen.worker, 2048), loader(99, 512))
    loss, sent = trainer.callback_metrics["loss"], callback.fleet.bytes_sent
    print(f"worker {chosen.worker}: loss {loss:.4f}, {sent / 1e3:.0f} kB sent")


if __name__ == "__main__":
    main()
