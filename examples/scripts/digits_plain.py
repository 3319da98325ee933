"""A convolutional network on handwritten digits, in the manner of PyTorch's MNIST example."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import gossamer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(128, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model: nn.Module, loader: DataLoader, optimizer: optim.Optimizer) -> None:
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    model.eval()
    test_loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
            count += len(target)
    print(f"average loss {test_loss / count:.4f}, accuracy {correct}/{count}")
    return test_loss / count, correct / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--gamma", type=float, default=0.8)
    args = parser.parse_args()
    torch.manual_seed(1)
    digits = gossamer.make_task("digits-mlp")
    images = [part.inputs.reshape(-1, 1, 8, 8) for part in (digits.train, digits.test)]
    train_loader = DataLoader(
        TensorDataset(images[0], digits.train.targets), batch_size=args.batch_size, shuffle=True
    )
    test_loader = DataLoader(TensorDataset(images[1], digits.test.targets), batch_size=1000)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for _ in range(args.epochs):
        train(model, train_loader, optimizer)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
