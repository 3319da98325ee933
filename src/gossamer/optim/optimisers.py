"""The table of optimisers that update many workers at once.

If the learning rate is one number, a single row on the CPU gets bit for bit what `torch.optim`
computes with `foreach=False`, because each update makes the same operations in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.optim.elementwise import Adagrad, Adam, AdamW, RMSprop, Sgd
from gossamer.optim.layerwise import LambRows, LarsRows, Muon
from gossamer.optim.optimiser import Optimiser, Rate, State
from gossamer.optim.yellowfin import Chunk, Tuner, descend_rows_, state_names
from gossamer.specs import bind, parse_spec

__all__ = [
    "OPTIMISERS",
    "Adagrad",
    "Adam",
    "AdamW",
    "LambRows",
    "LarsRows",
    "Muon",
    "Optimiser",
    "RMSprop",
    "Sgd",
    "YellowFinRows",
    "clip_one",
    "clip_rows",
    "make_optimiser",
]


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


_CLASSES: dict[str, type[Optimiser]] = {
    optimiser.name: optimiser
    for optimiser in (Sgd, Adam, AdamW, Muon, LarsRows, LambRows, Adagrad, RMSprop, YellowFinRows)
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
