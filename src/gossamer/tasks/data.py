"""Samples and their targets, each one tensor or several by name or by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

Tensors: TypeAlias = Any
"""A tensor, a dictionary of tensors by name, or a tuple of tensors; the first dimension of each
counts the samples."""


def mapped(tree: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    """The same tensors, each changed."""
    if isinstance(tree, Mapping):
        named = cast(Mapping[str, Tensors], tree)
        return {name: mapped(part, change) for name, part in named.items()}
    if isinstance(tree, tuple):
        return tuple(mapped(part, change) for part in cast(tuple[Tensors, ...], tree))
    return change(tree)


def leaves(tree: Tensors) -> list[Tensor]:
    """The tensors alone."""
    if isinstance(tree, Mapping):
        return [
            leaf for part in cast(Mapping[str, Tensors], tree).values() for leaf in leaves(part)
        ]
    if isinstance(tree, tuple):
        return [leaf for part in cast(tuple[Tensors, ...], tree) for leaf in leaves(part)]
    return [tree]


def arguments(
    inputs: Tensors, targets: Tensors, labels_as: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is handed to a model: a dictionary by the names of its tensors, a tuple by place;
    and the targets, where the model takes them, by the name of that parameter."""
    labels = {labels_as: targets} if labels_as else {}
    if isinstance(inputs, Mapping):
        return (), {**cast(Mapping[str, Any], inputs), **labels}
    if isinstance(inputs, tuple):
        return cast(tuple[Any, ...], inputs), labels
    return (inputs,), labels


@dataclass(frozen=True, eq=False)
class Data:
    """Samples and their targets, aligned along the first dimension."""

    inputs: Tensors
    targets: Tensors
    labels_as: str = ""
    """The parameter of the model that takes the targets; empty: none does."""

    def __post_init__(self) -> None:
        """Refuse tensors that are not aligned: an index would silently pair strangers."""
        lengths = {len(leaf) for leaf in (*leaves(self.inputs), *leaves(self.targets))}
        assert len(lengths) == 1, "every input needs one target"

    def __len__(self) -> int:
        """The number of samples."""
        return len(leaves(self.inputs)[0])

    @property
    def labels(self) -> Tensor:
        """What a split by class goes by: the targets, of several the first."""
        return leaves(self.targets)[0]

    def to(self, device: torch.device | str) -> Data:
        """The same data on a device."""
        return self._each(lambda tensor: tensor.to(device))

    def at(self, index: Tensor, keys: Tensor | None = None) -> tuple[Tensors, Tensors]:
        """Inputs and targets of these samples; an index of several dimensions keeps them. What is
        read anew for each batch may be read differently by the key of each worker's step."""
        inputs = mapped(self.inputs, lambda tensor: tensor[index])
        return inputs, mapped(self.targets, lambda tensor: tensor[index])

    def first(self, count: int) -> Data:
        """The first so many samples."""
        return self if count >= len(self) else self._each(lambda tensor: tensor[:count])

    def parts(self, size: int) -> Iterator[Data]:
        """All samples in their order, in portions."""
        for start in range(0, len(self), size):
            yield self._each(lambda tensor, at=start: tensor[at : at + size])

    def call(self, module: nn.Module) -> Any:
        """What a model makes of all samples."""
        given, named = arguments(self.inputs, self.targets, self.labels_as)
        return module(*given, **named)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Data:
        return replace(
            self, inputs=mapped(self.inputs, change), targets=mapped(self.targets, change)
        )


def call(module: nn.Module, sample: Tensor | Data) -> Any:
    """What a model makes of one batch, whether it is a tensor or more."""
    return sample.call(module) if isinstance(sample, Data) else module(sample)


def device_of(sample: Tensor | Data) -> torch.device:
    """Where the batch is."""
    return sample.device if isinstance(sample, Tensor) else leaves(sample.inputs)[0].device
