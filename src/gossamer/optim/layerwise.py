"""Optimisers that must know where each tensor of the model lies: Muon, LARS and LAMB."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.elementwise import Adam, AdamW
from gossamer.optim.optimiser import Optimiser, Rate, State, move_, per_row

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's factors, as published: they take small singular values quickly to about 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layerwise(Optimiser):
    """An optimiser that has been told which tensors lie in the flat vectors."""

    shapes: tuple[tuple[int, ...], ...] | None = dataclasses.field(
        default=None, init=False, kw_only=False, compare=False
    )
    """The shapes of the tensors in the flat vectors, one after the other; set by `suited`."""

    def suited(self, shapes: Sequence[Sequence[int]]) -> Optimiser:
        own = dataclasses.replace(self)
        object.__setattr__(own, "shapes", tuple(tuple(shape) for shape in shapes))
        return own

    def _places(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Where each tensor lies, and its shape."""
        if self.shapes is None:
            raise ConfigurationError(
                f"{self.name} must know which numbers are matrices; use it where a model is "
                "trained, or choose adamw"
            )
        ends = list(accumulate(math.prod(shape) for shape in self.shapes))
        starts = [0, *ends]
        return [
            (slice(*place), shape)
            for *place, shape in zip(starts[:-1], ends, self.shapes, strict=True)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Layerwise, AdamW):
    """Muon (Jordan et al., 2024): matrices move along their momentum, made nearly orthogonal, as
    `torch.optim.Muon` computes it, and everything else moves by AdamW.

    A matrix is a parameter with two dimensions; kernels of convolutions have four and belong to the
    rest, as torch refuses them. The matrices of one shape, of all rows, are made orthogonal in one
    call. `scale` multiplies the rate of an m x n matrix: `rms` by 0.2 sqrt(max(m, n)), with which
    AdamW's rate suits matrices, too, and `original` by sqrt(max(1, m / n)).
    """

    name = "muon"
    description = "matrices move along their orthogonalised momentum, everything else by AdamW"
    own_rate = 0.02

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    scale: Literal["rms", "original"] = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", below=1.0)
        if not 1 <= self.iterations < 100:
            raise ConfigurationError(
                f"muon: iterations must be from 1 to 99, got {self.iterations}; 5 are usual"
            )

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        matrices: defaultdict[tuple[int, ...], list[slice]] = defaultdict(list)
        for place, shape in self._places():
            if len(shape) == 2 and min(shape) > 0:
                matrices[shape].append(place)
            else:
                own = {slot: matrix[:, place] for slot, matrix in state.items()}
                super()._update_(parameters[:, place], gradients[:, place], own, steps, rate)
        for (height, width), places in matrices.items():
            moved = torch.stack([
                self._direction(state["first"][:, place], gradients[:, place]) for place in places
            ])  # fmt: skip
            flat = orthogonal(moved.view(-1, height, width), self.iterations)
            factor = (
                0.2 * max(height, width) ** 0.5
                if self.scale == "rms"
                else max(1.0, height / width) ** 0.5
            )
            for place, own in zip(places, flat.reshape(moved.shape).to(parameters), strict=True):
                move_(parameters[:, place], own, rate * factor)

    def _direction(self, momentum: Tensor, gradients: Tensor) -> Tensor:
        momentum.lerp_(gradients, 1 - self.momentum)
        return gradients.lerp(momentum, self.momentum) if self.nesterov else momentum


@dataclasses.dataclass(frozen=True, kw_only=True)
class LarsRows(Layerwise):
    """LARS (You, Gitman and Ginsburg, 2017): each layer moves at a rate in proportion to the ratio
    of the norms of its weights and its gradient.

    v = m v + rate * ratio * (g + wd w), w = w - v, where ratio = trust |w| / (|g| + wd |w|). Biases
    and the vectors of normalisations, which have one dimension, move by plain momentum and do not
    decay. A layer whose weights or gradient are all zero has the ratio 1.
    """

    name = "lars"
    description = "momentum; each layer's rate follows the norm of its weights over its gradient's"
    own_rate = 10.0

    momentum: float = 0.9
    trust: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", below=1.0)
        self._check("trust")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def _decay_(
        self, parameters: Tensor, gradients: Tensor, rate: Rate, points: Tensor | None
    ) -> Tensor:
        """The ratio needs the gradient without it, so the decay is part of the update."""
        return gradients

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        state["momentum"].mul_(self.momentum)
        for place, shape in self._places():
            weights, direction = parameters[:, place], gradients[:, place]
            if len(shape) > 1:
                own, length = _norms(weights), _norms(direction)
                ratio = self.trust * own / (length + self.weight_decay * own)
                ratio = torch.where((own > 0) & (length > 0), ratio, 1.0)
                direction = direction.add(weights, alpha=self.weight_decay) * ratio
            move_(state["momentum"][:, place], direction, -rate)
        parameters.sub_(state["momentum"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambRows(Layerwise, Adam):
    """LAMB (You et al., 2020): the direction of Adam with decay, made as long as the layer's
    weights.

    r = m' / (sqrt(v') + epsilon) + wd w, w = w - rate * (|w| / |r|) * r, with the bias of both
    moments corrected. Tensors of one dimension move by Adam alone and do not decay.
    """

    name = "lamb"
    description = "Adam with decay; each layer's step is as long as its weights times the rate"
    own_rate = 0.03

    weight_decay: float = 0.01
    epsilon: float = 1e-6

    def _decay_(
        self, parameters: Tensor, gradients: Tensor, rate: Rate, points: Tensor | None
    ) -> Tensor:
        """The decay is part of the direction whose length is changed."""
        return gradients

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        denominators = self._denominators(gradients, state, steps)
        corrections = per_row([1 - self.beta1 ** (step + 1) for step in steps], parameters)
        directions = state["first"] / denominators / corrections
        for place, shape in self._places():
            weights, direction = parameters[:, place], directions[:, place]
            if len(shape) > 1:
                direction = direction.add(weights, alpha=self.weight_decay)
                own, length = _norms(weights), _norms(direction)
                direction = direction * torch.where((own > 0) & (length > 0), own / length, 1.0)
            move_(weights, direction, rate)


def _norms(rows: Tensor) -> Tensor:
    """A column with the length of each row."""
    return rows.square().sum(1, keepdim=True).sqrt()


def orthogonal(matrices: Tensor, iterations: int) -> Tensor:
    """Each matrix of a batch with singular values near 1, in bfloat16 (Newton and Schulz)."""
    first, second, third = _QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    own = matrices.bfloat16()
    own = own.mT if is_tall else own
    own = own / own.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = own @ own.mT
        gram = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        own = torch.baddbmm(own, gram, own, beta=first)
    return own.mT if is_tall else own
