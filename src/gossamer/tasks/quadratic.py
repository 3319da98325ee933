"""A quadratic problem with a known optimum, for comparing runs with theory.

Each sample is a point c of one of ten classes; the loss of the parameters theta on it is
1/2 * sum_k h_k (theta_k - c_k)^2. The curvatures h lie between 1 / `condition` and 1, evenly in the
logarithm, so that the smoothness is 1 and the condition number is as asked. The best parameters are
the mean of all points. Each class has a centre of its own, `spread` wide: a split by class gives
workers different optima, an even split gives them the same one up to `noise`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.specs import check_range
from gossamer.tasks.task import Data, Task

CLASSES = 10


class Displacement(nn.Module):
    """The model: one vector; its output is how far that vector lies from each sample."""

    def __init__(self, dimension: int) -> None:
        """Start at a random point of unit variance, away from the optimum."""
        super().__init__()
        self.theta = nn.Parameter(torch.randn(dimension))

    def forward(self, points: Tensor) -> Tensor:
        """One displacement a sample."""
        return self.theta - points


def _points(dimension: int, noise: float, spread: float, samples: int) -> Data:
    # A generator of its own: the problem is the same for every seed of a run.
    generator = torch.Generator().manual_seed(0)
    centres = spread * torch.randn(CLASSES, dimension, generator=generator)
    labels = torch.arange(samples) % CLASSES
    jitter = noise * torch.randn(samples, dimension, generator=generator)
    return Data(centres[labels] + jitter, labels)


def quadratic(
    *,
    dimension: int = 10,
    condition: float = 10.0,
    noise: float = 0.1,
    spread: float = 1.0,
    samples: int = 1024,
) -> Task:
    """The quadratic problem; its test data are its training data, so the loss gap is exact."""
    check_range("quadratic: dimension", dimension, 1)
    check_range("quadratic: condition", condition, 1)
    check_range("quadratic: noise", noise, 0)
    check_range("quadratic: spread", spread, 0)
    check_range("quadratic: samples", samples, 1)
    data = _points(dimension, noise, spread, samples)

    def loss(displacement: Tensor, labels: Tensor) -> Tensor:
        # Made where it is used: a tensor kept outside would tie the loss to one device.
        curvatures = torch.logspace(
            0.0,
            1.0,
            dimension,
            base=1.0 / condition,
            dtype=displacement.dtype,
            device=displacement.device,
        )
        return 0.5 * (displacement.square() @ curvatures).mean()

    return Task(
        name="quadratic",
        title=f"Quadratic in {dimension} dimensions, condition number {condition:g}",
        make_model=lambda: Displacement(dimension),
        loss=loss,
        train=data,
        test=data,
        metric=None,
        batch=16,
        epochs=10.0,
        learning_rates=(0.01, 0.03, 0.1),
        optimum=data.inputs.double().mean(0).float(),
    )
