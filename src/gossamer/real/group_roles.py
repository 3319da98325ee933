"""What each member of a group runs on real workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.groups import GroupLeader, Role, follow, lead
from gossamer.real.driver import Driver
from gossamer.real.grouping import Grouping
from gossamer.real.worker import RealWorker
from gossamer.replica import Replica
from gossamer.worker import Gradient


class RealGroupLeader(GroupLeader):
    """The leader's own gradient, and then the group's mean, are made in the thread that awaits.

    So a method goes on between asking for a gradient and awaiting it, and a user's loop, which is
    the leader's own gradient, comes in between.
    """

    def __init__(self, inner: RealWorker, grouping: Grouping, driver: Driver) -> None:
        super().__init__(inner, grouping.groups, grouping.number)
        self._driver = driver

    def gradient(self, at: Tensor | Replica, batch: Tensor | None = None) -> Gradient:
        inner, group = self._inner, self._group
        point = at if isinstance(at, Tensor) else at.snapshot()
        inner.broadcast(point, root=inner.rank, over=group)
        own = inner.gradient(point, batch)
        gradient = Gradient("gradient")

        def settle() -> None:
            # Not booked: to the method all of this is computing.
            self._driver.wait(own, "group", is_booked=False)
            mean = inner.all_reduce(own.result(), over=group)
            self._driver.wait(mean, "group", is_booked=False)
            gradient.resolve(mean.result())

        gradient.settle = settle
        return gradient


def role_in_group(
    worker: RealWorker, replica: Replica, role: Role, options: Mapping[str, Any],
    grouping: Grouping, driver: Driver, on_orphaned: Callable[[PeerLost], None] | None = None,
) -> Coroutine[Any, Any, None]:  # fmt: skip
    """The method itself, or a part in a group, which ends where its leader dies: `on_orphaned` is
    told why, and without it that is raised."""
    if not grouping.groups:
        return role(worker, replica, **options)
    if not grouping.follows:
        return lead(RealGroupLeader(worker, grouping, driver), replica, role, options)

    async def member() -> None:
        if await follow(worker, replica, grouping.group):
            return
        lost = grouping.lost(worker.live)
        if on_orphaned is None:
            raise lost
        on_orphaned(lost)

    return member()
