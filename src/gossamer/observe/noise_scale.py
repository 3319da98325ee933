"""How noisy the gradients of a run are: the batch from which on a larger one hardly helps.

The noise scale (McCandlish, Kaplan, Amodei et al., 2018) is tr(S) / |G|^2, for the covariance S of
the gradient of one sample and the true gradient G. Of n gradients of b samples each, the mean of
the squared lengths and the squared length of the mean give both without bias:

    |G|^2 = (n |mean|^2 - mean of |g|^2) / (n - 1)
    tr(S) = b n (mean of |g|^2 - |mean|^2) / (n - 1)

So it costs two passes over gradients that are there anyhow. Gradients are taken together as they
come, whoever computed them: with one worker those of consecutive steps. They were taken near each
other and not at one point, which matters where a few steps change the gradient by much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WINDOW = 8
"""So many gradients at least are compared with their mean."""
_KEPT = 0.95
"""Of the sums at each window, so that the scale follows the training."""


class NoiseScale:
    """Running estimates of tr(S) and |G|^2, as moving averages over windows of gradients."""

    def __init__(self, sums: Sequence[float] = ()) -> None:
        """`sums` are those of an earlier one."""
        self._sums = torch.tensor(sums, dtype=torch.float64) if sums else None
        """Moving averages of tr(S) and of |G|^2."""
        self._total: Tensor | None = None
        """The sum of the gradients in the open window."""
        self._squares: Tensor | None = None
        self._count = 0
        self._batch = 0

    def add(self, gradients: Tensor, batch: int) -> None:
        """Gradients of so many samples each, one in each row."""
        if batch != self._batch:
            self._total, self._count, self._batch = None, 0, batch
        total, lengths = gradients.sum(0), torch.linalg.vector_norm(gradients, dim=1)
        squares = lengths.double().square().sum()
        if self._total is not None and self._squares is not None:
            total, squares = self._total + total, self._squares + squares
        self._total, self._squares, self._count = total, squares, self._count + len(gradients)
        if self._count >= WINDOW:
            self._close(total, squares)

    def _close(self, total: Tensor, squares: Tensor) -> None:
        count = self._count
        mean_square = squares / count
        square_of_mean = torch.linalg.vector_norm(total).double().square() / count**2
        noise = self._batch * count * (mean_square - square_of_mean) / (count - 1)
        signal = (count * square_of_mean - mean_square) / (count - 1)
        found = torch.stack([noise, signal])
        self._sums = found if self._sums is None else _KEPT * self._sums + (1 - _KEPT) * found
        self._total, self._squares, self._count = None, None, 0

    @property
    def sums(self) -> list[float]:
        """Averages of tr(S) and |G|^2; empty before the first window is full."""
        return [] if self._sums is None else [float(one) for one in self._sums]

    @property
    def samples(self) -> float | None:
        """The noise scale, in samples; None where it cannot be told, as where the gradient is lost
        in noise."""
        return ratio(self.sums)


def ratio(sums: Sequence[float]) -> float | None:
    """The noise scale of such averages."""
    noise, signal = sums or (math.nan, math.nan)
    return noise / signal if signal > 0 and 0 <= noise < math.inf else None


def mean_of_sums(several: Sequence[Sequence[float]]) -> list[float]:
    """The averages over workers that have each made their own."""
    known = [sums for sums in several if sums]
    return [sum(column) / len(known) for column in zip(*known, strict=True)]
