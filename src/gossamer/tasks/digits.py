"""The 1797 handwritten digits of 8x8 pixels, which the package brings along.

Origin: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0; the part of it that
scikit-learn distributes. `digits.npz` holds the pixels (0 to 16) and labels in an order that was
shuffled once, so that the split into the first 1437 and the last 360 is the same for ever.
"""

from __future__ import annotations

from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gossamer.specs import check_range
from gossamer.tasks.task import ACCURACY, Data, Task, cross_entropy

TRAINING_SAMPLES = 1437
PIXELS = 64
CLASSES = 10
_BRIGHTEST = 16.0


def read_digits() -> tuple[Data, Data]:
    """Training and test data: flat pixels between 0 and 1, and classes."""
    with (
        resources.files("gossamer.tasks").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        images: npt.NDArray[Any] = arrays["images"]
        labels: npt.NDArray[Any] = arrays["labels"]
    inputs = torch.tensor(images.reshape(-1, PIXELS)).to(torch.float32) / _BRIGHTEST
    targets = torch.tensor(labels).to(torch.int64)
    return (
        Data(inputs[:TRAINING_SAMPLES], targets[:TRAINING_SAMPLES]),
        Data(inputs[TRAINING_SAMPLES:], targets[TRAINING_SAMPLES:]),
    )


def digits_logistic() -> Task:
    """Logistic regression: convex, so that every method has the same goal."""
    train, test = read_digits()
    return Task(
        name="digits-logistic",
        title="Logistic regression on 8x8 digits",
        make_model=lambda: nn.Linear(PIXELS, CLASSES),
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=16,
        epochs=20.0,
        learning_rates=(0.03, 0.1, 0.3),
    )


def digits_mlp(*, width: int = 64, layers: int = 1) -> Task:
    """A perceptron with hidden layers, by default one."""
    check_range("digits-mlp: width", width, 1)
    check_range("digits-mlp: layers", layers, 1)
    train, test = read_digits()

    def make_model() -> nn.Module:
        sizes = [PIXELS, *[width] * layers]
        hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, CLASSES))

    return Task(
        name="digits-mlp",
        title="Multilayer perceptron on 8x8 digits",
        make_model=make_model,
        loss=cross_entropy,
        train=train,
        test=test,
        metric=ACCURACY,
        batch=16,
        epochs=20.0,
        learning_rates=(0.03, 0.1, 0.3),
    )
