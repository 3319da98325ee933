"""How messages get from card to card: latency first, then bytes, in order on each connection.

Also what a message costs, and when it was on its way.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gossamer.config.cluster import Cluster
from gossamer.config.network import CARDS, UPLINKS
from gossamer.observe.observer import Observer, Span
from gossamer.payload import tensor_bytes, wire_bytes
from gossamer.pending import Gathered, Pending
from gossamer.sim.kernel import SECOND, Kernel
from gossamer.sim.links.background import CardUse, OtherTraffic, Stream
from gossamer.sim.links.routes import Routes
from gossamer.sim.network import Flow, Network, Port

SMALL_BYTES = 256
"""The largest message whose bytes are counted but take no time, such as a request."""

LOCAL_LATENCY_NS = 1_000
"""Between two workers of one machine. Small, but loops that exchange there must let time pass."""


def cards_of(cluster: Cluster, servers: int, placement: str, standbys: int = 0) -> list[int]:
    """The machine of each worker, then of each server: a machine of its own, or a worker's. The
    standby of a server among the workers is with the next of them."""
    workers = [cluster.machine_of(rank) for rank in range(cluster.workers)]
    machines = workers[-1] + 1
    is_shared = placement == "workers"
    places = [*range(servers), *range(1, standbys + 1)] if is_shared else range(servers + standbys)
    return workers + [place % machines if is_shared else machines + place for place in places]


class Parcel(NamedTuple):
    """A message on its way."""

    size_bytes: int
    ready_at: int
    arrived: Callable[[], None]


@dataclass(slots=True, eq=False)
class Connection:
    """One direction between two ends. As in a TCP stream, messages arrive in order of sending."""

    source: int
    target: int
    queue: deque[Parcel] = field(default_factory=deque[Parcel])
    is_busy: bool = False
    flow: Flow | None = None


class Delivery:
    """Carries parcels between ends (workers and servers) that sit on cards (machines)."""

    def __init__(
        self, kernel: Kernel, cluster: Cluster, cards: list[int], rng: random.Random,
        observer: Observer | None = None, byte_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """`byte_scale` is charged per byte of tensor, for questions about larger models."""
        wires = cluster.network
        count = max(cards) + 1
        self._egress = [wires.egress / SECOND] * count
        self._ingress = [wires.ingress / SECOND] * count
        for end, card in enumerate(cards):
            if end >= cluster.workers and wires.server_bandwidth:
                self._egress[card] = self._ingress[card] = wires.server_bandwidth / SECOND
        self._kernel = kernel
        self._cluster = cluster
        self._cards = cards
        self._rng = rng
        self._observer = observer
        self.byte_scale = byte_scale
        self._moves: OrderedDict[Pending[Any], list[Span]] = OrderedDict()
        self._most_moves = 1000 + 8 * count
        self.network = Network(kernel, self._egress, self._ingress)
        self._routes = Routes(cluster, self.network, count)
        self._others: OtherTraffic | None = None
        self._use = CardUse(kernel, count) if wires.processor_share else None
        self._connections: dict[tuple[int, int], Connection] = {}
        self._dead: set[int] = set()
        self._held: list[Connection] = []
        self.drops: list[float] = []
        """The probabilities of the drop faults that last at present."""
        self.extra_delay_s = 0.0
        self.partitions: list[tuple[frozenset[int], ...]] = []
        """The sides of each present partition; no message crosses from one side to another."""
        self.bytes_put = [0] * len(cards)
        """The bytes that each end has sent over its card."""
        self.bytes_taken = [0] * len(cards)
        """The bytes that each end has received over its card, or that are on their way to it."""
        self.egress_bytes = 0
        """The bytes that have left a site and arrived; without sites, that have left a machine."""
        sites = cluster.sites.names
        self._place_of = [cluster.site_of(card) if sites else card for card in range(count)]

    def capacity(self, end: int) -> float:
        """Bytes per second of the card of an end, in its slower direction."""
        card = self._cards[end]
        return min(self._egress[card], self._ingress[card]) * SECOND

    def count_egress(self, source: int, target: int, size_bytes: int) -> None:
        """Count bytes that have come from one card to another, if that is egress."""
        if self._place_of[source] != self._place_of[target]:
            self.egress_bytes += size_bytes

    def share_with_others(self, stream: Stream) -> None:
        """Let the traffic of others, if the cluster has any, use its links from now on."""
        background, routes = self._cluster.background, self._routes
        if not background.is_there:
            return
        links: dict[str, Port] = {}
        if background.on == CARDS:
            for card in range(len(self._egress)):
                out, into = self.network.card(card)
                links |= {f"card {card} out": out, f"card {card} in": into}
        elif background.on == UPLINKS:
            links = {f"rack {rack} {side}": port for (rack, side), port in routes.uplinks.items()}
        else:
            links = {f"pipe {one} {other}": port for (one, other), port in routes.pipes.items()}
        self._others = OtherTraffic(background, self._kernel, self.network, links, stream)

    def stolen_ns(self, end: int) -> float:
        """How much computing communication has cost the machine of an end until now."""
        if self._use is None:
            return 0.0
        return self._cluster.network.processor_share * self._use.busy_ns(self._cards[end])

    def transfer(self, source: int, target: int, size_bytes: int, done: Callable[[], None]) -> Flow:
        """Send bytes from one card to another, over all that lies between them."""
        way = self._routes.way(source, target)
        if way.cost != 1.0:
            size_bytes = round(size_bytes * way.cost)
        if self._use is not None:
            self._use.begin(source, target)
            done = partial(self._used, source, target, done)
        flow = self.network.start(source, target, size_bytes, done, way.through, way.cap)
        if self._others is not None:
            self._others.notice(flow.ports)
        return flow

    def _used(self, source: int, target: int, done: Callable[[], None]) -> None:
        assert self._use is not None
        self._use.end(source, target)
        done()

    def abort(self, flow: Flow) -> None:
        """End a transfer that is under way; `done` is never called."""
        if self._use is not None and flow.done is not None:
            self._use.end(flow.source, flow.target)
        self.network.abort(flow)

    def latency_s(self, source: int, target: int) -> float:
        """How long the first byte takes from one card to another."""
        return self._routes.way(source, target).latency_s + self.extra_delay_s

    def wire_size(self, payload: object) -> int:
        """The bytes that are charged for a message."""
        size = wire_bytes(payload)
        if self.byte_scale != 1.0:
            size += round((self.byte_scale - 1.0) * tensor_bytes(payload))
        return size

    def moved(self, pending: Pending[Any] | None, since_ns: int) -> None:
        """What this operation awaits was on its way since then, and has arrived."""
        if self._observer is not None and pending is not None:
            if len(self._moves) >= self._most_moves:
                self._moves.popitem(last=False)  # nobody has waited for it
            self._moves.setdefault(pending, []).append((since_ns, self._kernel.now))

    def moves_of(self, pending: Pending[Any]) -> list[Span]:
        """When what this operation awaited was on its way; known if somebody observes the run."""
        parts = pending.parts if isinstance(pending, Gathered) else [pending]
        return [span for part in parts for span in self._moves.pop(part, ())] if self._moves else []

    def slow_card(self, end: int, factor: float) -> None:
        card = self._cards[end]
        self._egress[card] /= factor
        self._ingress[card] /= factor
        capacities = self._egress[card], self._ingress[card]
        if self._others is None:
            self.network.set_capacity(card, egress=capacities[0], ingress=capacities[1])
        else:
            for port, capacity in zip(self.network.card(card), capacities, strict=True):
                self._others.set_whole(port, capacity)

    def are_separated(self, one: int, other: int) -> bool:
        """Whether a partition has them on different sides; an end on no side is not cut off."""
        for sides in self.partitions:
            mine = next((side for side in sides if one in side), None)
            if mine is not None and other not in mine and any(other in side for side in sides):
                return True
        return False

    def carry(
        self, source: int, target: int, size_bytes: int, arrived: Callable[[], None], what: str = ""
    ) -> None:
        """Call `arrived` when the last byte has arrived, unless one of the ends dies before.

        Observers are told of messages that have a name (`what`) and another end as their target.
        """
        if source in self._dead or target in self._dead:
            return
        if self._cards[source] != self._cards[target]:
            self.bytes_put[source] += size_bytes
            self.bytes_taken[target] += size_bytes
        connection = self._connections.get((source, target))
        if connection is None:
            connection = self._connections[source, target] = Connection(source, target)
        ready_at = self._kernel.now + self._latency_ns(source, target)
        if what and source != target and self._observer is not None:
            facts = (what, source, target, size_bytes)
            arrived = partial(self._tell, self._observer, facts, self._kernel.now, arrived)
        connection.queue.append(Parcel(size_bytes, ready_at, arrived))
        if not connection.is_busy:
            self._next(connection)

    def _tell(
        self, observer: Observer, facts: tuple[str, int, int, int], sent_ns: int,
        arrived: Callable[[], None],
    ) -> None:  # fmt: skip
        observer.carried(*facts, (sent_ns, self._kernel.now))
        arrived()

    def _latency_ns(self, source: int, target: int) -> int:
        mine, theirs = self._cards[source], self._cards[target]
        if mine == theirs:
            return 0 if source == target else LOCAL_LATENCY_NS
        seconds = self.latency_s(mine, theirs)
        for probability in self.drops:
            while self._rng.random() < probability:
                # A dropped message is late: the sender notices the loss and sends it again.
                seconds += self._cluster.network.retransmission
        return round(seconds * SECOND)

    def _next(self, connection: Connection) -> None:
        """Start the first parcel of a connection."""
        connection.is_busy = bool(connection.queue)
        if not connection.queue:
            # Any two workers may exchange once, so the number of idle connections would grow.
            ends = connection.source, connection.target
            if self._connections.get(ends) is connection:
                del self._connections[ends]
        else:
            wait = connection.queue[0].ready_at - self._kernel.now
            if wait > 0:
                self._kernel.at(wait, self._depart, connection)
            else:
                self._depart(connection)

    def _depart(self, connection: Connection) -> None:
        if not connection.queue:
            return
        source, target = connection.source, connection.target
        if self.partitions and self.are_separated(source, target):
            self._held.append(connection)
            return
        parcel = connection.queue[0]
        mine, theirs = self._cards[source], self._cards[target]
        if mine == theirs:
            speed = self._cluster.network.memory_bandwidth
            delay = round(parcel.size_bytes / speed * SECOND) if speed else 0
            self._kernel.at(delay, self._arrive, connection)
        elif parcel.size_bytes <= SMALL_BYTES:
            self._kernel.at(0, self._arrive, connection)
        else:
            connection.flow = self.transfer(
                mine, theirs, parcel.size_bytes, lambda: self._arrive(connection)
            )

    def _arrive(self, connection: Connection) -> None:
        connection.flow = None
        if connection.queue:
            parcel = connection.queue.popleft()
            source, target = self._cards[connection.source], self._cards[connection.target]
            self.count_egress(source, target, parcel.size_bytes)
            parcel.arrived()
        self._next(connection)

    def heal(self, sides: tuple[frozenset[int], ...]) -> None:
        """A partition is over. The messages that it held continue, unless another holds them."""
        self.partitions.remove(sides)
        held, self._held = self._held, []
        for connection in held:
            self._depart(connection)

    def bury(self, end: int) -> None:
        """An end has died. All messages from it or to it that have not arrived are lost."""
        self._dead.add(end)
        for ends in [ends for ends in self._connections if end in ends]:
            # If the end comes back, timers of the old connection find nothing in its queue.
            connection = self._connections.pop(ends)
            connection.queue.clear()
            connection.is_busy = False
            if connection.flow is not None:
                self.abort(connection.flow)
                connection.flow = None

    def unbury(self, end: int) -> None:
        """An end can be reached again."""
        self._dead.discard(end)
