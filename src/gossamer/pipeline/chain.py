"""A model as a chain of parts, each of which takes what the part before it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from gossamer.errors import ConfigurationError


class Part(NamedTuple):
    """One part of a chain."""

    name: str
    run: Callable[[Any], Any]
    owns: tuple[str, ...]
    """The names of the parameters and modules of the whole model that belong to it."""
    reductions: int = 1
    """How often its result is summed over the machines that hold a layer together: once for each
    pair of a matrix that is split by columns and one that is split by rows."""


@runtime_checkable
class Chained(Protocol):
    """A model that says how it is cut. Its forward pass is the parts, one after the other."""

    def chain(self) -> Sequence[Part]: ...


def chain_of(model: nn.Module) -> list[Part]:
    """The parts of a model: of an `nn.Sequential` its layers, nested ones unfolded; any other
    model says them by a method `chain`."""
    if isinstance(model, Chained):
        return list(model.chain())
    if not isinstance(model, nn.Sequential):
        raise ConfigurationError(
            f"{type(model).__name__} cannot be cut into stages, because nobody knows in which "
            "order its modules run; make it an nn.Sequential, or give it a method chain() that "
            "returns its parts"
        )
    return list(_unfolded(model, ""))


def _unfolded(model: nn.Sequential, prefix: str) -> Sequence[Part]:
    parts: list[Part] = []
    for name, child in model.named_children():
        whole = prefix + name
        if type(child) is nn.Sequential and len(child):
            parts += _unfolded(child, whole + ".")
        else:
            parts.append(Part(whole, child, (whole,), int(has_products(child))))
    return parts


def has_products(module: nn.Module) -> bool:
    """Whether a module multiplies by matrices, so that machines can hold a share of it each."""
    return any(parameter.dim() > 1 for parameter in module.parameters())
