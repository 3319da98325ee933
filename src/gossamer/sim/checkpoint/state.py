"""The tensors that a run holds between two events, wherever they are, and their bits.

A tensor may be in the matrix of replicas, in a message on its way, in a timer, in the memory of a
method or in a local variable of a coroutine. The walk below finds all of them, and visits them in
the same order whenever the same events have been made: containers in their own order, attributes
by name, the variables of a coroutine as the interpreter keeps them.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigurationError

_IMMUTABLE_TYPE = 1 << 8
"""A flag of the types that are not made by a class statement."""
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), range, slice, torch.dtype})
# What follows has no tensor of the run, or leads out of it: a traceback leads to our callers.
_LEAVES = (
    type, ModuleType, CodeType, FrameType, TracebackType, np.ndarray, np.generic, random.Random,
    torch.nn.Module, torch.Generator,
)  # fmt: skip


def tensors_of(root: object, apart: Iterable[object]) -> list[Tensor]:
    """All tensors that can be reached from `root`, without what belongs to those `apart`."""
    kept = list(apart)
    seen = {id(one) for one in kept}
    found: list[Tensor] = []
    stack: list[Any] = [root]
    while stack:
        one = stack.pop()
        if type(one) in _PLAIN or id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)  # the number of an object is used again when it is gone
        if isinstance(one, Tensor):
            found.append(one)
        elif not isinstance(one, _LEAVES):
            stack.extend(reversed(_inside(one)))
    return found


def _inside(one: Any) -> Sequence[Any]:
    """What an object holds, in an order that does not depend on where it is in memory."""
    if isinstance(one, dict):
        return [part for entry in cast(dict[Any, Any], one).items() for part in entry]
    if isinstance(one, list | tuple | deque):
        return list(cast(Iterable[Any], one))
    if isinstance(one, set | frozenset):
        _check_plain(cast(Iterable[Any], one))
        return ()
    if isinstance(one, FunctionType):
        return [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__]
    if type(one).__flags__ & _IMMUTABLE_TYPE:
        return gc.get_referents(one)  # of the interpreter: coroutines, cells, partial functions
    names: set[str] = set(getattr(one, "__dict__", ()))
    for cls in type(one).__mro__:
        slots: Any = cls.__dict__.get("__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    return [getattr(one, name) for name in sorted(names) if hasattr(one, name)]


def _check_plain(members: Iterable[Any]) -> None:
    """A set has no order that could be found again, so it may hold no tensor."""
    for one in members:
        if isinstance(one, Tensor):
            raise ConfigurationError(
                "the method keeps tensors in a set, whose order a checkpoint cannot restore; keep "
                "them in a list or a dictionary"
            )


@dataclass(frozen=True)
class TensorState:
    """The bits of tensors, and how they lie in memory that several of them may share."""

    storages: list[Tensor]
    """The bytes of each piece of memory."""
    places: list[list[Any]]
    """The memory of each tensor, its kind of number, offset, shape and strides."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> TensorState:
        numbers: dict[int, int] = {}
        storages: list[Tensor] = []
        places: list[list[Any]] = []
        for one in tensors:
            storage = one.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(storages))
            if number == len(storages):
                whole = torch.empty(0, dtype=torch.uint8, device=one.device).set_(storage)
                storages.append(whole.cpu().clone())
            offset = one.storage_offset()
            kind = str(one.dtype).removeprefix("torch.")
            places.append([number, kind, offset, list(one.shape), list(one.stride())])
        return TensorState(storages, places)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are as many tensors of the same shapes."""
        mine = [(place[1], place[3]) for place in self.places]
        return mine == [(str(one.dtype).removeprefix("torch."), [*one.shape]) for one in tensors]

    def give(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Let the tensors have these bits. Whoever holds one of them holds it with its value."""
        memory = [
            torch.empty(one.shape, dtype=torch.uint8, device=device).copy_(one).untyped_storage()
            for one in self.storages
        ]
        pairs = list(zip(tensors, self.places, strict=True))
        # A view keeps the tensor that it is a view of; that one can change only without views.
        pairs.sort(key=lambda pair: _is_view(pair[0]), reverse=True)
        for one, (number, kind, offset, shape, stride) in pairs:
            whole = torch.empty(0, dtype=getattr(torch, kind), device=device)
            torch.utils.swap_tensors(one, whole.set_(memory[number], offset, shape, stride))


def _is_view(tensor: Tensor) -> bool:
    return tensor._base is not None  # pyright: ignore[reportPrivateUsage]
