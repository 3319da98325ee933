"""Optimisers that update many workers at once.

An optimiser is a frozen set of options. Its state lives outside of it, as one [rows, parameters]
matrix per slot. A worker, a server or an outer optimiser is one row, and a few large operations
update a whole batch of rows. If the learning rate is one number, a single row on the CPU gets bit
for bit what `torch.optim` computes with `foreach=False`, because each update makes the same
operations in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.optim.yellowfin import Chunk, Tuner, descend_rows_, state_names
from gossamer.specs import bind, check_range, parse_spec, print_dataclass

State = Mapping[str, Tensor]
"""One [rows, parameters] matrix per slot."""
Rate = float | Tensor
"""One learning rate for all rows, or a [rows, 1] tensor."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's factors, as published: they take small singular values quickly to about 1."""


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
        _move_(parameters, direction, rate)

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
        first, second = state["first"], state["second"]
        first.lerp_(gradients, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradients, gradients, value=1 - self.beta2)
        corrections = [1 - self.beta1 ** (step + 1) for step in steps]
        if isinstance(rate, Tensor):
            step_size = rate / _per_row(corrections, parameters)
        else:
            # Divided in double precision, so that no row depends on the rows updated beside it.
            step_size = _per_row([rate / one for one in corrections], parameters)
        root = _per_row([(1 - self.beta2 ** (step + 1)) ** 0.5 for step in steps], parameters)
        denominators = second.sqrt().div_(root).add_(self.epsilon)
        _move_by_ratio_(parameters, first, denominators, step_size)


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
        _move_by_ratio_(parameters, gradients, denominators, rate)


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
            _move_(parameters, momentum, rate)
        else:
            _move_by_ratio_(parameters, gradients, denominators, rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YellowFinRows(Optimiser, Tuner):
    """YellowFin (Zhang and Mitliagkas, 2019), each row tuned on its own."""

    name = "yellowfin"
    description = "tunes momentum and rate by itself; the learning rate is a factor, 1 as a rule"
    own_rate = 1.0

    def __post_init__(self) -> None:
        Optimiser.__post_init__(self)
        Tuner.__post_init__(self)

    @property
    def slots(self) -> tuple[str, ...]:
        return (*state_names(self), "tuner")

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        scalars = state["tuner"]
        if scalars.shape[1] < self.columns:
            raise ConfigurationError(
                f"yellowfin: a window of {self.window} needs a model of at least {self.columns} "
                f"parameters, got {scalars.shape[1]}; use a smaller window or a larger model"
            )
        displacement, mean_gradient, *past = (state[name] for name in state_names(self))
        whole = Chunk(parameters, gradients, displacement, mean_gradient, rate, past)
        descend_rows_(self, [whole], scalars)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
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
    shapes: tuple[tuple[int, ...], ...] | None = dataclasses.field(
        default=None, init=False, kw_only=False, compare=False
    )
    """The shapes of the tensors in the flat vectors, one after the other; set by `suited`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", below=1.0)
        if not 1 <= self.iterations < 100:
            raise ConfigurationError(
                f"muon: iterations must be from 1 to 99, got {self.iterations}; 5 are usual"
            )

    def suited(self, shapes: Sequence[Sequence[int]]) -> Optimiser:
        own = dataclasses.replace(self)
        object.__setattr__(own, "shapes", tuple(tuple(shape) for shape in shapes))
        return own

    def _update_(
        self, parameters: Tensor, gradients: Tensor, state: State, steps: Sequence[int], rate: Rate
    ) -> None:
        if self.shapes is None:
            raise ConfigurationError(
                "muon must know which numbers are matrices; use it where a model is trained, or "
                "choose adamw"
            )
        matrices: defaultdict[tuple[int, ...], list[slice]] = defaultdict(list)
        at = 0
        for shape in self.shapes:
            place = slice(at, at + torch.Size(shape).numel())
            at = place.stop
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
                if isinstance(rate, Tensor):
                    parameters[:, place].addcmul_(own, rate * factor, value=-1)
                else:
                    parameters[:, place].add_(own, alpha=-rate * factor)

    def _direction(self, momentum: Tensor, gradients: Tensor) -> Tensor:
        momentum.lerp_(gradients, 1 - self.momentum)
        return gradients.lerp(momentum, self.momentum) if self.nesterov else momentum


_CLASSES: dict[str, type[Optimiser]] = {
    optimiser.name: optimiser
    for optimiser in (Sgd, Adam, AdamW, Muon, Adagrad, RMSprop, YellowFinRows)
}

OPTIMISERS: dict[str, str] = {name: made.description for name, made in _CLASSES.items()}


def make_optimiser(spec: str | Optimiser) -> Optimiser:
    """The optimiser that a spec such as "sgd:momentum=0.9,nesterov=true" describes."""
    if isinstance(spec, Optimiser):
        return spec
    name, given = parse_spec(spec, "optimiser")
    if name not in _CLASSES:
        raise unknown_name("optimiser", name, _CLASSES)
    options: dict[str, Any] = bind("optimiser", name, _CLASSES[name], given)
    return _CLASSES[name](**options)


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


def clip_rows(gradients: Tensor, max_norm: float) -> Tensor:
    """A new matrix in which each row is scaled down to a norm of at most `max_norm`.

    One row gets what `torch.nn.utils.clip_grad_norm_` makes of one gradient. Rows that are short
    enough are multiplied by exactly 1, which keeps a GPU from having to report which ones are.
    """
    norms = cast(
        Tensor,
        torch.linalg.vector_norm(  # pyright: ignore[reportUnknownMemberType]
            gradients, dim=1, keepdim=True
        ),
    )
    return gradients * torch.clamp(max_norm / (norms + 1e-6), max=1.0)


def clip_one(gradient: Tensor, max_norm: float | None) -> Tensor:
    """One gradient as `clip_rows` clips each row; without a bound it stays as it is."""
    return gradient if max_norm is None else clip_rows(gradient.unsqueeze(0), max_norm)[0]


def _per_row(values: Sequence[float], like: Tensor) -> float | Tensor:
    """One number where all rows agree, which keeps the arithmetic of torch.optim; or a column."""
    if all(value == values[0] for value in values):
        return values[0]
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _move_(parameters: Tensor, direction: Tensor, rate: Rate) -> None:
    if isinstance(rate, Tensor):
        parameters.addcmul_(direction, rate, value=-1)
    else:
        parameters.add_(direction, alpha=-rate)


def _move_by_ratio_(
    parameters: Tensor, numerators: Tensor, denominators: Tensor, rate: Rate
) -> None:
    if isinstance(rate, Tensor):
        parameters.addcdiv_(numerators * rate, denominators, value=-1)
    else:
        parameters.addcdiv_(numerators, denominators, value=-rate)
