"""Early stopping and a plateau schedule, decided by all workers together.

gossamer simulate examples/scripts/early_stopping.py --workers 8 --slow 0=4
gossamer run -n 2 --method ad_psgd examples/scripts/early_stopping.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import gossamer

PATIENCE = 3


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(768, 12)
    targets = (inputs @ torch.randn(12, 4) + torch.randn(768, 4)).argmax(1)
    train, held_out = (TensorDataset(inputs[p], targets[p]) for p in (slice(512), slice(512, 768)))
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    loader = DataLoader(train, batch_size=8, shuffle=True)
    best, bad, epochs = float("inf"), 0, 0
    with gossamer.join(model, optimizer, method="all_reduce", steps=200) as worker:
        while epochs < 60:
            for batch, wanted in worker.shard(loader):
                optimizer.zero_grad()
                cross_entropy(model(batch), wanted).backward()
                worker.step()
            with torch.no_grad():  # each worker's own model, on its part of the held-out data
                part = range(worker.rank, len(held_out), worker.size)
                own = cross_entropy(model(held_out.tensors[0][part]), held_out.tensors[1][part])
            loss = float(worker.mean(own))
            plateau.step(loss)
            epochs += 1
            best, bad = (loss, 0) if loss < best - 1e-3 else (best, bad + 1)
            worker.report(loss=loss)
            if worker.any(bad >= PATIENCE):
                break
    rate = optimizer.param_groups[0]["lr"]
    print(f"worker {worker.rank}: best loss {best:.4f} in {epochs} epochs, rate {rate:g}")


if __name__ == "__main__":
    main()
