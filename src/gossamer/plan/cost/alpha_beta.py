"""Messages, collectives and servers in the alpha-beta and the LogP model.

The collectives themselves are those of `gossamer.config.collective_costs`: the simulator and the
closed forms must not have two opinions on what a ring costs. Symbols as there: L latency, G seconds
per byte, B bytes, P members; cards are full duplex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.config.collective_costs import all_reduce_seconds, broadcast_seconds
from gossamer.errors import ConfigurationError
from gossamer.specs import check_range


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta model: a message of B bytes takes L + B G."""

    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        check_range("latency", self.latency_s, 0)
        check_range("seconds per byte", self.seconds_per_byte, 0)

    def message_s(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.seconds_per_byte

    def crowded_s(self, messages: float, size_bytes: float) -> float:
        """So many messages at once through one card, until the last is there."""
        return self.latency_s + messages * size_bytes * self.seconds_per_byte

    def all_reduce_s(self, algorithm: str, members: int, size_bytes: float) -> float:
        return all_reduce_seconds(
            algorithm, members, round(size_bytes), self.latency_s, self.seconds_per_byte
        )

    def broadcast_s(self, members: int, size_bytes: float) -> float:
        return broadcast_seconds(members, round(size_bytes), self.latency_s, self.seconds_per_byte)

    def all_reduce_bound_s(self, members: int, size_bytes: float) -> float:
        """What no all-reduce can beat whose members add up every number once: log2 P latencies, and
        then 2 B (P-1)/P bytes on every card."""
        if members == 1:
            return 0.0
        moved = 2 * size_bytes * (members - 1) / members
        return self.latency_s * math.log2(members) + moved * self.seconds_per_byte


@dataclass(frozen=True)
class LogGP:
    """The LogP model with Alexandrov's gap per byte.

    Culler et al. 1993: latency L, overhead o of either processor per message, gap g between
    messages of one processor. The overhead is what computing cannot hide.
    """

    latency_s: float
    overhead_s: float
    gap_s: float
    gap_per_byte_s: float

    def __post_init__(self) -> None:
        check_range("latency", self.latency_s, 0)
        check_range("overhead", self.overhead_s, 0)
        check_range("gap", self.gap_s, 0)
        check_range("gap per byte", self.gap_per_byte_s, 0)

    def as_link(self) -> AlphaBeta:
        """The alpha-beta model of the same network: one message after the other costs as much."""
        return AlphaBeta(self.latency_s + 2 * self.overhead_s, self.gap_per_byte_s)

    def message_s(self, size_bytes: float) -> float:
        return self.as_link().message_s(size_bytes)

    def burst_s(self, messages: int, size_bytes: float) -> float:
        """So many messages at once into (or out of) one processor: a server's share of a step."""
        if messages < 1:
            return 0.0
        between = max(self.gap_s, self.overhead_s, size_bytes * self.gap_per_byte_s)
        return (messages - 1) * between + self.message_s(size_bytes)

    def all_reduce_s(self, algorithm: str, members: int, size_bytes: float) -> float:
        """Every step of these algorithms waits for the one before, and the gap for nobody.

        A gap that is longer than a whole step would stretch it; no step is shorter than its two
        overheads, so that is the case only where g > L + 2 o + (bytes of a step) G.
        """
        plain = self.as_link().all_reduce_s(algorithm, members, size_bytes)
        steps = _steps(algorithm, members)
        return max(plain, steps * self.gap_s)

    def server_s(self, workers: int, size_bytes: float) -> float:
        """One synchronous update: everybody's gradient in, the parameters out to everybody."""
        return 2 * self.burst_s(workers, size_bytes)


def _steps(algorithm: str, members: int) -> int:
    """Messages that one member sends after each other: the price of a network of latency only."""
    return round(all_reduce_seconds(algorithm, members, 0, 1.0, 0.0))


@dataclass(frozen=True)
class Machines:
    """Where the members of a collective sit: so many machines, and so many of them on each."""

    count: int
    crowd: int = 1
    memory_bandwidth: float = 0.0
    """Bytes per second inside a machine; 0 means free."""

    def all_reduce_s(self, link: AlphaBeta, algorithm: str, size_bytes: float) -> float:
        """Inside the machines at the speed of memory, between them over the cards."""
        between = link.all_reduce_s(algorithm, self.count, size_bytes)
        return between + self._inside().all_reduce_s(algorithm, self.crowd, size_bytes)

    def broadcast_s(self, link: AlphaBeta, size_bytes: float) -> float:
        between = link.broadcast_s(self.count, size_bytes)
        return between + self._inside().broadcast_s(self.crowd, size_bytes)

    def _inside(self) -> AlphaBeta:
        return AlphaBeta(0.0, 1 / self.memory_bandwidth if self.memory_bandwidth else 0.0)


def hierarchical_all_reduce_s(
    inner: AlphaBeta, outer: AlphaBeta, algorithm: str, local: int, machines: int, size_bytes: float
) -> float:
    """Reduce-scatter inside, all-reduce of a q-th part between the machines, all-gather inside.

    A ring's two halves cost the same, so together they are an all-reduce of the local members.
    """
    inside = inner.all_reduce_s("ring", local, size_bytes)
    return inside + outer.all_reduce_s(algorithm, machines, size_bytes / local)


def server_way_s(
    link: AlphaBeta,
    server_seconds_per_byte: float,
    workers: int,
    shards: Sequence[float],
    *,
    on_workers: bool = False,
) -> float:
    """One way between all workers at once and all servers: gradients in, or parameters out.

    Each server's card carries its range of the parameters for everybody, each worker's card all
    ranges once; the slower of the two decides. A server on a worker's machine reaches that one for
    nothing.
    """
    if not shards:
        raise ConfigurationError("a method with servers needs a range for each, got none")
    remote = workers - 1 if on_workers else workers
    card_s = remote * max(shards) * server_seconds_per_byte
    own = min(shards) if on_workers and len(shards) >= workers else 0.0
    return link.latency_s + max(card_s, (sum(shards) - own) * link.seconds_per_byte)
