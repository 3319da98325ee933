"""What a loop does to its parameters between two steps: clamping them, loading others.

Where the module trains in the published memory it counts as it is. A private copy is given anew in
every step, so there a change is carried over to what is published. Where servers hold the model it
is refused: the next answer would undo it, on this worker alone.
"""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gossamer.errors import ConfigurationError
from gossamer.methods import Method
from gossamer.real.join.binding import ModuleBinding
from gossamer.real.join.replica import LoopReplica

_LOOK = 1 << 12
"""Numbers of one parameter that are compared in a step: torch does not count changes by `.data`."""
_FIRST = 2
"""Steps in which all of every parameter are."""


class Changes:
    """Those of one worker's loop."""

    def __init__(
        self, model: nn.Module, binding: ModuleBinding, replica: LoopReplica, method: Method
    ) -> None:
        self._binding = binding
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
        """By every forward pass, which may well be undone between two."""

    def given(self, point: Tensor | None) -> None:
        """The loop has got its parameters for the next step: at a point of the method's choice, or
        at the replica itself."""
        binding = self._binding
        if binding.is_private:
            # To torch they have not moved, and a graph from before would be gone back through.
            increment_version(binding.parameters)
        elif self._holder is None:
            return
        if self._is_shared and point is None and (self._has_changed or self._left > 0):
            # Others change the replica meanwhile, so that only the difference may be added. Whoever
            # changes nothing does not pay for the copy; a first late change takes theirs away.
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
        """As bytes: what is no number is not even equal to itself."""
        flat = self._binding.parameters[number].detach().reshape(-1)
        return (flat if is_whole else flat[:_LOOK]).view(torch.uint8)

    def carry_over(self) -> None:
        """The loop makes its step: what it has changed since is to stay so."""
        changed = self.noticed()
        if changed:
            self.publish(changed)

    def noticed(self) -> list[int]:
        """The numbers of the parameters that the loop has changed since they were given."""
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
                self._left = _FIRST  # through `.data`, and perhaps others beside it
        if self._holder is not None:
            changed = {number for number in changed if not self._is_renormed[number]}
        return sorted(changed)

    def publish(self, numbers: list[int]) -> None:
        """They are to stay so."""
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
