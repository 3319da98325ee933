"""The `Replica` of a worker, or of a server, that descends with the user's own optimiser."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.optim.optimisers import clip_one
from gossamer.optim.tuning import RATE, tunable_names, tuned_value
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.gradient import LoopGradient
from gossamer.real.join.several_optimizers import parts_of
from gossamer.real.replicas import Place, PublishedReplica, WindowReplica

Momentum = Callable[[float], float]
"""Says how much is left of the momentum of SGD."""


def slowed(options: dict[str, Any], momentum: Momentum) -> dict[str, Any]:
    """The options of a group of torch's SGD with what is left of its momentum. Without momentum
    there is nothing to dampen, and Nesterov's form does not exist."""
    left = momentum(options["momentum"])
    none: dict[str, Any] = {} if left else {"dampening": 0.0, "nesterov": False}
    return {**options, "momentum": left, **none}


@contextmanager
def slowing(
    optimizer: torch.optim.Optimizer, momentum: Momentum | None, share: float
) -> Generator[None]:
    """Inside, the optimiser has that share of its learning rate, and torch's SGD what is left of
    its momentum. Any other class keeps its own, because its rate would not suit plain SGD."""
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


def _by_our_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group with the two momenta of Adam apart."""
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    return {**group, **betas}


@contextmanager
def _tuning(optimizer: torch.optim.Optimizer, factors: Mapping[str, float]) -> Generator[None]:
    """Inside, the optimiser's options are those of the loop with these factors."""
    if not factors:
        yield
        return
    before = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        known = _by_our_names({**group, RATE: group["lr"]})
        new = {
            name: tuned_value(name, float(known[name]), factor)
            for name, factor in factors.items()
            if name in known
        }
        group["lr"] = new.pop(RATE, group["lr"])
        if "betas" in group:
            group["betas"] = tuple(
                new.pop(name, own)
                for name, own in zip(("beta1", "beta2"), group["betas"], strict=True)
            )
        group.update(new)
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group.update({name: value for name, value in own.items() if name != "params"})


class LoopReplica(PublishedReplica):
    """The `Replica` of a worker whose loop is the user's own."""

    def __init__(
        self, binding: ModuleBinding, place: Place, optimizer: torch.optim.Optimizer,
        before_step: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(place)
        self.clip: float | None = None
        """Set by a loop for one step: the gradient is clipped to this norm when it is applied."""
        self.skips_infinite = False
        """A gradient scaler is in use, which finds its scale by infinite gradients."""
        self.skips_this = False
        """The gradient of this step was infinite: it goes to servers as zero, and not here."""
        self.before_descent: Callable[[], object] | None = None
        """Called before another gradient takes the place of the loop's own."""
        self.momentum: Momentum | None = None
        """Says how much is left of the momentum of torch's SGD; None leaves it as it is."""
        self.rule: WindowReplica | None = None
        """What descends instead of the loop's optimiser, where servers have another one."""
        self._binding = binding
        self._optimizer = optimizer
        self._before_step = before_step
        self._factors: Mapping[str, float] = {}

    @property
    def learning_rate(self) -> float:
        """The rate of the first group; negative where the optimiser maximises."""
        group = self._optimizer.param_groups[0]
        return -float(group["lr"]) if group.get("maximize") else float(group["lr"])

    @property
    def tunable(self) -> tuple[str, ...]:
        """The schedule is the loop's own."""
        group = _by_our_names(self._optimizer.param_groups[0])
        return tunable_names(group, has_schedule=False)

    def tune_(self, factors: Mapping[str, float]) -> None:
        self._factors = dict(factors)

    def _moved(self) -> None:
        self._binding.note_move()

    def replace_(self, number: int, value: Tensor, before: Tensor | None) -> None:
        """The loop has changed one parameter to this value. It was at the replica itself, or, with
        `before`, at a point that the method had derived from it."""
        with self._guard:
            own = self._binding.cut(self.window)[number]
            if before is None:
                own.copy_(value)
            else:
                own.add_(value.to(own) - before.to(own), alpha=self._weight)

    def _descend(self, gradient: Tensor, at: Tensor | None, share: float) -> None:
        clip, self.clip = self.clip, None
        is_infinite = self.skips_infinite and not bool(torch.isfinite(gradient).all())
        if self.skips_this or is_infinite:
            return
        self.version += 1
        if self.rule is not None:
            self.rule.descend_(clip_one(gradient, clip), share=share)
            return
        self._stand_in(gradient)
        if clip is not None:
            nn.utils.clip_grad_norm_(self._binding.parameters, clip)
        if self._before_step is not None:
            self._before_step()
        point = at if at is not None and any(self._decays()) else None
        if self.momentum is None and share == 1.0 and not self._factors:
            self._binding.descend(self._optimizer.step, self._guard, point)
            return
        with ExitStack() as stack:
            for part in parts_of(self._optimizer):
                stack.enter_context(slowing(part, self.momentum, share))
                stack.enter_context(_tuning(part, self._factors))
            self._binding.descend(self._optimizer.step, self._guard, point)

    def _stand_in(self, gradient: Tensor) -> None:
        """Let a gradient that is not the loop's own take the place of the `.grad`s."""
        if self.before_descent is not None:
            self.before_descent()
        if isinstance(gradient, LoopGradient):
            if gradient.kept is None:
                return
            pieces = gradient.kept
        else:
            pieces = self._binding.cut(gradient)
        is_sparse = isinstance(self._optimizer, torch.optim.SparseAdam)
        self._binding.set_gradient(pieces, is_sparse=is_sparse)

    def clipped(self, gradient: Tensor) -> Tensor:
        clip, self.clip = self.clip, None
        return clip_one(self._held(gradient), clip)

    def _held(self, gradient: Tensor) -> Tensor:
        """The gradient with zeros for parameters that the optimiser does not hold."""
        groups, parameters = self._optimizer.param_groups, self._binding.parameters
        held = {id(parameter) for group in groups for parameter in group["params"]}
        is_part = gradient.numel() != self._binding.layout.total  # for one of several servers
        if is_part or all(id(parameter) in held for parameter in parameters):
            return gradient
        own = gradient.clone()
        pieces = own.split(list(self._binding.layout.sizes))
        for piece, parameter in zip(pieces, parameters, strict=True):
            if id(parameter) not in held:
                piece.zero_()
        return own

    def penalised(self, gradient: Tensor, at: Tensor) -> Tensor:
        gradient, decays = self.clipped(gradient), self._decays()
        if not any(decays):
            return gradient
        total = gradient.clone()
        sizes = list(self._binding.layout.sizes)
        for piece, weights, decay in zip(total.split(sizes), at.split(sizes), decays, strict=True):
            piece.add_(weights, alpha=decay)
        return total

    def _decays(self) -> list[float]:
        """The weight decay of each parameter: groups may differ, and torch's optimisers spare a
        parameter that has no gradient. One that maximises, at a negative rate, still decays."""
        chosen = {
            id(parameter): float(group.get("weight_decay", 0.0))
            * (-1.0 if group.get("maximize") else 1.0)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        return [chosen.get(id(parameter), 0.0) for parameter in self._binding.parameters]

    def _state_tensors(self) -> list[Tensor]:
        """The optimiser's vectors in order of their names, then of the parameters."""
        states = [self._optimizer.state.get(p, {}) for p in self._binding.parameters]
        names = sorted({
            name for state, p in zip(states, self._binding.parameters, strict=True)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0
        })  # fmt: skip
        return [state[name] for name in names for state in states if name in state]

    def optimiser_states(self) -> list[tuple[str, dict[str, Any]]]:
        """What the optimiser remembers of each parameter, by its name."""
        with self._guard:
            states = self._optimizer.state
            return [
                (name, {key: _copied(value) for key, value in states.get(p, {}).items()})
                for name, p in self._binding.named()
            ]

    def optimiser_state(self) -> Tensor:
        tensors = self._state_tensors()
        flat = [tensor.reshape(-1).to("cpu", self._binding.dtype) for tensor in tensors]
        return torch.cat(flat) if flat else self.window.new_empty(0)

    def load_optimiser_state_(self, state: Tensor) -> None:
        at = 0
        for tensor in self._state_tensors():
            tensor.copy_(state[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def reset_optimiser_(self) -> None:
        self._optimizer.state.clear()

    def _state(self) -> dict[str, Any]:
        """With a server's optimiser; a worker's is saved by its loop."""
        is_server = self._binding.is_server
        return super()._state() | (
            {"optimiser": self._optimizer.state_dict()} if is_server else {}
        )  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._binding.is_server:
            self._optimizer.load_state_dict(state["optimiser"])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
