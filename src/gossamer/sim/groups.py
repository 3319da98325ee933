"""What each worker of a simulated cluster runs when its workers form groups."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from gossamer.groups import GroupLeader, Groups, Role, follow, lead
from gossamer.replica import Replica
from gossamer.sim.worker import SimulatedWorker


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
