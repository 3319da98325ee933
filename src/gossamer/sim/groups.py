"""The groups of a simulated cluster, and what each of its workers runs then."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from gossamer.groups import GroupLeader, Groups, Role, even_groups, follow, groups_of, lead
from gossamer.replica import Replica
from gossamer.sim.cluster import Cluster
from gossamer.sim.worker import SimulatedWorker


def split_groups(groups: int | str, cluster: Cluster) -> Groups:
    """Consecutive ranks, in so many groups or one per machine; empty when there is one level."""
    if groups == "host":
        return groups_of(cluster.workers, cluster.workers_per_machine)
    return even_groups(cluster.workers, groups) if isinstance(groups, int) and groups else ()


def grouped_roles(
    worker: SimulatedWorker,
    replica: Replica,
    role: Role,
    options: Mapping[str, Any],
    groups: Groups,
) -> Coroutine[Any, Any, object]:
    """What this worker runs: the method itself, or its part in a group."""
    for number, group in enumerate(groups):
        if worker.rank == group[0]:
            return lead(GroupLeader(worker, groups, number), replica, role, options)
        if worker.rank in group:
            return follow(worker, replica, group)
    return role(worker, replica, **options)
