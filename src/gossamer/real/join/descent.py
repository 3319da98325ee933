"""The update of torch's SGD, without what surrounds it.

For a small model `optimizer.step()` spends most of its time in hooks, profiling and sorting its
tensors. Where the optimiser is torch's own SGD and nobody listens to its steps, the same arithmetic
is done here, to the same bits. Any other optimiser makes its own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
)

from gossamer.real.join.step_guard import has_other_hooks

_SCHEDULES = "torch.optim.lr_scheduler"
_together = cast(Any, torch)
"""Its words for lists of tensors: one call, and on a GPU one kernel, for all of them."""
_Plan = tuple[list[nn.Parameter], list[Tensor], list[Tensor]]


class Descent:
    """One step of an optimiser at given places: its parameters, or memory that stands for them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._optimizer = cast(Any, optimizer)
        self._is_sgd = type(optimizer) is torch.optim.SGD
        self._at = {id(parameter): number for number, parameter in enumerate(parameters)}

    def step(self) -> None:
        """One step of the optimiser on its own parameters."""
        self._optimizer.step()

    def descend_at(
        self, places: Sequence[Tensor], along: Sequence[Tensor] | None = None
    ) -> bool:  # fmt: skip
        """Make the step at places in the order of the parameters, which take no gradient; `along`
        others than the `.grad`s, if given. False, and nothing is changed, where only the optimiser
        itself can make it."""
        if not self._is_sgd or self._is_watched():
            return False
        planned: list[tuple[dict[str, Any], _Plan]] = []
        for group in self._optimizer.param_groups:
            plan = self._plan(group, places, along)
            if plan is None:
                return False
            planned.append((group, plan))
        for group, plan in planned:
            if plan[0]:
                self._descend_group(group, *plan)
        return True

    def _is_watched(self) -> bool:
        """Whether somebody would miss a call of `optimizer.step`. Schedules put themselves before
        it too, only to see it called, which the loop tells them anyway."""
        optimizer = self._optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return True
        if has_other_hooks() or _global_optimizer_post_hooks:
            return True
        own = optimizer.__dict__.get("step")
        if own is None:
            return False
        is_of_schedule = getattr(own, "__globals__", {}).get("__name__") == _SCHEDULES
        return not is_of_schedule or getattr(own, "__wrapped__", None) is not torch.optim.SGD.step

    def _plan(
        self, group: dict[str, Any], places: Sequence[Tensor], along: Sequence[Tensor] | None
    ) -> _Plan | None:
        """What moves, where it is and along what; None if there is anything to the group that
        needs the optimiser's own code."""
        if group["fused"] or group["differentiable"]:
            return None
        if type(group["lr"]) is not float or isinstance(group["weight_decay"], Tensor):
            return None
        moving: list[nn.Parameter] = []
        targets: list[Tensor] = []
        direction: list[Tensor] = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or gradient.requires_grad:
                return None
            number = self._at.get(id(parameter))
            moving.append(parameter)
            targets.append(parameter.detach() if number is None else places[number])
            direction.append(gradient if number is None or along is None else along[number])
        return moving, targets, direction

    def _descend_group(
        self, group: dict[str, Any], moving: Sequence[nn.Parameter], targets: list[Tensor],
        direction: list[Tensor],
    ) -> None:  # fmt: skip
        if group["maximize"]:
            direction = _together._foreach_neg(direction)
        if group["weight_decay"] != 0:
            direction = _together._foreach_add(direction, targets, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            direction = self._with_momentum(moving, direction, group)
        _together._foreach_add_(targets, direction, alpha=-group["lr"])

    def _with_momentum(
        self, moving: Sequence[nn.Parameter], direction: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        states = [self._optimizer.state[parameter] for parameter in moving]
        velocities = [state.get("momentum_buffer") for state in states]
        if all(velocity is not None for velocity in velocities):
            _together._foreach_mul_(velocities, group["momentum"])
            _together._foreach_add_(velocities, direction, alpha=1 - group["dampening"])
        else:
            for number, (state, own) in enumerate(zip(states, direction, strict=True)):
                velocity = velocities[number]
                if velocity is None:
                    velocities[number] = state["momentum_buffer"] = own.detach().clone()
                else:
                    velocity.mul_(group["momentum"]).add_(own, alpha=1 - group["dampening"])
        if group["nesterov"]:
            return _together._foreach_add(direction, velocities, alpha=group["momentum"])
        return velocities


Momentum = Callable[[float], float]
"""What is left of the momentum of an SGD."""


def slowed(options: dict[str, Any], momentum: Momentum) -> dict[str, Any]:
    """The options of a group of torch's SGD. Without momentum there is nothing to dampen or to look
    ahead with."""
    left = momentum(options["momentum"])
    none: dict[str, Any] = {} if left else {"dampening": 0.0, "nesterov": False}
    return {**options, "momentum": left, **none}


@contextmanager
def slowing(
    optimizer: torch.optim.Optimizer, momentum: Momentum | None, share: float
) -> Generator[None]:
    """Inside, the optimiser has that share of its learning rate, and torch's SGD what is left of
    its momentum; any other one has all of its own, for its rate would be none for plain SGD."""
    is_slowed = momentum is not None and isinstance(optimizer, torch.optim.SGD)
    names = ("lr", "momentum", "dampening", "nesterov") if is_slowed else ("lr",)
    before = [{name: group[name] for name in names} for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        if momentum is not None and is_slowed:
            group.update(slowed(own, momentum))
        if share != 1.0:
            group["lr"] = own["lr"] * share
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update(own)


def lay_out_state(optimizer: Any) -> None:
    """The optimiser's vectors lie in memory as their parameters do, which have moved: fused kernels
    go through both from the first number to the last, whatever their strides say."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        own = cast("dict[str, Any]", state)
        for name, value in own.items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_alike and value.stride() != parameter.stride():
                like = torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device)
                own[name] = like.copy_(value)
