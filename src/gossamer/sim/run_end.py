"""The end of a run: whose work is interrupted, and who does what a dead worker has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import RunOver
from gossamer.pending import Pending

if TYPE_CHECKING:
    from gossamer.sim.world import World

LABEL = "end"
"""The label of what a worker awaits after its last step. This is not counted as waiting, because
the worker has nothing to do."""


class RunEnd:
    """Knows when the samples were processed, and who waits behind its last step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.finished_ns: int | None = None
        """When an asynchronous run had processed its samples."""
        self.between: set[int] = set()
        """The workers that have opened a step and not yet begun its gradient."""
        self._at_the_end: dict[int, Pending[bool]] = {}
        self.may_go_on = world.cluster.is_mortal and world.budget.promises
        """Whether a worker may die and leave samples that the waiting workers must process."""

    def progressed(self) -> None:
        """Called after each gradient. The one that completes the samples ends an asynchronous run.

        The gradients that others still compute are aborted, so that a slow worker does not delay
        the end. A worker that waits for something before its next gradient is interrupted, too.
        Only a group completes the step that it has begun.
        """
        world, budget = self._world, self._world.budget
        if budget.is_synchronous or not budget.is_spent or self.finished_ns is not None:
            return
        self.finished_ns = world.kernel.now
        for rank in sorted(world.working):
            if not world.batcher.under_way.get(rank):
                if rank in self.between:
                    world.kernel.interrupt_main(rank, RunOver())
            elif not budget.promises:
                for gradient in world.abort_gradients(rank):
                    gradient.fail(RunOver())

    def goes_on(self, rank: int) -> Pending[bool]:
        """Resolves when all workers are at the end, with whether a dead worker has left samples."""
        answer = self._at_the_end[rank] = Pending[bool](LABEL)
        self.reconsider()
        return answer

    def reconsider(self) -> None:
        """A worker has reached the end, or has died."""
        world, waiting = self._world, self._at_the_end
        if len(waiting) < len(world.speakers) - world.size + len(world.working):
            return  # the number alone says that somebody is missing
        expected = [rank for rank in world.speakers if rank in world.working]
        if waiting and all(rank in waiting for rank in expected):
            again = world.budget.reopen()
            self._at_the_end = {}
            for _, answer in sorted(waiting.items()):
                answer.resolve(again)
