"""Collective operations: they start when the last living member arrives and cost what their
algorithm costs at the slowest member."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.config.collective_costs import (
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
    broadcast_seconds,
)
from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.rules import mean_in_order
from gossamer.sim.kernel import SECOND, Timer

if TYPE_CHECKING:
    from gossamer.sim.world import World

Key = tuple[object, ...]


class Gathering:
    """One collective in the making."""

    __slots__ = (
        "arrived",
        "is_running",
        "kind",
        "members",
        "root",
        "since_ns",
        "size_bytes",
        "timer",
    )

    def __init__(self, kind: str, members: tuple[int, ...] | None, root: int | None) -> None:
        self.kind = kind
        self.members = members
        """None means: every living worker that has not ended."""
        self.root = root
        self.arrived: dict[int, tuple[Tensor | None, Pending[Any]]] = {}
        self.size_bytes = 0
        self.is_running = False
        self.since_ns = 0
        self.timer: Timer | None = None


class Rendezvous:
    """All collectives of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[Key, Gathering] = {}
        self._counts: dict[tuple[int, object], int] = {}
        self._busy_until: dict[int, int] = {}

    def join(
        self,
        kind: str,
        rank: int,
        value: Tensor | None,
        size_bytes: int,
        over: tuple[int, ...] | None,
        root: int | None = None,
    ) -> Pending[Any]:
        """The n-th call of a member meets the n-th call of the others."""
        count = self._counts.get((rank, over), 0)
        self._counts[rank, over] = count + 1
        key = (over, count)
        gathering = self._open.get(key)
        if gathering is None:
            gathering = self._open[key] = Gathering(kind, over, root)
        pending: Pending[Any] = Pending(kind, root if root != rank else None)
        gathering.arrived[rank] = (value, pending)
        gathering.size_bytes = max(gathering.size_bytes, size_bytes)
        self._consider(key, gathering)
        return pending

    def reconsider(self) -> None:
        """Somebody died, ended, became reachable or counts as lost: what waited may go on."""
        for key, gathering in list(self._open.items()):
            if gathering.is_running and any(r in self._world.lost for r in gathering.arrived):
                # Rebuilt over the survivors, from their copies.
                if gathering.timer is not None:
                    gathering.timer.cancel()
                gathering.is_running = False
            self._consider(key, gathering)

    def _fail_across(self, key: Key, gathering: Gathering) -> bool:
        """A partition has outlasted the deadline: who waits across it learns so, if it waited then
        or came later."""
        unreachable = self._world.unreachable
        waiting = [rank for rank in gathering.arrived if rank not in self._world.lost]
        across = {
            rank: [r for r in self._expected(gathering) if r in unreachable.get(rank, ())]
            for rank in waiting
        }
        some = next((found[0] for found in across.values() if found), None)
        if some is None:
            return False
        # All of them, also who can reach everybody: the gathering will not come about.
        self._open.pop(key, None)
        for rank in waiting:
            _, pending = gathering.arrived[rank]
            peer = across[rank][0] if across[rank] else some
            pending.fail(PeerLost(peer, "unreachable for longer than the deadline"))
        return True

    def _expected(self, gathering: Gathering) -> list[int]:
        world = self._world
        candidates = range(world.size) if gathering.members is None else gathering.members
        return [r for r in candidates if r not in world.lost and r not in world.ended]

    def _consider(self, key: Key, gathering: Gathering) -> None:
        """Start the transfer if everybody who is expected is there."""
        world = self._world
        if gathering.root in world.lost and gathering.root not in gathering.arrived:
            self._open.pop(key, None)
            for _, pending in gathering.arrived.values():
                pending.fail(PeerLost(gathering.root or 0))
            return
        if gathering.is_running or self._fail_across(key, gathering):
            return
        if any(r not in gathering.arrived for r in self._expected(gathering)):
            return
        members = [rank for rank in sorted(gathering.arrived) if rank not in world.lost]
        if not members:
            self._open.pop(key, None)
            return
        if world.post.partitions and any(
            world.post.are_separated(members[0], other) for other in members[1:]
        ):
            return
        gathering.is_running, gathering.since_ns = True, world.kernel.now
        begin = max([world.kernel.now, *(self._busy_until.get(r, 0) for r in members)])
        duration, put = self._price(gathering.kind, members, gathering.size_bytes)
        end = begin + round(duration * SECOND)
        on_card: set[int] = set()
        for rank in members:
            self._busy_until[rank] = end
            # The workers of one machine share its card: its bytes are booked once.
            machine = world.cluster.machine_of(rank)
            if machine not in on_card:
                on_card.add(machine)
                world.post.bytes_put[rank] += put
                # What all put on their cards all take off them; each about as much as it put.
                world.post.bytes_taken[rank] += put
        gathering.timer = world.kernel.at(end - world.kernel.now, self._finish, key, gathering)

    def _price(self, kind: str, members: list[int], size_bytes: int) -> tuple[float, int]:
        """Seconds, and bytes that each machine puts on its card."""
        world, cluster = self._world, self._world.cluster
        machines = sorted({cluster.machine_of(rank) for rank in members})
        wires = cluster.network
        per_byte = 1 / min(world.post.capacity(rank) for rank in members)
        latency = wires.latency + world.post.extra_delay_s
        if len({cluster.rack_of(machine) for machine in machines}) > 1:
            latency += wires.rack_latency
            per_byte *= wires.oversubscription
        price: dict[str, Callable[[int, float, float], float]] = {
            "all_reduce": lambda p, alpha, beta: all_reduce_seconds(
                wires.collective, p, size_bytes, alpha, beta
            ),
            "all_gather": lambda p, alpha, beta: all_gather_seconds(p, size_bytes * p, alpha, beta),
            "broadcast": lambda p, alpha, beta: broadcast_seconds(p, size_bytes, alpha, beta),
        }
        seconds = price[kind](len(machines), latency, per_byte)
        crowd = -(-len(members) // len(machines))
        if crowd > 1 and wires.memory_bandwidth:
            seconds += price[kind](crowd, 0.0, 1 / wires.memory_bandwidth)
        if len(machines) == 1:
            return seconds, 0
        if kind == "all_reduce":
            return seconds, all_reduce_bytes(wires.collective, len(machines), size_bytes)
        sent = size_bytes * (len(machines) - 1)
        return seconds, sent if kind == "all_gather" else sent // len(machines)

    def _finish(self, key: Key, gathering: Gathering) -> None:
        self._open.pop(key, None)
        lost = self._world.lost
        present = {
            rank: value
            for rank, (value, _) in sorted(gathering.arrived.items())
            if rank not in lost and value is not None
        }
        result: Any = None
        if gathering.kind == "all_reduce":
            result = mean_in_order(list(present.values()))
        elif gathering.kind == "all_gather":
            result = present
        elif gathering.root is not None:
            result = gathering.arrived[gathering.root][0]
        # What a group does inside is computing a gradient.
        is_exchange = gathering.kind == "all_reduce" and len(gathering.arrived) > 1
        is_exchange = is_exchange and set(self._world.speakers).issuperset(gathering.arrived)
        self._record(gathering)
        for rank, (_, pending) in sorted(gathering.arrived.items()):
            if rank not in lost:
                if is_exchange:
                    self._world.got_part(rank, result)
                self._world.moved(pending, gathering.since_ns)
                pending.resolve(result)

    def _record(self, gathering: Gathering) -> None:
        world = self._world
        members = [rank for rank in sorted(gathering.arrived) if rank not in world.lost]
        if world.recorder is not None and len(members) > 1:
            world.recorder.gathered(gathering.kind, members, gathering.since_ns, world.kernel.now)
