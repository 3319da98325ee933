"""Tensors of which only the shapes are computed, for runs whose values nobody looks at.

Torch has such tensors, on the device `meta`, but works out their shapes in Python, which takes
longer than the arithmetic of a small model. Shapes recur, so here they are looked up.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.tasks.flat_model import FlatModel

MOST_HELD_BYTES = 64_000_000
"""Replicas that are smaller in all have values: their arithmetic is faster than a look-up."""

_IN_PLACE, _VIEW, _INTO_OUT, _NEW = range(4)


def without_values(model: FlatModel, replicas: int) -> FlatModel:
    """The model with parameters that have a shape only, unless all replicas are small."""
    parameters, buffers = model.initial, model.initial_buffers
    if replicas * (parameters.nbytes + buffers.nbytes) <= MOST_HELD_BYTES:
        return model
    shown = copy.copy(model)
    shown.initial, shown.initial_buffers = parameters.to("meta"), buffers.to("meta")
    return shown


def arithmetic_of(model: FlatModel) -> AbstractContextManager[Any]:
    """The context in which the events of a run with this model are made."""
    return ShapesOnly() if model.initial.is_meta else nullcontext()


class ShapesOnly(TorchDispatchMode):
    """Answers every operation on tensors without values by the shape of its result."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[object, int] = {}
        self._known: dict[object, tuple[torch.Size, torch.dtype] | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if kind == _VIEW or not args:
            return func(*args, **named)
        if kind == _IN_PLACE:
            return args[0] if args[0].is_meta else func(*args, **named)
        if kind == _INTO_OUT:
            return named["out"] if named["out"].is_meta else func(*args, **named)
        key = (func, _key(args), *[(name, _key(value)) for name, value in named.items()])
        if (known := self._known.get(key)) is not None:
            return torch.empty(known[0], dtype=known[1], device="meta")
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.is_meta:
            self._known[key] = (result.shape, result.dtype)
        return result


def _kind_of(func: Any) -> int:
    """What an operation does, by its schema."""
    schema = func._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if any(argument.is_out for argument in written):
        return _INTO_OUT if len(written) == 1 else _VIEW
    if written:
        return _IN_PLACE if len(written) == 1 and written[0] is _first(schema) else _VIEW
    return _VIEW if any(result.alias_info is not None for result in schema.returns) else _NEW


def _first(schema: Any) -> Any:
    return next(a for a in schema.arguments if a.alias_info is not None)


def _key(value: Any) -> object:
    """What of an argument decides the shape of a result; the value of a fraction never does."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(_key(one) for one in cast(Sequence[Any], value))
    return float if isinstance(value, float) else value
