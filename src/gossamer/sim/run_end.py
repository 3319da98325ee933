"""The end of a run: who is cut short there, and who goes on with what a dead worker has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import RunOver
from gossamer.pending import Pending

if TYPE_CHECKING:
    from gossamer.sim.world import World

LABEL = "end"
"""Of what a worker awaits behind its last step: that is no waiting, for it has nothing to do."""


class RunEnd:
    """Knows when the samples were processed, and who waits behind its last step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.finished_ns: int | None = None
        """When an asynchronous run had processed its samples."""
        self.between: set[int] = set()
        """Who has opened a step and not begun its gradient."""
        self._at_the_end: dict[int, Pending[bool]] = {}
        is_mortal = any(fault.kind == "kill" for fault in world.cluster.faults)
        self.may_go_on = is_mortal and world.budget.promises
        """Whether somebody may die and leave what only others who wait for it can make up for."""

    def progressed(self) -> None:
        """After each gradient; the one that completes the samples ends an asynchronous run.

        Whoever is still computing is cut short: a slow worker does not set the end. Who waits for
        something before its next gradient is too: that one is never computed. Only a group
        completes the step that it has begun.
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
        """Whether there is more to do, once everybody is at the end: a worker that died meanwhile
        may have left something."""
        answer = self._at_the_end[rank] = Pending[bool](LABEL)
        self.reconsider()
        return answer

    def reconsider(self) -> None:
        """Somebody came to the end, or died."""
        world, waiting = self._world, self._at_the_end
        expected = [rank for rank in world.speakers if rank in world.working]
        if waiting and all(rank in waiting for rank in expected):
            again = world.budget.reopen()
            self._at_the_end = {}
            for _, answer in sorted(waiting.items()):
                answer.resolve(again)
