"""A replica in a transport's window (the `Replica` protocol), and one with an optimiser of ours.

Workers and servers of `gossamer train` use the latter, and so do servers of a user's loop whose
method names an optimiser for them. Its arithmetic is that of the simulator's store with one row, so
equal inputs give equal bits in both worlds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.optim.optimisers import Optimiser, clip_one
from gossamer.optim.tuning import RATE, SCHEDULE, tunable_names, tuned_optimiser
from gossamer.real.transports.buffers import joined

Guard = AbstractContextManager[None]


@dataclass(frozen=True)
class Place:
    """Where a replica is published."""

    window: Tensor
    guard: Guard | None = None
    """Held while the window is changed, if others may change it, too."""
    on_stale: Callable[[int, int], None] = lambda missed, at_ns: None
    """Called with the number of updates that an applied gradient missed, and when."""


class PublishedReplica:
    """Flat parameters in a window that others can read and, if it is shared, change.

    A subclass says how the parameters descend: with an optimiser of ours, or with the user's own.
    """

    def __init__(self, place: Place) -> None:
        self.window = place.window
        self.version = 0
        self.read: Sequence[int] = ()
        """The version at which a worker's last gradient was begun."""
        self.late = 0
        """How many steps older than that the parameters were with which it was made."""
        self.output: Tensor | None = None
        self.memory: dict[str, Tensor] = {}
        self.uses_weight = False
        self._weight = 1.0
        # Python enters a lock faster than an empty context.
        self._guard = cast(Guard, RLock()) if place.guard is None else place.guard
        self._on_stale = place.on_stale

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
        self._moved()

    def mix_(self, theirs: Tensor, beta: float) -> None:
        with self._guard:
            self.window.lerp_(theirs.to(self.window.device), beta)
        self._moved()

    def assign_(self, value: Tensor) -> None:
        with self._guard:
            self.window.copy_(value)
        self._moved()

    def _moved(self) -> None:
        """The window has changed, and not by a descent."""

    def descend_(
        self, gradient: Tensor, *, read: int | Sequence[int] = (), at: Tensor | None = None,
        share: float = 1.0,
    ) -> None:  # fmt: skip
        for version in (read,) if isinstance(read, int) else read or self.read:
            # A version that was lost with a server is not older than what its standby has.
            age = max(0, self.version - version) + self.late
            self._on_stale(age, time.monotonic_ns())
        self._descend(gradient, at, share)

    def _descend(self, gradient: Tensor, at: Tensor | None, share: float) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The replica's part of a checkpoint, as copies that belong together."""
        with self._guard:
            return self._state()

    def _state(self) -> dict[str, Any]:
        memory = {name: tensor.clone() for name, tensor in self.memory.items()}
        return {"value": self.window.clone(), "version": self.version, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all but the value, which lies in the window before anybody can reach it."""
        self.version = int(state["version"])
        self.memory = {name: tensor.clone() for name, tensor in state["memory"].items()}


class WindowReplica(PublishedReplica):
    """A replica with an optimiser of ours beside it."""

    def __init__(
        self, place: Place, optimiser: Optimiser, learning_rate: Callable[[float], float],
        clip: float | None = None, clips_first: bool = False, *, has_schedule: bool = False,
    ) -> None:  # fmt: skip
        """`learning_rate` gives the rate at a pace of the schedule. `clips_first` says that
        gradients are clipped before they are sent, and not again."""
        super().__init__(place)
        self._has_begun = False
        self._begun: tuple[Tensor, float] | None = None
        """Value and weight at the beginning of a step during which others must see no change."""
        self.steps = 0
        """How many steps the optimiser has made since it was new or reset."""
        self.optimiser = self._asked = optimiser
        self._has_schedule = has_schedule
        self._factors: Mapping[str, float] = {}
        self.state = {
            slot: torch.full_like(self.window, optimiser.initial(slot)).unsqueeze(0)
            for slot in optimiser.slots
        }
        self._learning_rate = learning_rate
        self._clip = clip
        self._clips_first = clips_first

    @property
    def learning_rate(self) -> float:
        factors = self._factors
        return self._learning_rate(factors.get(SCHEDULE, 1.0)) * factors.get(RATE, 1.0)

    @property
    def tunable(self) -> tuple[str, ...]:
        return tunable_names(vars(self._asked), has_schedule=self._has_schedule)

    def tune_(self, factors: Mapping[str, float]) -> None:
        self._factors = dict(factors)
        self.optimiser = tuned_optimiser(self._asked, factors)

    def _descend(self, gradient: Tensor, at: Tensor | None, share: float) -> None:
        rows = (gradient if self._clips_first else self.clipped(gradient)).unsqueeze(0)
        with self._guard:
            self.optimiser.descend_(
                self.window.unsqueeze(0), rows, self.state, [self.steps],
                self.learning_rate * share, None if at is None else at.unsqueeze(0),
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
        """A method with a push-sum weight changes value and weight one after the other. Others see
        both as they are now until the next step. In the first step any method may have one."""
        keeps = self.uses_weight or not self._has_begun
        self._begun = (self.snapshot(), self._weight) if keeps else None
        self._has_begun = True

    def end_steps(self) -> None:
        self._begun = None

    def for_others(self) -> tuple[Tensor, float]:
        """A value and the weight that belongs to it, in whatever thread and at whatever moment."""
        begun = self._begun
        return (self.snapshot(), self._weight) if begun is None else begun

    def _state(self) -> dict[str, Any]:
        own = {"steps": self.steps, "weight": self.weight}
        return {**super()._state(), **own, "optimiser": self.optimiser_state().clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.steps = int(state["steps"])
        self._weight = float(state["weight"])
        self.load_optimiser_state_(state["optimiser"])
