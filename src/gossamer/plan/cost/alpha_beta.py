"""Messages, collectives and servers in the alpha-beta and the LogP model.

The costs of the collectives come from `gossamer.config.collective_costs`, so that the simulator and
the closed forms agree on the cost of a ring. The symbols are the same: L latency, G seconds per
byte, B bytes, P members. Network cards are full duplex.
"""

from __future__ import annotations

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
        """Seconds until the last of so many simultaneous messages has crossed one card."""
        return self.latency_s + messages * size_bytes * self.seconds_per_byte

    def all_reduce_s(self, algorithm: str, members: int, size_bytes: float) -> float:
        return all_reduce_seconds(
            algorithm, members, round(size_bytes), self.latency_s, self.seconds_per_byte
        )

    def broadcast_s(self, members: int, size_bytes: float) -> float:
        return broadcast_seconds(members, round(size_bytes), self.latency_s, self.seconds_per_byte)


@dataclass(frozen=True)
class LogGP:
    """The LogP model with Alexandrov's gap per byte.

    Culler et al. 1993: latency L, overhead o of either processor per message, gap g between
    messages of one processor. Computing cannot hide the overhead.
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
        """Seconds of so many messages at once into, or out of, one processor, such as a server."""
        if messages < 1:
            return 0.0
        between = max(self.gap_s, self.overhead_s, size_bytes * self.gap_per_byte_s)
        return (messages - 1) * between + self.message_s(size_bytes)

    def all_reduce_s(self, algorithm: str, members: int, size_bytes: float) -> float:
        """Each step of these algorithms waits for the step before, which hides the gap.

        A gap stretches a step only where it is longer than the whole step, that is, where
        g > L + 2 o + (bytes of a step) G.
        """
        plain = self.as_link().all_reduce_s(algorithm, members, size_bytes)
        steps = _steps(algorithm, members)
        return max(plain, steps * self.gap_s)

    def server_s(self, workers: int, size_bytes: float) -> float:
        """One synchronous update: all gradients go in, and the parameters go out to all workers."""
        return 2 * self.burst_s(workers, size_bytes)


def _steps(algorithm: str, members: int) -> int:
    """The messages that one member sends one after another: their cost at a latency of 1."""
    return round(all_reduce_seconds(algorithm, members, 0, 1.0, 0.0))


@dataclass(frozen=True)
class Machines:
    """Where the members of a collective run: the number of machines, and of members on each."""

    count: int
    crowd: int = 1
    memory_bandwidth: float = 0.0
    """Bytes per second inside a machine; 0 means that transfers there cost nothing."""

    def all_reduce_s(self, link: AlphaBeta, algorithm: str, size_bytes: float) -> float:
        """Members of one machine exchange through memory, machines through their network cards."""
        between = link.all_reduce_s(algorithm, self.count, size_bytes)
        return between + self._inside().all_reduce_s(algorithm, self.crowd, size_bytes)

    def broadcast_s(self, link: AlphaBeta, size_bytes: float) -> float:
        between = link.broadcast_s(self.count, size_bytes)
        return between + self._inside().broadcast_s(self.crowd, size_bytes)

    def _inside(self) -> AlphaBeta:
        return AlphaBeta(0.0, 1 / self.memory_bandwidth if self.memory_bandwidth else 0.0)


def server_way_s(
    link: AlphaBeta,
    server_seconds_per_byte: float,
    workers: int,
    shards: Sequence[float],
    *,
    on_workers: bool = False,
) -> float:
    """Seconds for all workers at once to send to all servers, or to receive from them.

    Each server's card carries its range of the parameters for every worker, and each worker's card
    carries all ranges once; the slower of the two decides. A server on a worker's machine exchanges
    with that worker at no cost.
    """
    if not shards:
        raise ConfigurationError("a method with servers needs a range for each, got none")
    remote = workers - 1 if on_workers else workers
    card_s = remote * max(shards) * server_seconds_per_byte
    own = min(shards) if on_workers and len(shards) >= workers else 0.0
    return link.latency_s + max(card_s, (sum(shards) - own) * link.seconds_per_byte)
