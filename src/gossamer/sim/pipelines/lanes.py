"""What replicas of several machines tell each other: every stage speaks with the same stage.

A method's worker is a whole replica. Its messages are divided into lanes, one for each of its
machines, with as many bytes as the parameters that the machine holds; a message has arrived when
the last lane has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gossamer.observe.observer import Observer, Row, Span
from gossamer.sim.delivery import Delivery


class StageLanes:
    """The machines of each replica and of each server, and the share of the model on each lane."""

    def __init__(
        self, replicas: int, shares: Sequence[float], *, has_servers_by_lane: bool = False
    ) -> None:
        """`has_servers_by_lane`: each lane has a server of its own, that holds its parameters."""
        self.replicas = replicas
        self.shares = tuple(shares)
        self._has_servers_by_lane = has_servers_by_lane

    @property
    def machines(self) -> int:
        """How many machines all replicas have together."""
        return self.replicas * len(self.shares)

    def machine(self, end: int, lane: int = 0) -> int:
        """The end that stands for one machine of a replica; a server is one end."""
        if end < self.replicas:
            return end * len(self.shares) + lane
        return end - self.replicas + self.machines

    def members(self, end: int) -> range:
        """All ends of a replica, or the one of a server."""
        first = self.machine(end)
        return range(first, first + (len(self.shares) if end < self.replicas else 1))

    def replica_of(self, machine: int) -> int:
        return machine // len(self.shares)

    def ways(self, source: int, target: int) -> list[tuple[int, int, float]]:
        """The machines between which each lane runs, and its share of the bytes."""
        server = max(source, target) - self.replicas
        if server >= 0 and self._has_servers_by_lane:
            return [(self.machine(source, server), self.machine(target, server), 1.0)]
        return [
            (self.machine(source, lane), self.machine(target, lane), share)
            for lane, share in enumerate(self.shares)
            if share or not lane
        ]


class LanedDelivery(Delivery):
    """Carries parcels between replicas of several machines, lane by lane."""

    def __init__(self, lanes: StageLanes, *arguments: Any) -> None:
        """The other arguments are those of `Delivery`, whose ends are machines and servers."""
        super().__init__(*arguments)
        self._lanes = lanes

    def carry(
        self, source: int, target: int, size_bytes: int, arrived: Callable[[], None], what: str = ""
    ) -> None:
        ways = [] if source == target else self._lanes.ways(source, target)
        if not ways:
            super().carry(self._lanes.machine(source), self._lanes.machine(target), 0, arrived)
            return
        missing = len(ways)

        def one_arrived() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                arrived()

        for mine, theirs, share in ways:
            super().carry(mine, theirs, round(share * size_bytes), one_arrived, what)

    def carry_inside(
        self, source: int, target: int, size_bytes: int, arrived: Callable[[], None], what: str
    ) -> None:
        """Between two machines, as activations go from stage to stage."""
        super().carry(source, target, size_bytes, arrived, what)

    def stolen_ns(self, end: int) -> float:
        return max(super(LanedDelivery, self).stolen_ns(one) for one in self._lanes.members(end))

    def are_separated(self, one: int, other: int) -> bool:
        is_cut = super().are_separated
        return any(
            is_cut(mine, theirs)
            for mine in self._lanes.members(one)
            for theirs in self._lanes.members(other)
        )

    def bury(self, end: int) -> None:
        for machine in self._lanes.members(end):
            super().bury(machine)


class MachineView(Observer):
    """Tells an observer of machines what happened to replicas."""

    def __init__(self, inner: Observer, lanes: StageLanes) -> None:
        self._inner = inner
        self._lanes = lanes

    def _first(self, end: int | None) -> int | None:
        return None if end is None else self._lanes.machine(end)

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        """The time in which a machine had nothing to do in its pipeline is waiting."""
        for machine in self._lanes.members(worker):
            self._inner.waited(machine, "pipeline", None, span)

    def waited(
        self, worker: int, what: str, peer: int | None, span: Span, moving: Sequence[Span] = ()
    ) -> None:
        for machine in self._lanes.members(worker):
            self._inner.waited(machine, what, self._first(peer), span, moving)

    def carried(self, what: str, source: int, target: int, size_bytes: int, span: Span) -> None:
        self._inner.carried(what, source, target, size_bytes, span)

    def passed(self, machine: int, what: str, span: Span) -> None:
        self._inner.passed(machine, what, span)

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        self._inner.happened(worker, what, at_ns)

    def evaluated(self, row: Row) -> None:
        self._inner.evaluated(row)

    def ended(self, summary: Row) -> None:
        self._inner.ended(summary)

    def gathered(self, what: str, members: Sequence[int], span: Span) -> None:
        machines = [machine for end in members for machine in self._lanes.members(end)]
        self._inner.gathered(what, machines, span)

    def exchanged(
        self, worker: int, peer: int | None, at_ns: int, *, share: float = 1.0,
        age: int | None = None,
    ) -> None:  # fmt: skip
        mine = self._lanes.machine(worker)
        self._inner.exchanged(mine, self._first(peer), at_ns, share=share, age=age)

    def stale(self, end: int, missed: int, at_ns: int, missed_of_all: int | None = None) -> None:
        self._inner.stale(self._lanes.machine(end), missed, at_ns, missed_of_all)

    def observed(self, end: int, what: str, value: float, at_ns: int) -> None:
        self._inner.observed(self._lanes.machine(end), what, value, at_ns)

    def lost(self, worker: int, at_ns: int) -> None:
        for machine in self._lanes.members(worker):
            self._inner.lost(machine, at_ns)
