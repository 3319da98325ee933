"""Watches what a loop does to its coupled model beside `worker.step()`.

- An optimiser's step outside of `worker.step()` is refused: the others would not hear of it, or the
  model would move twice.
- Parameters must stay where `join` has put them, and frozen ones must stay frozen.
- A loop may change its parameters between two steps, by clamping them or loading others. Where the
  module trains in the published memory, a change counts as it is. A private copy is made anew in
  every step, so there a change is carried over to what is published. Where servers hold the model,
  it is refused: the next answer would undo it, on this worker alone.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.errors import ConfigurationError
from gossamer.methods import Method
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.checks import check_not_wrapped, parameters_of, second_optimiser
from gossamer.real.join.joined_optimizer import JoinedOptimizer
from gossamer.real.join.replica import LoopReplica
from gossamer.real.join.several_optimizers import parts_of

_LOOK = 1 << 12
"""Numbers of one parameter that are compared in a step: torch does not count changes by `.data`."""
_FIRST = 2
"""Steps in which all numbers of all parameters are compared."""


class LoopWatch:
    """Watches the loop of one worker."""

    def __init__(
        self, model: nn.Module, binding: ModuleBinding, optimizer: torch.optim.Optimizer,
        replica: LoopReplica, method: Method,
    ) -> None:  # fmt: skip
        self.is_stepping = False
        """Set while `worker.step()` runs, in which the optimiser may step."""
        self._parts = parts_of(optimizer)
        self._names = {id(parameter): name for name, parameter in binding.named()}
        self._hook: Any = None
        self._binding = binding
        trained = {id(p): at for at, p in enumerate(binding.parameters)}
        named = [(name, p, trained.get(id(p))) for name, p in model.named_parameters()]
        # One parameter is looked at in each step: a look at all may take longer than a step does.
        self._next = cycle(named).__next__
        self._is_first = True
        self._replica = replica
        self._is_shared = method.shares_replica
        self._has_changed = False
        self._holder = method.name if method.servers_hold_model else None
        """The method, where its servers hold the model."""
        self._point: Tensor | None = None
        self._versions: list[int] = []
        self._samples: dict[int, Tensor] = {}
        self._turns = cycle(range(len(binding.parameters)))
        self._left = _FIRST
        own = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        }
        self._is_renormed = [id(parameter) in own for parameter in binding.parameters]
        """Whether every forward pass renorms a parameter, which need not last to the next one."""

    # ------------------------------------------------------------------ optimisers

    def begin(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._stepped)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_stepping or isinstance(optimizer, JoinedOptimizer):
            return
        if any(optimizer is part for part in self._parts):
            raise ConfigurationError(
                "optimizer.step() was called inside `with gossamer.join(...)`: beside worker.step()"
                " the model would move twice, and instead of it no other worker would hear of the"
                " step; leave it out and call worker.step() (worker.step(scaler) for"
                " scaler.step(optimizer)), or give worker.optimizer to what calls it"
            )
        for parameter in parameters_of(optimizer):
            if id(parameter) in self._names:
                raise second_optimiser(optimizer, self._names[id(parameter)])

    # ------------------------------------------------------------------ parameters

    def given(self, point: Tensor | None) -> None:
        """The loop has got its parameters for the next step: at a point that the method has chosen,
        or at the replica itself. Called where they are a private copy, or servers hold the
        model."""
        binding = self._binding
        if binding.is_private:
            # Torch has not seen the parameters move; without this, a backward pass through a graph
            # from before would be let through.
            increment_version(binding.parameters)
        if self._is_shared and point is None and (self._has_changed or self._left > 0):
            # Others change the replica meanwhile, so only the difference may be added. A loop that
            # changes nothing does not pay for the copy; its first late change undoes theirs.
            point = binding.initial()
        self._point = point
        self._versions = [parameter._version for parameter in binding.parameters]
        self._samples = {}
        if binding.device.type == "cpu":
            is_whole = self._left > 0
            numbers = range(len(binding.parameters)) if is_whole else (next(self._turns),)
            self._samples = {n: self._sample(n, is_whole).clone() for n in numbers}
            self._left -= is_whole

    def _sample(self, number: int, is_whole: bool) -> Tensor:
        """The first numbers as bytes, because NaN is not equal to itself."""
        flat = self._binding.parameters[number].detach().reshape(-1)
        return (flat if is_whole else flat[:_LOOK]).view(torch.uint8)

    def look(self) -> None:
        """The loop makes its step: check one parameter."""
        if self._is_first:
            self._is_first = False
            check_not_wrapped(self._binding.parameters)
        binding = self._binding
        name, parameter, at = self._next()
        if at is not None:
            if binding.is_uniform and parameter.data_ptr() != binding.places[at].data_ptr():
                raise ConfigurationError(
                    f"parameter {name} no longer lies where gossamer.join put it, so it would not"
                    " be trained: something has replaced its .data inside the `with`; change it in"
                    " place (p.data.copy_(...)), and move or convert the model before joining"
                )
        elif parameter.requires_grad:
            raise ConfigurationError(
                f"parameter {name} was frozen when the model was joined and is to be trained now,"
                " which only this worker would see; join it trainable, with the learning rate 0"
                " until its time has come"
            )

    def changed(self) -> list[int]:
        """The numbers of the parameters that the loop has changed since it got them."""
        if not self._versions:
            return []
        parameters = self._binding.parameters
        changed = {
            number for number, version in enumerate(self._versions)
            if parameters[number]._version != version
        }  # fmt: skip
        for number, before in self._samples.items():
            now = self._sample(number, is_whole=True)[: before.numel()]
            if number not in changed and not torch.equal(now, before):
                changed.add(number)
                self._left = _FIRST  # by `.data`; others may have changed with it
        if self._holder is not None:
            changed = {number for number in changed if not self._is_renormed[number]}
        return sorted(changed)

    def publish(self, numbers: list[int]) -> None:
        """Let what the loop has changed stay."""
        if self._holder is not None:
            raise ConfigurationError(
                f"parameter {self._binding.layout.names[numbers[0]]} was changed in place between"
                f" two steps, but the servers of {self._holder} hold the model and would undo it;"
                " change it before the `with`, or use a method whose workers hold their own"
            )
        self._has_changed = True
        for number in numbers:
            value = self._binding.parameters[number].detach()
            before = None if self._point is None else self._binding.cut(self._point)[number]
            self._replica.replace_(number, value, before)
