"""What an optimiser is that updates many workers at once.

An optimiser is a frozen set of options. Its state lives outside of it, as one [rows, parameters]
matrix per slot. A worker, a server or an outer optimiser is one row, and a few large operations
update a whole batch of rows.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.specs import check_range, print_dataclass

State = Mapping[str, Tensor]
"""One [rows, parameters] matrix per slot."""
Rate = float | Tensor
"""One learning rate for all rows, or a [rows, 1] tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimiser(ABC):
    """The options of one optimiser; `str` gives the spec that makes it again."""

    name: ClassVar[str]
    description: ClassVar[str]
    own_rate: ClassVar[float | None] = None
    """The learning rate to use with it where the task's own does not fit."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._check("weight_decay")

    def __str__(self) -> str:
        return print_dataclass(self.name, self)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the state matrices that `descend_` reads and writes."""
        return ()

    def initial(self, slot: str) -> float:
        """The number that fills a state matrix before the first update."""
        assert slot in self.slots, f"{self} has no slot {slot!r}"
        return 0.0

    def suited(self, shapes: Sequence[Sequence[int]]) -> Optimiser:
        """This optimiser for flat vectors that hold tensors of these shapes one after the other;
        most treat every number alike."""
        return self

    def descend_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate,
        points: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Update `parameters` and `state` in place, one row per worker.

        `steps` counts the updates that each row has had before this one. `gradients` is only read.
        `points` is where the gradients were taken, if not at the parameters: the weight decay is
        that of those points.
        """
        assert len(steps) == parameters.shape[0], "one step count per row"
        if isinstance(rate, Tensor):
            assert rate.shape == (len(steps), 1), "one learning rate per row"
            rate = rate.to(parameters)
        if steps:
            with torch.no_grad():
                gradients = self._decay_(parameters, gradients, rate, points)
                self._update_(parameters, gradients, state, steps, rate)

    def penalised(self, gradients: Tensor, parameters: Tensor) -> Tensor:
        """The gradients with those of an L2 penalty of `weight_decay` added."""
        if self.weight_decay == 0.0:
            return gradients
        return gradients.add(parameters, alpha=self.weight_decay)

    def _decay_(
        self, parameters: Tensor, gradients: Tensor, rate: Rate, points: Tensor | None
    ) -> Tensor:
        """Apply the weight decay, here that of an L2 penalty, and return the gradients to use."""
        return self.penalised(gradients, parameters if points is None else points)

    @abstractmethod
    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        """`descend_` after weight decay; there is at least one row."""

    def _check(self, *options: str, below: float = math.inf) -> None:
        for option in options:
            check_range(f"{self.name}: {option}", getattr(self, option), 0.0, below)


def per_row(values: Sequence[float], like: Tensor) -> float | Tensor:
    """One number where all rows agree, which keeps the arithmetic of torch.optim; or a column."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def move_(parameters: Tensor, direction: Tensor, rate: Rate) -> None:
    if isinstance(rate, Tensor):
        parameters.addcmul_(direction, rate, value=-1)
    else:
        parameters.add_(direction, alpha=-rate)


def move_by_ratio_(
    parameters: Tensor, numerators: Tensor, denominators: Tensor, rate: Rate
) -> None:
    if isinstance(rate, Tensor):
        parameters.addcdiv_(numerators * rate, denominators, value=-1)
    else:
        parameters.addcdiv_(numerators, denominators, value=-rate)
