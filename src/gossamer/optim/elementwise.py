"""Optimisers that treat every number alike: SGD, Adam, AdamW, Adagrad and RMSprop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.optimiser import (
    Optimiser,
    Rate,
    State,
    move_,
    move_by_ratio_,
    per_row,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Optimiser):
    """Stochastic gradient descent with heavy-ball or Nesterov momentum."""

    name = "sgd"
    description = "stochastic gradient descent, with heavy-ball or Nesterov momentum"

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", below=1.0)
        self._check("dampening")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigurationError(
                f"sgd: nesterov needs momentum above 0 and dampening 0, got "
                f"momentum={self.momentum}, dampening={self.dampening}; try momentum=0.9"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        direction = gradients
        if self.momentum:
            momentum = state["momentum"]
            self._accumulate_(momentum, gradients, steps)
            direction = gradients.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        move_(parameters, direction, rate)

    def _accumulate_(self, momentum: Tensor, gradients: Tensor, steps: Sequence[int]) -> None:
        momentum.mul_(self.momentum).add_(gradients, alpha=1 - self.dampening)
        # A row's first gradient enters whole: dampening starts with the second.
        fresh = [row for row, step in enumerate(steps) if step == 0]
        if fresh:
            momentum[fresh] = gradients[fresh]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """Adam (Kingma and Ba, 2015), with an L2 penalty as weight decay."""

    name = "adam"
    description = "adaptive moments; weight decay is an L2 penalty on the loss"

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("beta1", "beta2", below=1.0)
        self._check("epsilon")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("first", "second")

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        denominators = self._denominators(gradients, state, steps)
        corrections = [1 - self.beta1 ** (step + 1) for step in steps]
        if isinstance(rate, Tensor):
            step_size = rate / per_row(corrections, parameters)
        else:
            # Divided in double precision, so that no row depends on the rows updated beside it.
            step_size = per_row([rate / one for one in corrections], parameters)
        move_by_ratio_(parameters, state["first"], denominators, step_size)

    def _denominators(self, gradients: Tensor, state: State, steps: Sequence[int]) -> Tensor:
        """Update both moments; what the first is divided by."""
        first, second = state["first"], state["second"]
        first.lerp_(gradients, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        root = per_row([(1 - self.beta2 ** (step + 1)) ** 0.5 for step in steps], gradients)
        return second.sqrt().div_(root).add_(self.epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with weight decay on the parameters themselves (Loshchilov and Hutter, 2019)."""

    name = "adamw"
    description = "adaptive moments; weight decay shrinks the parameters directly"

    weight_decay: float = 0.01

    def _decay_(
        self, parameters: Tensor, gradients: Tensor, rate: Rate, points: Tensor | None
    ) -> Tensor:
        shrinking = rate * self.weight_decay
        if self.weight_decay != 0.0 and points is None:
            parameters.mul_(1 - shrinking)
        elif self.weight_decay != 0.0 and points is not None:
            parameters.sub_(points * shrinking)
        return gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Optimiser):
    """Adagrad (Duchi, Hazan and Singer, 2011)."""

    name = "adagrad"
    description = "each parameter's rate falls with the sum of its squared gradients"

    epsilon: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("epsilon", "initial_accumulator_value")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("sum_of_squares",)

    def initial(self, slot: str) -> float:
        return super().initial(slot) + self.initial_accumulator_value

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        sum_of_squares = state["sum_of_squares"].addcmul_(gradients, gradients, value=1)
        denominators = sum_of_squares.sqrt().add_(self.epsilon)
        move_by_ratio_(parameters, gradients, denominators, rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RMSprop(Optimiser):
    """RMSprop (Tieleman and Hinton, 2012), plain, centred (Graves, 2013) or with momentum."""

    name = "rmsprop"
    description = "gradients divided by a moving root mean square, plain, centred or with momentum"

    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("alpha", below=1.0)
        self._check("epsilon", "momentum")

    @property
    def slots(self) -> tuple[str, ...]:
        first = ("first",) if self.centered else ()
        momentum = ("momentum",) if self.momentum else ()
        return ("second", *first, *momentum)

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        second = state["second"]
        second.mul_(self.alpha).addcmul_(gradients, gradients, value=1 - self.alpha)
        if self.centered:
            first = state["first"].lerp_(gradients, 1 - self.alpha)
            denominators = second.addcmul(first, first, value=-1).sqrt_()
        else:
            denominators = second.sqrt()
        denominators.add_(self.epsilon)
        if self.momentum:
            momentum = state["momentum"].mul_(self.momentum).addcdiv_(gradients, denominators)
            move_(parameters, momentum, rate)
        else:
            move_by_ratio_(parameters, gradients, denominators, rate)
