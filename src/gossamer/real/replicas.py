"""A replica in a transport's window, with an optimiser of ours beside it (the `Replica` protocol).

Servers use it everywhere, workers in `gossamer train`. Its arithmetic is that of the simulator's
store with one row, so equal inputs give equal bits in both worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.optim.optimisers import Optimiser, clip_one
from gossamer.real.transports.buffers import joined


class PublishedReplica:
    """Flat parameters in a window that others can read and, if shared, change.

    What descends them is left to its subclasses: an optimiser of ours, or the user's own.
    """

    def __init__(
        self, window: Tensor, guard: AbstractContextManager[None] | None,
        on_descend: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`on_descend` is told how stale each gradient is that was applied."""
        self.window = window
        self.version = 0
        self.read: Sequence[int] = ()
        """The version at which a worker's last gradient was begun."""
        self.output: Tensor | None = None
        self.memory: dict[str, Tensor] = {}
        self.uses_weight = False
        self._weight = 1.0
        # Python enters a lock faster than an empty context.
        self._guard = cast(AbstractContextManager[None], RLock()) if guard is None else guard
        self._on_descend = on_descend

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.uses_weight = True
        self._weight = weight

    def snapshot(self) -> Tensor:
        with self._guard:
            return joined([self.window])

    def add_(self, delta: Tensor, scale: float = 1.0) -> None:
        with self._guard:
            self.window.add_(delta.to(self.window.device), alpha=scale)

    def mix_(self, theirs: Tensor, beta: float) -> None:
        with self._guard:
            self.window.lerp_(theirs.to(self.window.device), beta)

    def assign_(self, value: Tensor) -> None:
        with self._guard:
            self.window.copy_(value)

    def _tell_staleness(self, read: int | Sequence[int]) -> None:
        for version in (read,) if isinstance(read, int) else read or self.read:
            self._on_descend(self.version - version)


class WindowReplica(PublishedReplica):
    """A replica with an optimiser of ours beside it."""

    def __init__(
        self,
        window: Tensor,
        optimiser: Optimiser,
        learning_rate: Callable[[], float],
        *,
        clip: float | None = None,
        guard: AbstractContextManager[None] | None = None,
        on_descend: Callable[[int], None] = lambda staleness: None,
    ) -> None:
        super().__init__(window, guard, on_descend)
        self._has_begun = False
        self._begun: tuple[Tensor, float] | None = None
        """Value and weight as of the step that goes on, where others must not see what it does."""
        self.steps = 0
        """How many steps the optimiser has made since it was new or reset."""
        self.optimiser = optimiser
        self.state = {
            slot: torch.full_like(window, optimiser.initial(slot)).unsqueeze(0)
            for slot in optimiser.slots
        }
        self._learning_rate = learning_rate
        self._clip = clip

    @property
    def learning_rate(self) -> float:
        return self._learning_rate()

    def descend_(
        self, gradient: Tensor, *, read: int | Sequence[int] = (), at: Tensor | None = None,
        share: float = 1.0,
    ) -> None:  # fmt: skip
        self._tell_staleness(read)
        rows = self.clipped(gradient).unsqueeze(0)
        with self._guard:
            self.optimiser.descend_(
                self.window.unsqueeze(0), rows, self.state, [self.steps],
                self._learning_rate() * share, None if at is None else at.unsqueeze(0),
            )  # fmt: skip
            self.version += 1
            self.steps += 1

    def clipped(self, gradient: Tensor) -> Tensor:
        return clip_one(gradient, self._clip)

    def penalised(self, gradient: Tensor, at: Tensor) -> Tensor:
        return self.optimiser.penalised(self.clipped(gradient), at)

    def optimiser_state(self) -> Tensor:
        slots = [matrix[0] for matrix in self.state.values()]
        return torch.cat(slots) if slots else self.window.new_empty(0)

    def load_optimiser_state_(self, state: Tensor) -> None:
        matrices = list(self.state.values())
        for matrix, piece in zip(matrices, state.chunk(len(matrices) or 1), strict=False):
            matrix[0].copy_(piece)

    def reset_optimiser_(self) -> None:
        self.steps = 0
        for slot, matrix in self.state.items():
            matrix.fill_(self.optimiser.initial(slot))

    def begin_step(self) -> None:
        """A method whose weight moves changes value and weight one after the other, so for others
        both stay as they are now until its next step. In the first step any method may be one."""
        keeps = self.uses_weight or not self._has_begun
        self._begun = (self.snapshot(), self._weight) if keeps else None
        self._has_begun = True

    def end_steps(self) -> None:
        self._begun = None

    def for_others(self) -> tuple[Tensor, float]:
        """A value and the weight that belongs to it, in whatever thread and at whatever moment."""
        begun = self._begun
        return (self.snapshot(), self._weight) if begun is None else begun

    def state_dict(self) -> dict[str, Any]:
        """Its part of a checkpoint, as copies that belong together."""
        with self._guard:
            return {
                "value": self.window.clone(),
                "version": self.version,
                "steps": self.steps,
                "weight": self.weight,
                "optimiser": self.optimiser_state().clone(),
                "memory": {name: tensor.clone() for name, tensor in self.memory.items()},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All but the value, which lies in the window before anybody can reach it."""
        self.version = int(state["version"])
        self.steps = int(state["steps"])
        self._weight = float(state["weight"])
        self.load_optimiser_state_(state["optimiser"])
        self.memory = {name: tensor.clone() for name, tensor in state["memory"].items()}
