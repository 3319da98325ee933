"""Several optimisers, and perhaps several models, of one loop taken together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError

T = TypeVar("T")


class SeveralModels(nn.ModuleList):
    """The models of one loop, such as a generator and a discriminator."""


class SeveralOptimizers(Optimizer):
    """The optimisers of one loop as one. An optimiser without a gradient makes no step."""

    def __init__(self, parts: Sequence[Optimizer], *, skips_zeros: bool = False) -> None:
        """`skips_zeros` is for servers, to which no gradient at all comes as zeros."""
        self.parts = list(parts)
        self._skips_zeros = skips_zeros
        # Optimizer.__init__ would copy the groups, and this one's own step is nobody's business.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _States(self.parts)

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.parts[0].defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError("a group is added to one of the optimisers, not to all together")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self.parts:
            parameters = (p for group in part.param_groups for p in group["params"])
            if any(self._counts(parameter.grad) for parameter in parameters):
                part.step()

    def _counts(self, gradient: Tensor | None) -> bool:
        return gradient is not None and (not self._skips_zeros or bool(gradient.any()))

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["optimizers"], strict=True):
            part.load_state_dict(state)


class _States(MutableMapping[Any, Any]):
    """What several optimisers remember, by parameter."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._of = {
            p: part for part in parts for group in part.param_groups for p in group["params"]
        }
        self._parts = parts

    def __getitem__(self, parameter: Any) -> Any:
        if parameter not in self._of or parameter not in self._of[parameter].state:
            raise KeyError(parameter)
        return self._of[parameter].state[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        if parameter in self._of:
            self._of[parameter].state[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._of[parameter].state[parameter]

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from list(part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The user's optimisers themselves."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def taken_together(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer]
) -> tuple[nn.Module, Optimizer]:
    """What `join` is given, as one model and one optimiser."""
    if not isinstance(model, nn.Module):
        model = SeveralModels(_all_of(model, nn.Module, "model"))
    if isinstance(optimizer, Optimizer):
        return model, optimizer
    parts = _all_of(optimizer, Optimizer, "optimizer")
    held = [id(p) for part in parts for group in part.param_groups for p in group["params"]]
    if len(set(held)) != len(held):
        raise ConfigurationError(
            "a parameter is held by two of the optimisers, which would both move it; give it to one"
        )
    if not parts:
        raise ConfigurationError("join was given an empty list of optimisers; give it at least one")
    return model, parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


def _all_of(given: object, kind: type[T], what: str) -> list[T]:
    """A list of the user's, if it is one."""
    parts = list(cast("Sequence[object]", given)) if isinstance(given, list | tuple) else [given]
    found = [one for one in parts if isinstance(one, kind)]
    for one in parts:
        if not isinstance(one, kind):
            raise ConfigurationError(
                f"gossamer.join takes a torch {kind.__name__} as its {what}, or a list of them, "
                f"got {type(one).__name__}"
            )
    return found
