"""Logistic regression on sparse samples: the setting of HOGWILD! (Recht et al. 2011).

Each sample has a few of many features, so its gradient touches a few of many parameters, and two
workers rarely change the same one. How rarely, three numbers of the data say, of which the paper's
bounds are made: `SparseConstants`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import ConfigurationError
from gossamer.specs import check_range
from gossamer.tasks.metric import Metric
from gossamer.tasks.task import Data, Task

_WIDTH = 0.5
"""How far the true weights lie from 0: labels are then right about four times in five."""


@dataclass(frozen=True)
class SparseConstants:
    """The constants of the paper, of a set of samples."""

    omega: int
    """The most features of a sample."""
    delta: float
    """The largest share of the samples that have one feature."""
    rho: float
    """The largest share of the samples that have a feature in common with one sample."""

    @staticmethod
    def of(indices: Tensor, features: int) -> SparseConstants:
        """Of samples that name their features, one row each."""
        count = len(indices)
        present = torch.zeros(count, features)
        present.scatter_(1, indices, 1.0)
        shared = sum(
            (part @ present.T > 0).sum(1).max().item() / count for part in present.split(count)
        )
        return SparseConstants(
            int(present.sum(1).max()), float(present.mean(0).max()), float(shared)
        )


class SparseLinear(nn.Module):
    """One weight a feature; a sample's score is the sum of those of its features."""

    def __init__(self, features: int) -> None:
        """All weights start at zero, as is usual for a convex problem."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, indices: Tensor) -> Tensor:
        """Features of shape [batch, features of a sample] to one score a sample."""
        return functional.embedding(indices, self.weight.unsqueeze(1)).squeeze(-1).sum(-1)


def _samples(features: int, nonzeros: int, samples: int, skew: float) -> Data:
    # A generator of its own: the problem is the same for every seed of a run.
    generator = torch.Generator().manual_seed(0)
    popularity = (torch.arange(features) + 1.0) ** -skew
    drawn = torch.multinomial(popularity.expand(samples, -1), nonzeros, generator=generator)
    truth = _WIDTH * torch.randn(features, generator=generator) * (12.0 / nonzeros) ** 0.5
    chances = truth[drawn].sum(1).sigmoid()
    return Data(drawn, (torch.rand(samples, generator=generator) < chances).long())


def logistic_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean logistic loss of labels 0 and 1."""
    return functional.softplus(torch.where(labels > 0, -scores, scores)).mean()


def _right(scores: Tensor, labels: Tensor) -> Tensor:
    return ((scores > 0) == (labels > 0)).float()


def sparse_logistic(
    *, features: int = 2000, nonzeros: int = 5, samples: int = 2048, skew: float = 0.0
) -> Task:
    """Logistic regression on generated samples with `nonzeros` of `features` features each, of
    which the k-th is drawn in proportion to k^-skew. Its test data are its training data, because
    the problem is one of optimisation."""
    check_range("sparse-logistic: features", features, 1)
    check_range("sparse-logistic: samples", samples, 1)
    check_range("sparse-logistic: skew", skew, 0)
    if not 1 <= nonzeros <= features:
        raise ConfigurationError(
            f"sparse-logistic: nonzeros must lie between 1 and features={features}, got {nonzeros}"
        )
    data = _samples(features, nonzeros, samples, skew)
    return Task(
        name="sparse-logistic",
        title=f"Logistic regression, {nonzeros} of {features} features a sample",
        make_model=lambda: SparseLinear(features),
        loss=logistic_loss,
        train=data,
        test=data,
        metric=Metric("accuracy", _right),
        batch=1,
        epochs=5.0,
        learning_rates=(0.1, 0.3, 1.0),
        optimiser="sgd",
    )
