"""What everybody held at the end of a round: of a synchronous run complete rounds are evaluated.

When the last worker ends a round the first may be well into the next ones. So each leaves behind
what it holds when it ends the round, and the row is made when the last one has.
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
    """By one worker: its model, copied only if it changes before the row is made, and how far it
    and those it speaks for had come."""

    point: Point
    weight: float
    buffers: Tensor
    steps: int
    samples: int


@dataclass(frozen=True)
class CompleteRound:
    """A round that everybody alive has ended: what they held then, one row each, in order."""

    workers: Tensor
    weights: list[float]
    buffers: Tensor
    steps: int
    samples: int


class Rounds:
    """Collects what is left behind in the rounds that are to be evaluated."""

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
        """The first of the rounds may be complete: somebody has ended it, or is gone."""
        world = self._world
        while self._open:
            step, left = next(iter(self._open.items()))
            if any(rank in world.working and rank not in left for rank in world.speakers):
                return
            alive = [rank for rank in world.speakers if rank in world.alive]
            del self._open[step]
            self._close({rank: left[rank] for rank in alive if rank in left}, left)

    def _close(self, living: dict[int, RoundState], left: dict[int, RoundState]) -> None:
        store, metrics = self._world.workers, self._world.metrics.workers
        if living:
            found = list(living.values())
            spoken = {r for rank in living for r in self._members.get(rank, (rank,))}
            # Of who is gone, all that it did.
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
