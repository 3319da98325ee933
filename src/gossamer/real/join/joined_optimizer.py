"""The optimiser whose step is `worker.step()`, for whatever drives an optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError

MakeStep = Callable[[Optimizer, bool], None]
"""Makes a step of the method with the gradients of this optimiser's parameters. The second argument
says that the gradients come from a gradient scaler, so they may be infinite."""


class JoinedOptimizer(Optimizer):
    """Stands for the user's optimiser in schedulers, scalers and frameworks. Its groups, its state
    and its defaults are the user's; only its step is the coupled one."""

    def __init__(
        self, optimizer: Optimizer, make_step: MakeStep, *, is_coupled: bool
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        """The user's own."""
        self._make_step = make_step
        # A plain scaler leaves out the step of a worker whose gradient is infinite, but then the
        # others would wait for it. An optimiser that supports scaling is told instead.
        is_told = is_coupled or getattr(optimizer, "_step_supports_amp_scaling", False)
        self._step_supports_amp_scaling = is_told
        self._is_coupled = is_coupled
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A step of the method. A closure is called once, before it, and its value is returned."""
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not hasattr(self, "found_inf"):  # which a scaler sets while it makes a step
            self._make_step(self.optimizer, False)
        elif self._is_coupled:
            self._unscale()
            self._make_step(self.optimizer, True)
        else:
            self._pass_on()
        return loss

    def _unscale(self) -> None:
        scale: Tensor | None = vars(self)["grad_scale"]
        if scale is None:
            return  # the loop has done so, to clip
        factor = scale.double().reciprocal().float()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))

    def _pass_on(self) -> None:
        """Alone, the user's optimiser deals with scaled gradients itself."""
        own: Any = self.optimizer
        own.grad_scale, own.found_inf = vars(self)["grad_scale"], vars(self)["found_inf"]
        try:
            self._make_step(own, False)
        finally:
            del own.grad_scale, own.found_inf


# ---------------------------------------------------------------------- gradient scalers


def check_scaler(scaler: Any) -> None:
    if not hasattr(scaler, "is_enabled"):
        raise ConfigurationError(
            f"worker.step() takes a gradient scaler or nothing, got a {type(scaler).__name__}; a "
            "closure is called by worker.optimizer.step(closure)"
        )


def known_to(scaler: Any, joined: Sequence[JoinedOptimizer]) -> list[Optimizer]:
    """Of each, the one of the two optimisers that the scaler has seen, perhaps to unscale it."""
    seen = scaler._per_optimizer_states
    return [one if id(one) in seen else one.optimizer for one in joined]


def unscale(scaler: Any, optimizer: Optimizer) -> None:
    """Unscale unless the loop has done so, to clip; torch has no public way of asking."""
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    if stage == "STEPPED":
        raise ConfigurationError(
            "worker.step(scaler) was called twice without scaler.update() in between, so gradients "
            "would be used without being unscaled; call scaler.update() after every step"
        )
    if stage == "READY":
        scaler.unscale_(optimizer)


def note_step(scaler: Any, optimizer: Optimizer) -> None:
    """Note what `scaler.step` would have noted; `scaler.update` makes the scaler ready again."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = type(state["stage"]).STEPPED
