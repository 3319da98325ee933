"""What the workers of the benchmark train, and on what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.tasks.models import resnet18

REPLICA_NUMEL = 11_250_000
"""45 MB of 32-bit floats."""
_BATCHES = 64


class Flat(nn.Module):
    """A replica of 45 MB and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(REPLICA_NUMEL))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


_MODELS = {
    "mlp": (mlp, (784,), 32),
    "resnet18": (resnet18, (3, 32, 32), 16),
    "resnet18-128": (resnet18, (3, 32, 32), 128),
}


class Problem:
    """One worker's module, optimiser and batches; labels come from a fixed random teacher."""

    def __init__(self, name: str, rank: int, device: torch.device, rate: float) -> None:
        make, shape, batch = _MODELS[name]
        torch.manual_seed(0)
        self.module = make().to(device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=rate)
        self.loss = nn.functional.cross_entropy
        teacher = torch.randn(torch.Size(shape).numel(), 10)
        self.batches = [
            _labelled(torch.randn(batch, *shape), teacher, device)
            for _ in range(_BATCHES if name == "mlp" else 4)
        ]
        # Same data everywhere, in another order for each worker.
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(rank))
        self.batches = [self.batches[number] for number in order.tolist()]
        everything = zip(*self.batches, strict=True)
        self._everything = tuple(torch.cat(parts) for parts in everything)
        self._next = 0

    def backward(self, module: nn.Module) -> None:
        inputs, targets = self.batches[self._next]
        self._next = (self._next + 1) % len(self.batches)
        self.optimizer.zero_grad()
        self.loss(module(inputs), targets).backward()

    def training_loss(self) -> float:
        """Of this worker's model as it is now, on all that it trains on."""
        with torch.no_grad():
            inputs, targets = self._everything
            return float(self.loss(self.module(inputs), targets))


def _labelled(inputs: Tensor, teacher: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    targets = inputs.reshape(len(inputs), -1).matmul(teacher).argmax(1)
    return inputs.to(device), targets.to(device)
