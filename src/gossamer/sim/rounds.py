"""What all workers held at the end of a round, because a synchronous run is evaluated by rounds.

When the last worker ends a round, the first may already make a later one. So each worker leaves its
state behind when it ends the round, and the row is made when the last worker has done so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sim.replica_matrix import Point
from gossamer.sim.world import World


@dataclass(frozen=True)
class RoundState:
    """One worker's model at the end of a round, copied only if it changes before the row is made,
    and the steps and samples of the worker and its group."""

    point: Point
    weight: float
    buffers: Tensor
    steps: int
    samples: int


@dataclass(frozen=True)
class CompleteRound:
    """A round that all living workers have ended: what each held then, one row each, by rank."""

    workers: Tensor
    weights: list[float]
    buffers: Tensor
    steps: int
    samples: int


class Rounds:
    """Collects the states of the rounds that are to be evaluated."""

    def __init__(
        self,
        world: World,
        is_due: Callable[[int], bool],
        on_complete: Callable[[CompleteRound], None],
    ) -> None:
        """`is_due` is asked once for each round, with the samples of all rounds up to its end."""
        self._world = world
        self._members = {group[0]: group for group in world.groups}
        self._is_due = is_due
        self._on_complete = on_complete
        self._asked = 0
        self._open: dict[int, dict[int, RoundState]] = {}
        world.on_step_end = self._ended
        world.on_departure = self._consider

    def _ended(self, rank: int, step: int) -> None:
        world = self._world
        if step == self._asked:
            self._asked += 1
            if self._is_due(world.budget.samples_after(step)):
                self._open[step] = {}
        left = self._open.get(step)
        if left is None:
            return
        own = [world.metrics.workers[r] for r in self._members.get(rank, (rank,))]
        left[rank] = RoundState(
            world.workers.point(rank),
            world.replicas[rank].weight,
            world.batcher.buffers[rank].clone(),
            sum(one.steps for one in own),
            sum(one.samples for one in own),
        )
        self._consider()

    def _consider(self) -> None:
        """Close the rounds that are complete now that a worker has ended one, or is gone."""
        world = self._world
        while self._open:
            step, left = next(iter(self._open.items()))
            if any(
                rank in world.working and rank not in left
                and world.newcomers.takes_part(rank, step)
                for rank in world.speakers
            ):  # fmt: skip
                return
            alive = [rank for rank in world.speakers if rank in world.alive]
            del self._open[step]
            self._close({rank: left[rank] for rank in alive if rank in left}, left)

    def _close(self, living: dict[int, RoundState], left: dict[int, RoundState]) -> None:
        store, metrics = self._world.workers, self._world.metrics.workers
        if living:
            found = list(living.values())
            spoken = {r for rank in living for r in self._members.get(rank, (rank,))}
            # All work of those who are gone is counted.
            gone = [own for rank, own in metrics.items() if rank not in spoken]
            self._on_complete(
                CompleteRound(
                    store.take([one.point for one in found]),
                    [one.weight for one in found],
                    torch.stack([one.buffers for one in found]),
                    sum(one.steps for one in (*found, *gone)),
                    sum(one.samples for one in (*found, *gone)),
                )
            )
        for one in left.values():
            store.forget(one.point)
