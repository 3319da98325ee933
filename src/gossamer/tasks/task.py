"""What a task is: a model, a loss and data, with defaults under which it trains well.

Everything in a task that touches a batch (model, loss, augmentation) works under `torch.func.vmap`,
so that many workers' gradients can be evaluated together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Data:
    """Samples and their targets, aligned along the first dimension."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        """Refuse tensors that are not aligned: an index would silently pair strangers."""
        assert len(self.inputs) == len(self.targets), "every input needs one target"

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.inputs)

    def to(self, device: torch.device | str) -> Data:
        """The same data on a device."""
        return Data(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Something to train.

    `make_model` draws its initial parameters from torch's global generator: seed it first.
    `loss(output, targets)` is the mean over the batch. `correct(output, targets)` says, for each
    sample, how much of it is right (0 or 1 for a class, a fraction for a text); None means that the
    task knows no accuracy. `augment(inputs, key)` changes training inputs and draws from the key
    alone. `learning_rates` is the small grid that suits `optimiser` at `batch` on one worker.
    `optimum` is the flat vector of best parameters where that is known. `spec` and `data`
    are what it was made from by `make_task`: its name with options, and where its files are.
    """

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    train: Data
    test: Data
    correct: Callable[[Tensor, Tensor], Tensor] | None
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    batch: int
    epochs: float
    learning_rates: tuple[float, ...]
    optimiser: str = "sgd:momentum=0.9"
    optimum: Tensor | None = None
    spec: str = ""
    data: Path | None = None


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the batch (and over positions, where a sample has several).

    Written out, because one softmax kernel over many rows of few classes is several times slower
    than these element-wise ones when the workers are batched.
    """
    chosen = output.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (output.logsumexp(-1) - chosen).mean()


def fraction_correct(output: Tensor, targets: Tensor) -> Tensor:
    """For each sample the fraction of its targets, one or many, that the output ranks first."""
    hits = (output.argmax(-1) == targets).to(torch.float32)
    return hits.reshape(len(hits), -1).mean(1)
