"""Lightning's Trainer: `gossamer run -n 2 examples/integrations/lightning_fit.py`.

It clips and accumulates as it does alone: one exchange to four batches.
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.lightning import JoinedStrategy

torch.manual_seed(0)
inputs = torch.randn(256, 10)
data = TensorDataset(inputs, inputs[:, :3].argmax(1))
norms = []


class Classifier(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, index):  # noqa: ANN001, ANN201
        """The loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index) -> None:  # noqa: ANN001
        """The loss of the output model."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

    def configure_gradient_clipping(self, optimizer, *given, **named) -> None:  # noqa: ANN001, ANN002, ANN003
        """Clip as asked, and look at the gradient afterwards."""
        super().configure_gradient_clipping(optimizer, *given, **named)
        squares = [p.grad.square().sum() for p in self.parameters()]
        norms.append(float(sum(squares).sqrt()))

    def configure_optimizers(self):  # noqa: ANN201
        """Adam, and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


model = Classifier()
strategy = JoinedStrategy(sys.argv[1] if sys.argv[1:] else "all_reduce")
trainer = lightning.Trainer(
    strategy=strategy, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=0.25,
    callbacks=[EarlyStopping("loss", patience=5)], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1,
)  # fmt: skip
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=256))
loss = nn.functional.cross_entropy(model.net(data.tensors[0]), data.tensors[1]).item()
steps = strategy.worker.observer.metrics.workers[strategy.worker.rank].steps
norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
print(
    f"worker {gossamer.rank()} of {gossamer.size()}: {steps} steps, gradients of at most "
    f"{max(norms):.4f}, loss {loss:.4f}, model {norm:.9f}"
)
