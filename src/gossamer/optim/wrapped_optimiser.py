"""An optimiser that stands for another one: everything but the step is the other's."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class WrappedOptimizer(Optimizer):
    """Has the groups, the state and the defaults of `optimizer`, so that a scheduler changes its
    rates and a framework finds what it looks for."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # Optimizer.__init__ would copy the groups. __setstate__ makes the hooks and the profiling
        # of `step` that every optimiser has.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
