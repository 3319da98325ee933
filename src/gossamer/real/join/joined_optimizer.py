"""The optimiser whose step is `worker.step()`, for whatever drives an optimiser."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError
from gossamer.optim.wrapped_optimiser import WrappedOptimizer
from gossamer.real.join.several_optimizers import parts_of


@dataclass(frozen=True)
class ScaledGradients:
    """What a gradient scaler leaves to an optimiser whose step it calls."""

    parts: Sequence[Optimizer]
    """The user's."""
    scaled: Sequence[Optimizer]
    """The user's optimisers whose gradients are still to be unscaled."""
    scale: Tensor | None
    found_inf: Tensor

    def unscale(self) -> None:
        if self.scale is None:
            return
        factor = self.scale.double().reciprocal().float()
        for parameter in _with_gradient(self.scaled):
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.device))

    def step_alone(self) -> None:
        """Make the steps that the scaler would have let the optimisers make one by one."""
        for part in self.parts:
            if getattr(part, "_step_supports_amp_scaling", False):
                self._pass_on(part)
                continue
            if part in self.scaled:
                ScaledGradients([part], [part], self.scale, self.found_inf).unscale()
            is_finite = not float(self.found_inf)
            if is_finite or all(_is_finite(p.grad) for p in _with_gradient([part])):
                part.step()

    def _pass_on(self, part: Any) -> None:
        """It deals with scaled gradients itself."""
        part.grad_scale = self.scale if part in self.scaled else None
        part.found_inf = self.found_inf
        try:
            part.step()
        finally:
            del part.grad_scale, part.found_inf


def _with_gradient(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())


MakeStep = Callable[[Optimizer, ScaledGradients | None], None]
"""Makes a step of the method with the gradients of this optimiser's parameters. The second argument
is there if they come from a gradient scaler, so they may be infinite."""


class JoinedOptimizer(WrappedOptimizer):
    """Stands for the user's optimiser in schedulers, scalers and frameworks. Its groups, its state
    and its defaults are the user's; only its step is the coupled one."""

    def __init__(
        self, optimizer: Optimizer, make_step: MakeStep, *, is_coupled: bool
    ) -> None:  # fmt: skip
        super().__init__(optimizer)
        self.family: Sequence[JoinedOptimizer] = (self,)
        """All that stand for an optimiser of this loop. Whatever the loop unscales one of them by
        is unscaled in the others."""
        self._make_step = make_step
        self._is_coupled = is_coupled

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a scaler leaves unscaling, and the step of infinite gradients, to `step`. A plain
        scaler leaves out the step of a worker whose gradient is infinite, but then the others would
        wait for it; and it unscales what the loop has unscaled under another name."""
        parts = parts_of(self.optimizer)
        if self._is_coupled or len(parts) > 1:
            return True
        is_scaled = not any(self._is_unscaled(part) for part in parts)
        return not is_scaled or getattr(parts[0], "_step_supports_amp_scaling", False)

    def _is_unscaled(self, part: Optimizer) -> bool:
        """Whether the loop has unscaled this one of the user's, to clip."""
        states = _states_of_caller()
        names = [part, *(one for one in self.family if part in parts_of(one.optimizer))]
        seen = [states[id(one)]["stage"].name for one in names if id(one) in states]
        return "UNSCALED" in seen

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A step of the method. A closure is called once, before it, and its value is returned."""
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaled: ScaledGradients | None = None
        if hasattr(self, "found_inf"):  # which a scaler sets while it makes a step
            parts, given = parts_of(self.optimizer), vars(self)
            still = [part for part in parts if not self._is_unscaled(part)]
            scaled = ScaledGradients(parts, still, given["grad_scale"], given["found_inf"])
        self._make_step(self.optimizer, scaled)
        return loss


# ---------------------------------------------------------------------- gradient scalers


def _states_of_caller() -> dict[int, Any]:
    """What the scaler that calls knows of each optimiser, by its id. A scaler tells an optimiser
    neither that, nor which scaler it is, so it is looked for among the callers."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            return vars(caller)["_per_optimizer_states"]
        frame = frame.f_back
    return {}


def check_scaler(scaler: Any, optimizer: Optimizer) -> None:
    """It must be one, and have been updated since its last step."""
    if not hasattr(scaler, "is_enabled"):
        raise ConfigurationError(
            f"worker.step() takes a gradient scaler or nothing, got a {type(scaler).__name__}; a "
            "closure is called by worker.optimizer.step(closure)"
        )
    state = scaler._per_optimizer_states.get(id(optimizer))
    if state is not None and state["stage"].name == "STEPPED":
        raise ConfigurationError(
            "worker.step(scaler) was called twice without scaler.update() in between, so gradients "
            "would be used without being unscaled; call scaler.update() after every step"
        )
