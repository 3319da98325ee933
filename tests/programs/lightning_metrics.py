"""Two metrics that are logged on two workers, by Lightning; for `test_frameworks`."""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.lightning import JoinedStrategy


class Logger(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, index):
        own = float(gossamer.rank() + 1)
        self.log("total", 10 * own, reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)
        self.log("mean", own, sync_dist=True, on_step=False, on_epoch=True)
        self.log("most", 100 * own, reduce_fx="max", sync_dist=True, on_step=False, on_epoch=True)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    strategy=JoinedStrategy(sys.argv[1]), max_epochs=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1,
)  # fmt: skip
trainer.fit(Logger(), DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=4))
steps = trainer.global_step
found = {name: value.item() for name, value in trainer.callback_metrics.items()}
print(f"worker {gossamer.rank()}: {steps} steps,", *(found[n] for n in ("total", "mean", "most")))
