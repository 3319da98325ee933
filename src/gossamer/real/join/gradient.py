"""The gradient of a user's loop, which lies in the parameters' `.grad`, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from gossamer.real.transports.buffers import take_elements
from gossamer.real.transports.transport import Scattered

if TYPE_CHECKING:
    from gossamer.real.join.binding import Binding


class LoopGradient(Scattered):
    """Flattened only if somebody looks: a method that only descends along it, or hands it to a
    reduction, saves a copy of the model."""

    binding: Binding
    numbers: range
    """Of the parameters that it is the gradient of."""
    along: Sequence[Tensor] | None = None
    """Where a mean lies that was made of it, only to be read; None: in the `.grad`s."""
    check_look: Callable[[], None] | None = None
    """Raises where it is too early to look at it."""

    @staticmethod
    def of(binding: Binding) -> LoopGradient:
        token = _token(binding, range(len(binding.parameters)))
        token.write_into, token.places = binding.write_gradient, binding.gradient_places
        token.lend, token.cut = binding.lend_gradient, binding.cut
        return token

    @staticmethod
    def part(binding: Binding, numbers: range) -> LoopGradient:
        """Of some of the parameters."""
        token = _token(binding, numbers)
        token.write_into = partial(binding.write_part, numbers)
        token.cut = partial(binding.cut_part, numbers)
        token.places, token.lend = _nowhere, _not_lent
        return token

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.cat and (whole := _put_together(args[0])) is not None:
            return whole
        flat = [_flat(value) for value in args]
        options = {name: _flat(value) for name, value in (kwargs or {}).items()}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*flat, **options)

    def vector(self) -> Tensor:
        """All of it in one piece."""
        if self.along is not None:
            return joined([piece.reshape(-1) for piece in self.along])
        if self.check_look is not None:
            self.check_look()
        if len(self.numbers) == len(self.binding.parameters):
            return self.binding.flat_gradient()
        whole = take_elements(self.count, self.kind)
        self.write_into(self.cut(whole), 1.0)
        return whole


def _token(binding: Binding, numbers: range) -> LoopGradient:
    token = torch.empty(0).as_subclass(LoopGradient)
    token.binding, token.numbers = binding, numbers
    token.count = sum(binding.layout.sizes[number] for number in numbers)
    token.kind, token.home = binding.dtype, binding.home
    token.lent = partial(_lent, binding, numbers)
    token.edition = 0
    return token


def _lent(binding: Binding, numbers: range, mean: Tensor) -> LoopGradient:
    return _standing_in(binding, numbers, binding.cut_part(numbers, mean))


def _standing_in(binding: Binding, numbers: range, along: Sequence[Tensor]) -> LoopGradient:
    """A mean in the place of the gradients of these parameters."""
    token = LoopGradient.part(binding, numbers)
    token.along = along
    return token


def _put_together(values: Sequence[Any]) -> LoopGradient | None:
    """Means of all parts, in order, are the mean of the whole; nothing need be copied."""
    parts = [value for value in values if isinstance(value, LoopGradient)]
    if len(parts) != len(values) or any(part.along is None for part in parts):
        return None
    numbers = [number for part in parts for number in part.numbers]
    binding = parts[0].binding
    if numbers != list(range(len(binding.parameters))):
        return None
    along = [piece for part in parts for piece in part.along or ()]
    return _standing_in(binding, range(len(numbers)), along)


def _nowhere(edition: int) -> None:
    """What a part's mean is written into; it is always lent."""


def _not_lent(edition: int, pieces: Sequence[Tensor], give_back: Callable[[], None]) -> bool:
    return False


def _flat(value: Any) -> Any:
    if isinstance(value, LoopGradient):
        return value.vector()
    if isinstance(value, list | tuple):
        return type(value)(_flat(one) for one in cast("Sequence[Any]", value))
    return value


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """One vector; a large one lies in memory that was used before."""
    first = pieces[0]
    if first.device.type != "cpu":
        return torch.cat(list(pieces))
    whole = take_elements(sum(piece.numel() for piece in pieces), first.dtype)
    return torch.cat(list(pieces), out=whole)
