"""Collective operations. Each starts when its last living member arrives, and takes as long as its
algorithm takes at the slowest member: by a formula, or as flows that share the cards with messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.config.collective_costs import (
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
    broadcast_seconds,
)
from gossamer.errors import PeerLost
from gossamer.membership import UNREACHABLE
from gossamer.pending import Pending
from gossamer.rules import mean_in_order
from gossamer.sim.kernel import SECOND, Timer
from gossamer.sim.links.collective_flows import (
    CollectiveQueue,
    FlowingCollective,
    QueuedCollective,
    rounds_of,
)

if TYPE_CHECKING:
    from gossamer.sim.world import World

Key = tuple[object, ...]


@dataclass(slots=True, eq=False)
class Collective:
    """One operation that waits for its members, or is under way."""

    kind: str
    members: tuple[int, ...] | None
    """None means: every living worker that has not ended."""
    root: int | None
    arrived: dict[int, tuple[Tensor | None, Pending[Any]]] = field(default_factory=dict[int, Any])
    size_bytes: int = 0
    is_running: bool = False
    since_ns: int = 0
    step: int = 0
    """In which round of its members it happens, where they step in rounds."""
    timer: Timer | None = None
    queued: QueuedCollective | None = None
    """Where collectives are flows: its place among those of its members."""


class CollectiveWay:
    """The ends of the network between which a collective, or a part of one, happens."""

    def __init__(self, world: World, ends: list[int], size_bytes: int) -> None:
        self.ends = ends
        self.size_bytes = size_bytes
        self.machines = sorted({world.cluster.machine_of(end) for end in ends})


class Flows:
    """The flows of a collective on all of its ways."""

    def __init__(self, parts: Sequence[FlowingCollective]) -> None:
        self._parts = parts

    def cancel(self) -> None:
        """They never end, and free the cards."""
        for part in self._parts:
            part.cancel()


class Collectives:
    """All collective operations of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[Key, Collective] = {}
        self._counts: dict[tuple[int, object, int], int] = {}
        self._busy_until: dict[int, int] = {}
        self._queue = CollectiveQueue() if world.cluster.has_flows else None

    def join(
        self, kind: str, rank: int, value: Tensor | None, size_bytes: int,
        over: tuple[int, ...] | None, root: int | None = None, step: int = 0,
    ) -> Pending[Any]:  # fmt: skip
        """The n-th call of a member meets the n-th call of the others; with `step`, the n-th call
        in this step."""
        count = self._counts.get((rank, over, step), 0)
        self._counts[rank, over, step] = count + 1
        if step:
            self._counts.pop((rank, over, step - 2), None)
        key = (over, step, count)
        collective = self._open.get(key)
        if collective is None:
            collective = self._open[key] = Collective(kind, over, root, step=step)
        pending: Pending[Any] = Pending(kind, root if root != rank else None)
        collective.arrived[rank] = (value, pending)
        collective.size_bytes = max(collective.size_bytes, size_bytes)
        self._consider(key, collective)
        return pending

    def forget(self, rank: int) -> None:
        """A worker comes back; what it gave in an earlier life is left out, as it was by then."""
        for collective in self._open.values():
            if collective.root != rank:
                collective.arrived.pop(rank, None)

    def reconsider(self) -> None:
        """A worker died, ended, became reachable or counts as lost: what waited may continue."""
        dead = self._world.members.dead
        for key, collective in list(self._open.items()):
            if collective.is_running and not dead.isdisjoint(collective.arrived):
                # The collective starts again over the survivors, from their copies.
                if collective.timer is not None:
                    collective.timer.cancel()
                if collective.queued is not None and self._queue is not None:
                    self._queue.leave(collective.queued)
                collective.is_running = False
            self._consider(key, collective)

    def _fail_across(self, key: Key, collective: Collective) -> bool:
        """Fail the collective if a member waits for another that a partition has cut off for longer
        than the deadline, whether the member waited at that time or came later."""
        members = self._world.members
        if not members.is_parted:
            return False
        waiting = [rank for rank in collective.arrived if rank not in members.dead]
        across = {
            rank: [r for r in self._expected(collective) if r in members.cut_off_from(rank)]
            for rank in waiting
        }
        some = next((found[0] for found in across.values() if found), None)
        if some is None:
            return False
        # Members that can reach everybody fail, too: the collective will never be complete.
        self._open.pop(key, None)
        for rank in waiting:
            _, pending = collective.arrived[rank]
            peer = across[rank][0] if across[rank] else some
            pending.fail(PeerLost(peer, UNREACHABLE))
        return True

    def _lacks_many(self, collective: Collective) -> bool:
        """Whether the number alone says that members are missing, so that nobody looks at each."""
        world = self._world
        size = world.size if collective.members is None else len(collective.members)
        later = world.newcomers.came_after(collective.step)
        return len(collective.arrived) < size - len(world.members.dead) - len(world.ended) - later

    def _expected(self, collective: Collective) -> list[int]:
        world = self._world
        candidates = range(world.size) if collective.members is None else collective.members
        return [
            r for r in candidates
            if r not in world.members.dead and r not in world.ended
            and world.newcomers.takes_part(r, collective.step)
        ]  # fmt: skip

    def _consider(self, key: Key, collective: Collective) -> None:
        """Start the transfer if every expected member has arrived."""
        world = self._world
        if collective.root in world.members.dead and collective.root not in collective.arrived:
            self._open.pop(key, None)
            for _, pending in collective.arrived.values():
                pending.fail(PeerLost(collective.root or 0))
            return
        if collective.is_running or self._fail_across(key, collective):
            return
        if self._lacks_many(collective):
            return
        if any(r not in collective.arrived for r in self._expected(collective)):
            return
        members = [rank for rank in sorted(collective.arrived) if rank not in world.members.dead]
        if not members:
            self._open.pop(key, None)
            return
        if world.post.partitions and any(
            world.post.are_separated(members[0], other) for other in members[1:]
        ):
            return
        collective.is_running, collective.since_ns = True, world.kernel.now
        ways = self._ways(collective, members)
        for way in ways:
            self._count(collective, way)
        if self._queue is not None:
            start = partial(self._flow, key, collective, ways)
            collective.queued = self._queue.add(members, start)
            return
        begin = max([world.kernel.now, *(self._busy_until.get(r, 0) for r in members)])
        price = max(self._price(collective, way) for way in ways)
        end = begin + round(price * SECOND)
        self._busy_until.update(dict.fromkeys(members, end))
        collective.timer = world.kernel.at(end - world.kernel.now, self._finish, key, collective)

    def _ways(self, collective: Collective, members: list[int]) -> list[CollectiveWay]:
        """Between workers of one machine each there is one; replicas of several machines make one
        collective for each of these, among those that hold the same parameters."""
        lanes, size = self._world.lanes, collective.size_bytes
        if lanes is None:
            return [CollectiveWay(self._world, members, size)]
        return [
            CollectiveWay(
                self._world, [lanes.machine(rank, lane) for rank in members], round(share * size)
            )
            for lane, share in enumerate(lanes.shares)
            if share
        ]

    def _count(self, collective: Collective, way: CollectiveWay) -> None:
        """Count the bytes that each machine puts on its card."""
        post, cluster, size = self._world.post, self._world.cluster, way.size_bytes
        machines = len(way.machines)
        if machines == 1:
            put = 0
        elif collective.kind == "all_reduce":
            put = all_reduce_bytes(cluster.network.collective, machines, size)
        else:
            sent = size * (machines - 1)
            put = sent if collective.kind == "all_gather" else sent // machines
        # The workers of one machine share its card, so its bytes are counted once.
        first = {cluster.machine_of(end): end for end in sorted(way.ends, reverse=True)}
        for end in first.values():
            post.bytes_put[end] += put
            # Each machine receives about as many bytes as it sends.
            post.bytes_taken[end] += put
            if self._queue is None:
                post.egress_bytes += put

    def _price(self, collective: Collective, way: CollectiveWay) -> float:
        """Seconds by the formulas, at the slowest card."""
        world, cluster = self._world, self._world.cluster
        wires = cluster.network
        per_byte = 1 / min(world.post.capacity(end) for end in way.ends)
        latency = wires.latency + world.post.extra_delay_s
        if len({cluster.rack_of(machine) for machine in way.machines}) > 1:
            latency += wires.rack_latency
            per_byte *= wires.oversubscription
        seconds = self._formula(
            collective.kind, len(way.machines), way.size_bytes, latency, per_byte
        )
        return seconds + self._inside_seconds(collective, way)

    def _inside_seconds(self, collective: Collective, way: CollectiveWay) -> float:
        """What the workers of one machine take among themselves."""
        speed = self._world.cluster.network.memory_bandwidth
        crowd = -(-len(way.ends) // len(way.machines))
        if crowd == 1 or not speed:
            return 0.0
        return self._formula(collective.kind, crowd, way.size_bytes, 0.0, 1 / speed)

    def _formula(
        self, kind: str, members: int, size: int, latency: float, per_byte: float
    ) -> float:
        match kind:
            case "all_reduce":
                algorithm = self._world.cluster.network.collective
                return all_reduce_seconds(algorithm, members, size, latency, per_byte)
            case "all_gather":
                return all_gather_seconds(members, size * members, latency, per_byte)
            case _:
                return broadcast_seconds(members, size, latency, per_byte)

    def _flow(self, key: Key, collective: Collective, ways: list[CollectiveWay]) -> Flows:
        """Start the collective as flows; the root of a broadcast comes first."""
        missing = len(ways)

        def done() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self._finish(key, collective)

        return Flows([self._flow_of(collective, way, done) for way in ways])

    def _flow_of(
        self, collective: Collective, way: CollectiveWay, done: Callable[[], None]
    ) -> FlowingCollective:
        world, cluster, lanes = self._world, self._world.cluster, self._world.lanes

        def is_other(end: int) -> bool:
            return collective.root != (end if lanes is None else lanes.replica_of(end))

        ordered = sorted(way.ends, key=is_other)
        machines = list(dict.fromkeys(cluster.machine_of(end) for end in ordered))
        algorithm = cluster.network.collective
        return FlowingCollective(
            world.kernel, world.post, machines,
            rounds_of(collective.kind, algorithm, len(machines), way.size_bytes),
            self._inside_seconds(collective, way), done,
        )  # fmt: skip

    def _finish(self, key: Key, collective: Collective) -> None:
        self._open.pop(key, None)
        if collective.queued is not None and self._queue is not None:
            self._queue.leave(collective.queued)
        lost = self._world.members.dead
        present = {
            rank: value
            for rank, (value, _) in sorted(collective.arrived.items())
            if rank not in lost and value is not None
        }
        result: Any = None
        if collective.kind == "all_reduce":
            result = mean_in_order(list(present.values()))
        elif collective.kind == "all_gather":
            result = present
        elif collective.root is not None:
            result = collective.arrived[collective.root][0]
        # The all-reduce inside a group belongs to a gradient and is no exchange.
        is_exchange = (
            collective.kind == "all_reduce" and len(collective.arrived) > 1
            and set(self._world.speakers).issuperset(collective.arrived)
        )  # fmt: skip
        members = [rank for rank in sorted(collective.arrived) if rank not in lost]
        if len(members) > 1:
            span = (collective.since_ns, self._world.kernel.now)
            self._world.observer.gathered(collective.kind, members, span)
        for rank in members:
            pending = collective.arrived[rank][1]
            if is_exchange:
                self._world.got_part(rank, result)
            self._world.post.moved(pending, collective.since_ns)
            pending.resolve(result)
