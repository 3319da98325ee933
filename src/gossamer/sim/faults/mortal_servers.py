"""Servers that may die in virtual time, and the handles of those who survive it.

With standbys the addresses of the servers are followed by as many of their standbys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gossamer.observe.observer import Row
from gossamer.sim.kernel import SECOND
from gossamer.sim.replica_matrix import SimulatedReplica
from gossamer.standby import Client, Primary, Standby, bound_of
from gossamer.worker import Worker

if TYPE_CHECKING:
    from gossamer.sim.world import World


class MortalServers:
    """Which servers have died, and who answers for them."""

    def __init__(self, world: World, standby: str) -> None:
        self._world = world
        self._bound = bound_of(standby)
        self.died_ns: dict[int, int] = {}
        """By address, when a server has died."""

    def _standby_of(self, server: int) -> int:
        return server + len(self._world.slices)

    @property
    def acting(self) -> list[SimulatedReplica]:
        """The replica that answers for each range of the parameters."""
        world = self._world
        ends = range(world.size, world.size + len(world.slices))
        return [world.replicas[self._standby_of(e) if e in self.died_ns else e] for e in ends]

    def facts(self) -> Row:
        """What the deaths of servers have cost; nothing where there are no standbys."""
        if self._bound is None:
            return {}
        lost = self._world.metrics.told_of("lost updates").total
        return {"server_deaths": len(self.died_ns), "lost_updates": int(lost)}

    def kill(self, number: int) -> None:
        """The machine of a server is gone; as of a worker's death, the others learn of it later."""
        world = self._world
        end = world.size + number
        self.died_ns[end] = world.kernel.now
        world.recoveries.begin(end, f"server {number}", "died", world.kernel.now)
        world.kernel.end_tasks(end)
        world.post.bury(end)
        world.kernel.at(round(world.cluster.failure_detection * SECOND), self._announce, end)

    def _announce(self, server: int) -> None:
        self._world.recoveries.reached(server, "noticed", self._world.kernel.now)
        self._world.members.server_died(server)
        self._world.members.fail_lost()

    # ------------------------------------------------------------------ handles

    def worker(self, worker: Worker) -> Worker:
        """The handle of a worker, in its present life."""
        if self._bound is None:
            return worker
        world, rank = self._world, worker.rank
        life = world.members.life_of(rank)

        def is_alive() -> bool:
            return rank in world.alive and world.members.life_of(rank) == life

        return cast(Worker, Client(worker, world.method.server is not None, is_alive))

    def server(self, server: Worker) -> Worker:
        """The handle of a server, or of a standby."""
        world, end = self._world, server.rank
        if self._bound is None:
            return server
        if (standby := self._standby_of(end)) < world.ends:
            return cast(Worker, Primary(server, standby, self._bound))
        primary = end - len(world.slices)

        def took_over() -> None:
            what = f"the standby of server {primary - world.size} takes over"
            world.observer.happened(0, what, world.kernel.now)
            world.recoveries.ended(primary, "takes part", world.kernel.now)

        return cast(Worker, Standby(server, primary, took_over))
