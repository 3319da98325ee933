"""A small residual network with BatchNorm on synthetic images, with a cosine schedule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


def images(count: int) -> TensorDataset:
    """Stripes that run across, down or both ways, under noise."""
    targets = torch.randint(3, (count,))
    wave = torch.sin(torch.arange(12) * 1.6).expand(12, 12)
    kinds = torch.stack([wave, wave.T, (wave + wave.T) / 2])
    return TensorDataset((kinds[targets] + 0.8 * torch.randn(count, 12, 12)).unsqueeze(1), targets)


def main() -> None:
    torch.manual_seed(0)
    train, test = images(1024), images(256)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Residual(8), Residual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            inputs, targets = test.tensors
            output = model(inputs)
            loss = F.cross_entropy(output, targets).item()
            accuracy = (output.argmax(1) == targets).float().mean().item()
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
