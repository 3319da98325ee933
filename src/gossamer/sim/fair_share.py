"""Max-min fair division of network links: ports, flows, lanes and the water-filling over them.

A card is two **ports**, egress and ingress; a **flow** occupies one of each, and the ports of the
uplinks and pipes on its way, if there are any. It may have a cap besides. A port is *loose* while
no flow needs more than an equal share of its capacity: because there is only one flow, because the
caps of all its flows fit together, or because the other ports keep all of them below that share.
All other ports are *tight*; only they have to be divided, and only they connect flows with each
other.

Flows that have the same rate for as long as they stay together form one **lane**:

- no port tight: a lane of its own, at the rate of the slowest port or of its cap;
- otherwise: all flows on the same tight ports whose other ports and caps allow the same (such as
  every sender into one parameter server); what these allow is the limit of the lane.

A lane is a processor-sharing queue. Its virtual clock `served` counts the bytes that each member
has received since the lane opened, so a flow ends when `served` reaches the mark that it was given
on joining: a change of rate touches one number, however many flows the lane holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Any, Protocol

# Sums of floats may exceed a whole nanosecond by their rounding error; without this allowance
# such a completion would be rounded up to the next nanosecond.
ROUNDING_NS = 2.0**-10


class TimerHandle(Protocol):
    """A callback that has been scheduled."""

    def cancel(self) -> None:
        """Forget the callback; it is never called."""
        ...


class Port:
    """One direction of a link: a capacity in bytes per nanosecond and what passes through it."""

    __slots__ = (
        "asked", "capacity", "capped", "flows", "is_tight", "lanes", "left", "seats", "waiting",
    )  # fmt: skip

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        # Dictionaries instead of sets: their order is that of arrival, in every run.
        self.flows: dict[Flow, None] = {}
        # How many flows have a cap, and all caps together.
        self.capped = 0
        self.asked = 0.0
        # While tight: the lanes that divide the port.
        self.lanes: dict[LaneKey, Lane] = {}
        self.is_tight = False
        # While loose: how many flows may have the share capacity / seats.
        self.seats = 1
        # Within a water-filling: the capacity and the number of flows that have no rate yet.
        self.left = capacity
        self.waiting = 0

    def dismiss(self, flow: Flow) -> None:
        del self.flows[flow]
        if flow.cap != inf:
            self.capped -= 1
            self.asked = self.asked - flow.cap if self.capped else 0.0

    def is_crowded(self) -> bool:
        """Whether several flows may want more than there is."""
        count = len(self.flows)
        return count > 1 and (count > self.capped or self.asked > self.capacity)


@dataclass(slots=True, eq=False)
class Flow:
    """A transfer under way from one card's egress to another's ingress."""

    source: int
    target: int
    size_bytes: int
    ports: tuple[Port, ...]
    done: Callable[[], None] | None
    cap: float = inf
    lane: Lane | None = None
    mark: float = 0.0
    ticket: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """Flows of equal rate, ordered by the bytes left."""

    ports: tuple[Port, ...]
    """The ports that are tight."""
    limit: float
    """What caps and loose ports allow."""
    seats: int
    """Among how many flows the loose port that sets the limit was divided."""
    rate: float
    since_ns: int
    served: float = 0.0
    count: int = 0
    tickets: int = 0
    queue: list[tuple[float, int, Flow]] = field(default_factory=list[Any])
    timer: TimerHandle | None = None
    due_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """Bring the virtual clock up to the present; required before every change."""
        if now_ns != self.since_ns:
            self.served += self.rate * (now_ns - self.since_ns)
            self.since_ns = now_ns

    def join(self, flow: Flow, remaining: float) -> None:
        """Add a flow with this many bytes left."""
        self.count += 1
        # A flow may leave and return before its old entry is popped: the ticket tells them apart.
        self.tickets += 1
        flow.lane = self
        flow.mark = self.served + remaining
        flow.ticket = self.tickets
        heappush(self.queue, (flow.mark, flow.ticket, flow))

    def leave(self, flow: Flow) -> float:
        """Remove a flow and return the bytes left; its entry in the queue becomes invalid."""
        self.count -= 1
        flow.lane = None
        return max(0.0, flow.mark - self.served)

    def members(self) -> list[Flow]:
        """The flows of this lane."""
        return [entry[2] for entry in self.queue if self._is_valid(entry)]

    def next_due_ns(self) -> int:
        """When the flow with the fewest bytes left will have passed, rounded up."""
        while not self._is_valid(self.queue[0]):
            heappop(self.queue)
        wait_ns = (self.queue[0][0] - self.served) / self.rate
        return self.since_ns + max(0, ceil(wait_ns - ROUNDING_NS))

    def take_finished(self) -> list[Flow]:
        """Take the flows whose last byte has passed off the queue; they still have to leave."""
        finished: list[Flow] = []
        reached = self.served + self.rate * ROUNDING_NS
        while self.queue and self.queue[0][0] <= reached:
            entry = heappop(self.queue)
            if self._is_valid(entry):
                finished.append(entry[2])
        return finished

    def _is_valid(self, entry: tuple[float, int, Flow]) -> bool:
        return entry[2].lane is self and entry[2].ticket == entry[1]

    def close(self) -> None:
        """Take the lane, which is empty, off its ports and off the clock."""
        for port in self.ports:
            del port.lanes[self.ports, self.limit, self.seats]
        if self.timer is not None:
            self.timer.cancel()


LaneKey = tuple[tuple[Port, ...], float, int]


def lane_of(flow: Flow, now_ns: int) -> Lane:
    """The lane of a flow; it is opened if there is none yet."""
    tight: list[Port] = []
    limit, seats = flow.cap, 1
    for port in flow.ports:
        if port.is_tight:
            tight.append(port)
        elif (share := port.capacity / port.seats) < limit:
            limit, seats = share, port.seats
    if not tight:
        return Lane((), limit, 1, limit, now_ns)
    ports = tuple(tight)
    key = (ports, limit, seats)
    lane = ports[0].lanes.get(key)
    if lane is None:
        lane = Lane(ports, limit, seats, 0.0, now_ns)
        for port in ports:
            port.lanes[key] = lane
    return lane


def connected_ports(start: Port, seen: set[Port]) -> list[Port]:
    """A tight port and all ports that flows connect with it; `seen` receives them."""
    seen.add(start)
    found = [start]
    for port in found:
        for lane in port.lanes.values():
            for neighbour in lane.ports:
                if neighbour not in seen:
                    seen.add(neighbour)
                    found.append(neighbour)
    return found


def fair_rates(ports: Sequence[Port]) -> dict[Lane, float]:
    """The max-min fair rate of every lane on a connected set of tight ports, by water-filling.

    The level rises from zero for all flows. When it reaches the equal share of a port or the limit
    of a lane, the flows of that port or lane get this rate, and the rest of the capacity is left to
    the others. So shares can only grow, and a heap finds the order if outdated entries are pushed
    again.
    """
    if len(ports) == 1 and len(ports[0].lanes) == 1:
        (lane,) = ports[0].lanes.values()
        return {lane: min(lane.limit, ports[0].capacity / lane.count)}
    rates: dict[Lane, float] = {}
    bounds: list[tuple[float, int, Port | Lane]] = []
    for port in ports:
        port.left = port.capacity
        port.waiting = len(port.flows)
        bounds.append((port.capacity / port.waiting, len(bounds), port))
        for lane in port.lanes.values():
            if lane.limit < port.capacity:
                bounds.append((lane.limit, len(bounds), lane))
    heapify(bounds)
    while bounds:
        level, order, bound = heappop(bounds)
        if isinstance(bound, Lane):
            reached = [bound]
        elif bound.waiting == 0:
            continue
        elif bound.left / bound.waiting > level:
            heappush(bounds, (bound.left / bound.waiting, order, bound))
            continue
        else:
            reached = bound.lanes.values()
        for lane in reached:
            if lane not in rates:
                rates[lane] = level
                for port in lane.ports:
                    port.left -= level * lane.count
                    port.waiting -= lane.count
    return rates


def is_slack(port: Port) -> bool:
    """Whether a tight port could be loose, because other tight ports limit all of its flows.

    A flow whose other ports are loose would be left without any limit. The margin prevents rounding
    errors from making the port tight again at once.
    """
    share = port.capacity / len(port.flows) * (1 - 1e-9)
    return all(
        len(lane.ports) > 1 and lane.rate < share and lane.rate < lane.limit
        for lane in port.lanes.values()
    )


def is_broken(lane: Lane) -> bool:
    """Whether a lane has reached what loose ports with several flows allow: they must be tight."""
    return lane.seats > 1 and lane.rate >= lane.limit
