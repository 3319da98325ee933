"""LARS and LAMB for any training loop: torch optimisers with the arithmetic of their rows.

Every parameter is one row with one tensor, so a loop and the simulator move a layer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.optim.layerwise import LambRows, LarsRows, Layerwise
from gossamer.specs import check_range


class LayerwiseOptimizer(torch.optim.Optimizer):
    """A torch optimiser that moves each parameter as a rule for rows says."""

    rule: ClassVar[type[Layerwise]]

    def __init__(self, params: ParamsT, lr: float, options: Mapping[str, Any]) -> None:
        check_range(f"{self.rule.name}: lr", lr, 0.0)
        self.rule(**options)  # refuses options that make no sense
        self._options = tuple(options)
        super().__init__(params, {"lr": lr, **options})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step along the gradients that the parameters have now."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Read from the group, because a schedule or a checkpoint may have changed it.
            rule = self.rule(**{name: group[name] for name in self._options})
            for parameter in cast(list[Tensor], group["params"]):
                if parameter.grad is not None:
                    self._descend(rule, parameter, group["lr"])
        return loss

    def _descend(self, rule: Layerwise, parameter: Tensor, rate: float) -> None:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({slot: torch.zeros_like(parameter) for slot in rule.slots})
        assert parameter.grad is not None
        matrices = {slot: cast(Tensor, state[slot]).reshape(1, -1) for slot in rule.slots}
        row = parameter.reshape(1, -1)
        gradient = parameter.grad.reshape(1, -1)
        rule.suited([parameter.shape]).descend_(row, gradient, matrices, [state["step"]], rate)
        state["step"] += 1
        if row.data_ptr() != parameter.data_ptr():  # it is not contiguous, and was copied
            parameter.copy_(row.view_as(parameter))
            for slot, matrix in matrices.items():
                state[slot].copy_(matrix.view_as(parameter))


class Lars(LayerwiseOptimizer):
    """LARS (You, Gitman and Ginsburg, 2017); give biases and normalisations along: they have one
    dimension, so they move by plain momentum and do not decay."""

    rule = LarsRows

    def __init__(
        self, params: ParamsT, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:  # fmt: skip
        options = {"momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, lr, options)


class Lamb(LayerwiseOptimizer):
    """LAMB (You et al., 2020); tensors of one dimension move by Adam and do not decay."""

    rule = LambRows

    def __init__(
        self, params: ParamsT, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-6, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        options = {
            "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, lr, options)
