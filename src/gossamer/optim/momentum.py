"""Momentum under asynchrony: what delay adds, and how far to lower the explicit momentum.

A gradient that was read some time ago moves the parameters in an earlier direction, as momentum
does. For n equal workers with exponential compute times this is exact in expectation (Mitliagkas,
Zhang, Hadjis and Ré, 2016): the server's mean trajectory obeys
x[t+1] - x[t] = mu (x[t] - x[t-1]) - (1 - mu) eta g(x[t]) with mu = 1 - 1/n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.specs import check_range


def implicit_momentum(workers: int) -> float:
    """The momentum that n equal workers with exponential compute times add: 1 - 1/n."""
    check_range("workers", workers, 1)
    return 1.0 - 1.0 / workers


def explicit_momentum(target: float, workers: int) -> float:
    """The momentum to set so that the total is about `target`: 1 - total = (1 - explicit) / n.

    It is 0 if asynchrony alone already exceeds the target.
    """
    check_range("target momentum", target, 0.0, 1.0)
    check_range("workers", workers, 1)
    return max(0.0, 1.0 - workers * (1.0 - target))


class FittedMomentum(NamedTuple):
    """The momentum and the learning rate that explain a trajectory best."""

    momentum: float
    learning_rate: float


def measured_momentum(trajectory: Tensor, gradients: Tensor) -> FittedMomentum:
    """Fit x[t+1] - x[t] = mu (x[t] - x[t-1]) - eta g(x[t]) by least squares.

    `trajectory` is [steps, dimensions]. For asynchronous runs it is the mean over many runs,
    because the law holds in expectation. `gradients` holds the full gradient at each of its points,
    which on a quadratic is the curvature times the distance from the optimum.
    """
    if trajectory.dim() != 2 or trajectory.shape != gradients.shape or len(trajectory) < 3:
        raise ConfigurationError(
            "measured_momentum needs a trajectory of at least 3 points and a gradient at each, "
            f"both [steps, dimensions], got {list(trajectory.shape)} and {list(gradients.shape)}"
        )
    moves = trajectory.double().diff(dim=0)
    # The gradient of the last point leads beyond the trajectory, and no move precedes the first.
    slopes = gradients[1:-1].double()
    causes = torch.stack([moves[:-1].flatten(), -slopes.flatten()], dim=1)
    fit = torch.linalg.lstsq(causes, moves[1:].reshape(-1, 1), driver="gelsd").solution
    return FittedMomentum(float(fit[0]), float(fit[1]))
