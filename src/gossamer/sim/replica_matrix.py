"""The replicas of all workers as rows of one matrix, updated lazily and many at a time.

A descent waits in a queue until somebody reads a queued row; then one batched call applies all of
them. Likewise, the point of a gradient is only the number of a row; it is copied when that row is
about to change. Methods do not notice, because every access goes through `SimulatedReplica`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.optim.optimisers import Optimiser, clip_one, clip_rows
from gossamer.optim.tuning import RATE, SCHEDULE, tunable_names, tuned_optimiser
from gossamer.sim.kernel import Kernel


@dataclass(slots=True, eq=False)
class Point:
    """Where a gradient is taken: a row that has not changed since, or a copy of its old value."""

    row: int
    value: Tensor | None


class ReplicaStore:
    """One row per replica; one matrix per quantity of the optimiser."""

    def __init__(
        self, rows: int, initial: Tensor, optimiser: Optimiser, *, clip: float | None = None,
        clips_first: bool = False, kernel: Kernel | None = None,
    ) -> None:  # fmt: skip
        """The kernel's clock says when a row was last changed; without it the time stays 0."""
        self.optimiser = optimiser
        self.parameters = initial.repeat(rows, 1)
        self.state = {
            slot: torch.full_like(self.parameters, optimiser.initial(slot))
            for slot in optimiser.slots
        }
        self.versions = [0] * rows
        self.steps = [0] * rows
        """How many steps each row's optimiser has made since it was reset."""
        self.clip = clip
        self._clips_first = clips_first
        """Gradients are clipped before they are sent, and not when they are descended along."""
        self.changed_ns = 0
        """When a row was last changed."""
        self._kernel = kernel
        self.tuned: dict[int, Optimiser] = {}
        """By row, where it is not the optimiser of all."""
        self._queue: dict[int, tuple[Tensor, float, Tensor | None]] = {}
        self._points: dict[int, list[Point]] = {}

    def point(self, row: int) -> Point:
        """The row's present value, copied only if the row is about to change."""
        point = Point(row, None)
        self._points.setdefault(row, []).append(point)
        return point

    def forget(self, point: Point) -> None:
        """The gradient at this point has been evaluated or aborted."""
        watching = self._points.get(point.row)
        if watching is not None and point in watching:
            watching.remove(point)

    def value(self, row: int) -> Tensor:
        """The row itself, up to date. A caller that keeps it must copy it."""
        if row in self._queue:
            self.flush()
        return self.parameters[row]

    def writable(self, row: int) -> Tensor:
        """The row, about to be changed in place."""
        if self._kernel is not None:
            self.changed_ns = self._kernel.now
        value = self.value(row)
        for point in self._points.pop(row, ()):
            point.value = value.clone()
        return value

    def descend(
        self, row: int, gradient: Tensor, learning_rate: float, at: Tensor | None = None
    ) -> None:
        """Descend along a gradient, which was taken `at` a point if not at the row itself."""
        self.writable(row)
        optimiser = self.tuned.get(row, self.optimiser)
        self._queue[row] = (gradient, learning_rate, at if optimiser.weight_decay else None)
        self.versions[row] += 1

    def flush(self) -> None:
        """Apply every queued descent, those of one kind in one call."""
        queue, self._queue = self._queue, {}
        kinds: dict[tuple[float, bool, Optimiser | None], list[int]] = {}
        for row, (_, rate, at) in queue.items():
            kinds.setdefault((rate, at is None, self.tuned.get(row)), []).append(row)
        for (rate, _, tuned), rows in kinds.items():
            rows.sort()
            points = [at for row in rows if (at := queue[row][2]) is not None]
            self._descend_rows(
                rows, stack_rows([queue[row][0] for row in rows]), rate,
                stack_rows(points) if points else None, tuned or self.optimiser,
            )  # fmt: skip

    def _descend_rows(
        self, rows: list[int], gradients: Tensor, rate: float, points: Tensor | None,
        optimiser: Optimiser,
    ) -> None:  # fmt: skip
        steps = [self.steps[row] for row in rows]
        for row in rows:
            self.steps[row] += 1
        if self.clip is not None and not self._clips_first:
            gradients = clip_rows(gradients, self.clip)
        first, last = rows[0], rows[-1] + 1
        if last - first == len(rows):
            # Neighbouring rows are updated in place.
            state = {slot: matrix[first:last] for slot, matrix in self.state.items()}
            optimiser.descend_(self.parameters[first:last], gradients, state, steps, rate, points)
            return
        index = torch.tensor(rows, device=self.parameters.device)
        parameters = self.parameters[index]
        state = {slot: matrix[index] for slot, matrix in self.state.items()}
        optimiser.descend_(parameters, gradients, state, steps, rate, points)
        self.parameters[index] = parameters
        for slot, matrix in self.state.items():
            matrix[index] = state[slot]

    def take(self, points: Sequence[Point]) -> Tensor:
        """The points as one matrix, not copied where they lie in order; the store forgets them."""
        self.flush()
        for point in points:
            self.forget(point)
        return stack_rows([self.parameters[p.row] if p.value is None else p.value for p in points])


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """The rows as a matrix; a view where they are consecutive rows of one matrix already."""
    first = rows[0]
    base = first._base  # pyright: ignore[reportPrivateUsage]
    width = first.numel()
    if base is not None and base.shape[1:] == (width,) and base.is_contiguous():
        start = int(first.storage_offset() - base.storage_offset())
        if start % width == 0 and all(
            row._base is base  # pyright: ignore[reportPrivateUsage]
            and row.storage_offset() - base.storage_offset() == start + width * position
            for position, row in enumerate(rows)
        ):
            return base[start // width : start // width + len(rows)]
    return first.unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))


class SimulatedReplica:
    """A row of the store, as a method sees it (the `Replica` protocol)."""

    __slots__ = (
        "_factors", "_has_schedule", "_learning_rate", "_on_descend", "memory", "output", "row",
        "store", "weight",
    )  # fmt: skip

    def __init__(
        self,
        store: ReplicaStore,
        row: int,
        learning_rate: Callable[[float], float],
        on_descend: Callable[[SimulatedReplica, Sequence[int]], None],
        *,
        has_schedule: bool = False,
    ) -> None:
        """`learning_rate` gives the rate at a pace of the schedule."""
        self.store = store
        self.row = row
        self.weight = 1.0
        self.output: Tensor | None = None
        self.memory: dict[str, Tensor] = {}
        self._learning_rate = learning_rate
        self._on_descend = on_descend
        self._has_schedule = has_schedule
        self._factors: Mapping[str, float] = {}

    @property
    def version(self) -> int:
        return self.store.versions[self.row]

    @property
    def learning_rate(self) -> float:
        factors = self._factors
        return self._learning_rate(factors.get(SCHEDULE, 1.0)) * factors.get(RATE, 1.0)

    def snapshot(self) -> Tensor:
        return self.store.value(self.row).clone()

    def add_(self, delta: Tensor, scale: float = 1.0) -> None:
        self.store.writable(self.row).add_(delta, alpha=scale)

    def mix_(self, theirs: Tensor, beta: float) -> None:
        self.store.writable(self.row).lerp_(theirs, beta)

    def assign_(self, value: Tensor) -> None:
        self.store.writable(self.row).copy_(value)

    def descend_(
        self, gradient: Tensor, *, read: int | Sequence[int] = (), at: Tensor | None = None,
        share: float = 1.0,
    ) -> None:  # fmt: skip
        if gradient.shape != self.store.parameters.shape[1:]:
            raise ProtocolError(
                f"descend_ was given a gradient of shape {tuple(gradient.shape)}, and the replica "
                f"has {self.store.parameters.shape[1]} numbers; give it one of that length"
            )
        self._on_descend(self, (read,) if isinstance(read, int) else read)
        self.store.descend(self.row, gradient, self.learning_rate * share, at)

    def clipped(self, gradient: Tensor) -> Tensor:
        return clip_one(gradient, self.store.clip)

    def penalised(self, gradient: Tensor, at: Tensor) -> Tensor:
        return self.store.optimiser.penalised(self.clipped(gradient), at)

    def optimiser_state(self) -> Tensor:
        self.store.value(self.row)
        slots = [matrix[self.row] for matrix in self.store.state.values()]
        return torch.cat(slots) if slots else self.store.parameters.new_empty(0)

    def load_optimiser_state_(self, state: Tensor) -> None:
        self.store.value(self.row)
        matrices = list(self.store.state.values())
        for matrix, piece in zip(matrices, state.chunk(len(matrices) or 1), strict=False):
            matrix[self.row].copy_(piece)

    def reset_optimiser_(self) -> None:
        self.store.value(self.row)
        self.store.steps[self.row] = 0
        for slot, matrix in self.store.state.items():
            matrix[self.row].fill_(self.store.optimiser.initial(slot))

    @property
    def tunable(self) -> tuple[str, ...]:
        return tunable_names(vars(self.store.optimiser), has_schedule=self._has_schedule)

    def tune_(self, factors: Mapping[str, float]) -> None:
        self.store.value(self.row)  # what is queued is descended along as it was asked for
        self._factors = dict(factors)
        self.store.tuned[self.row] = tuned_optimiser(self.store.optimiser, factors)
