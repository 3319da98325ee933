"""The largest rate that the ages of a pipeline's stages allow, on a quadratic.

The gradient of a step is taken at parameters of which stage s is d_s steps old. On a quadratic of
curvature H this is, with the part w_s of stage s,

    w_s(t + 1) = w_s(t) + m (w_s(t) - w_s(t - 1)) - eta sum over r of H_sr w_r(t - d_r)

A stage alone, while all others stand still, has the edge of one delay, at the largest curvature of
its own block. All stages together have one edge, which depends on how the layers are coupled. Only
what lies in the directions of the largest curvatures can be the first to grow. With H = V L V' over
these and a_s = V_s' w_s the recurrence is closed in the a_s, a few numbers for each stage, and the
edge is where the largest root of its companion matrix leaves the unit circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.pipeline.stages import StageCut
from gossamer.studies.lab.theory import curvature_product, largest_curvature, stability_edge
from gossamer.tasks.flat_model import FlatModel

_DIRECTIONS = 8
_SPARE = 8
_ITERATIONS = 40
_OUTSIDE = 1e-6
"""How far beyond the unit circle a root is outside; steady states lie on it, to rounding."""
_DOUBLINGS, _HALVINGS = 20, 20


@dataclass(frozen=True)
class StageCurvature:
    """How curved the loss is where the runs begin."""

    largest: float
    by_stage: tuple[float, ...]
    """The largest eigenvalue of each stage's own block."""
    values: NDArray[np.float64]
    """The largest eigenvalues of the whole, those that are positive."""
    overlaps: tuple[NDArray[np.float64], ...]
    """For each stage V_s' V_s of these directions."""

    def alone(self, stage: int, delay: int, momentum: float = 0.0) -> float:
        """The edge of a stage whose gradients are late, while the others stand still."""
        return stability_edge(delay, momentum) / self.by_stage[stage]

    def together(self, delays: Sequence[int], momentum: float = 0.0) -> float:
        """The edge of all stages, each with its own delay."""
        rate = 1e-3 / self.largest
        for _ in range(_DOUBLINGS):
            if self._grows(2 * rate, delays, momentum):
                break
            rate *= 2
        low, high = rate, 2 * rate
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._grows(middle, delays, momentum) else (middle, high)
        return (low + high) / 2

    def _grows(self, rate: float, delays: Sequence[int], momentum: float) -> bool:
        stages, width = len(delays), len(self.values)
        size, depth = stages * width, 1 + max(1, *delays)
        companion = np.zeros((depth * size, depth * size))
        companion[size:, :-size] += np.eye((depth - 1) * size)
        companion[:size, :size] += (1 + momentum) * np.eye(size)
        companion[:size, size : 2 * size] -= momentum * np.eye(size)
        for stage, overlap in enumerate(self.overlaps):
            rows = slice(stage * width, (stage + 1) * width)
            for other, delay in enumerate(delays):
                first = delay * size + other * width
                companion[rows, first : first + width] -= rate * overlap * self.values
        return bool(np.abs(np.linalg.eigvals(companion)).max() > 1 + _OUTSIDE)


def stage_curvature(model: FlatModel, cut: StageCut, at: Tensor) -> StageCurvature | None:
    """Measure it on one batch, with these parameters; None where the model cannot be differentiated
    twice."""
    held = [held_by(model, cut, stage) for stage in range(len(cut.chunks))]
    blocks = [largest_curvature(model, at, one) for one in held]
    if None in blocks:
        return None
    values, vectors = _largest(model, at)
    kept = values > 1e-3 * values.max()
    parts = [(vectors[:, kept] * one[:, None]).double() for one in held]
    return StageCurvature(
        float(values.max()), tuple(one or 0.0 for one in blocks), values[kept].double().numpy(),
        tuple((part.T @ part).cpu().numpy() for part in parts),
    )  # fmt: skip


def held_by(model: FlatModel, cut: StageCut, stage: int) -> Tensor:
    """1 where a stage holds the parameter, else 0."""
    found = torch.zeros_like(model.initial)
    for part in cut.slices(stage):
        found[part] = 1.0
    return found


def _largest(model: FlatModel, at: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues of the largest modulus, and their vectors as columns, by orthogonal iteration
    with a few directions to spare."""
    product = curvature_product(model, at)
    count = min(_DIRECTIONS + _SPARE, model.layout.total)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(model.layout.total, count, generator=generator).to(model.initial)
    for _ in range(_ITERATIONS):
        vectors, _ = torch.linalg.qr(vectors)
        vectors = torch.stack([product(one) for one in vectors.T], dim=1)
    vectors, _ = torch.linalg.qr(vectors)
    images = torch.stack([product(one) for one in vectors.T], dim=1)
    small = vectors.T @ images
    values, turned = torch.linalg.eigh((small + small.T) / 2)
    order = values.argsort(descending=True)[:_DIRECTIONS]
    return values[order].cpu(), (vectors @ turned)[:, order]
