"""What breaks in a simulated cluster, and when it heals."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from gossamer.config.faults import FOREVER, Fault
from gossamer.sim.kernel import SECOND

if TYPE_CHECKING:
    from gossamer.sim.world import World


class SimulatedFaults:
    """Begins and ends the faults of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.slow = [1.0] * world.size
        """The factor on the compute time of each worker."""
        self._paused_until: defaultdict[int, int] = defaultdict(int)
        world.kernel.resume_at = self._paused_until.__getitem__
        for fault in world.cluster.faults:
            if fault.is_trait:
                # It must begin before the first step of anybody.
                self._begin(fault)
            else:
                world.kernel.at(round(fault.at * SECOND), self._begin, fault)

    def _begin(self, fault: Fault) -> None:
        world, post = self._world, self._world.post
        world.observer.happened(max(fault.worker, 0), str(fault), world.kernel.now)
        match fault.kind:
            case "kill":
                world.kill(fault.worker)
            case "pause":
                self._pause(fault.worker, round(fault.lasts * SECOND))
            case "slow":
                self.slow[fault.worker] *= fault.amount
            case "slow-link":
                post.slow_card(fault.worker, fault.amount)
            case "drop":
                post.drops.append(fault.amount)
            case "delay":
                post.extra_delay_s += fault.amount
            case _:
                post.partitions.append(fault.sides)
                deadline = round(world.cluster.deadline * SECOND)
                world.kernel.at(deadline, self._give_up_across, fault)
        if fault.lasts != FOREVER:
            world.kernel.at(round(fault.lasts * SECOND), self._end, fault)

    def _end(self, fault: Fault) -> None:
        post = self._world.post
        match fault.kind:
            case "slow":
                self.slow[fault.worker] /= fault.amount
            case "slow-link":
                post.slow_card(fault.worker, 1 / fault.amount)
            case "drop":
                post.drops.remove(fault.amount)
            case "delay":
                post.extra_delay_s -= fault.amount
            case "partition":
                post.heal(fault.sides)
                self._reach_again()
                self._world.collectives.reconsider()
            case _:
                pass  # A pause ends by itself, and nobody comes back from death.

    def _pause(self, rank: int, duration_ns: int) -> None:
        now = self._world.kernel.now
        before = max(now, self._paused_until[rank])
        until = max(before, now + duration_ns)
        self._paused_until[rank] = until
        for gradient in self._world.batcher.under_way.get(rank, ()):
            # What the worker was computing stands still for as long.
            gradient.paused_ns += until - before

    def _give_up_across(self, fault: Fault) -> None:
        """The partition has outlasted the deadline: to each side the others count as lost."""
        world = self._world
        if fault.sides not in world.post.partitions:
            return
        for rank in world.alive:
            across = (r for r in range(world.size) if world.post.are_separated(rank, r))
            world.members.cut_off(rank, across)
        world.members.fail_lost()
        world.collectives.reconsider()

    def _reach_again(self) -> None:
        """A worker that can be reached again counts as alive again."""
        world = self._world
        for rank in range(world.size):
            lost = world.members.cut_off_from(rank)
            world.members.cut_off(rank, (r for r in lost if world.post.are_separated(rank, r)))
