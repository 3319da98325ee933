"""How stale gradients are: the updates that each missed between its read and its application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.sim.replica_matrix import SimulatedReplica
    from gossamer.sim.world import World

Read = tuple[int, int]
"""The version of a worker's replica, and the updates of all, when a gradient's point was read."""


class Updates:
    """Counts the gradients that are applied, wherever."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.count = 0
        self.read: dict[int, Read] = {}
        """Of the gradient that each worker got last."""

    def descended(self, replica: SimulatedReplica, read: Sequence[int]) -> None:
        """Count an update. `read` are the versions at which a server's gradients were read; for a
        worker's own update the world remembers that of its last gradient."""
        world = self._world
        is_worker = replica.store is world.parts.workers
        if is_worker and world.parts.servers_hold_model:
            return  # a copy moves on between two reads of the servers
        known = self.read.get(replica.row) if is_worker and not read else None
        versions = read if known is None else (known[0],)
        end = replica.row if is_worker else world.replicas.index(replica, world.size)
        for version in versions:
            self._applied(end, replica.version - version, known)
        self.count += not versions

    def told(self, rank: int, *, is_shared: bool) -> None:
        """A worker has made an update without `descend_`, of its own or of shared parameters."""
        versions = self._world.parts.workers.versions
        version, count = self.read[rank]
        missed = self.count - count if is_shared else versions[rank] - version
        versions[rank] += not is_shared
        self._applied(rank, missed)

    def _applied(self, end: int, staleness: int, read: Read | None = None) -> None:
        world = self._world
        of_all = self.count - read[1] if read and world.parts.shares_replica else None
        world.observer.stale(end, staleness, world.kernel.now, of_all)
        self.count += 1
