"""What changes on the links while a run goes on: the traffic of others, and how busy cards are."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gossamer.config.network import Background
from gossamer.sim.kernel import SECOND
from gossamer.sim.network import Clock, Network, Port

Stream = Callable[..., random.Random]
"""Makes a generator for a purpose."""


class Load(Protocol):
    """The share of a link that others use, as a function of time that is asked in order."""

    def at(self, now_s: float) -> tuple[float, float]:
        """The share now, and the moment of the next change."""
        ...


class Bursts:
    """Others take a share of the link again and again: times between and lengths are drawn."""

    def __init__(self, background: Background, rng: random.Random) -> None:
        self._background = background
        self._rng = rng
        # The first moment is one in a long life of the link.
        self._is_on = rng.random() < background.lasts / (background.lasts + background.every)
        self._until_s = self._drawn_s()

    def _drawn_s(self) -> float:
        mean_s = self._background.lasts if self._is_on else self._background.every
        return self._rng.expovariate(1 / mean_s)

    def at(self, now_s: float) -> tuple[float, float]:
        while self._until_s <= now_s:
            self._is_on = not self._is_on
            self._until_s += self._drawn_s()
        return (self._background.load if self._is_on else 0.0), self._until_s


class Recorded:
    """The share that a trace gives."""

    def __init__(self, background: Background) -> None:
        self._moments = [moment for moment, _ in background.trace]
        self._shares = [share for _, share in background.trace]
        self._repeat_s = background.repeat

    def at(self, now_s: float) -> tuple[float, float]:
        rounds = now_s // self._repeat_s if self._repeat_s else 0
        since_s = rounds * self._repeat_s
        # The sum of the rounds may be a rounding error beyond a moment that it should reach.
        place = bisect_right(self._moments, now_s - since_s + 0.5 / SECOND)
        if place < len(self._moments):
            next_s = since_s + self._moments[place]
        else:
            next_s = since_s + self._repeat_s if self._repeat_s else float("inf")
        return (self._shares[place - 1] if place else 0.0), next_s


class OtherTraffic:
    """The shares that others have of the links.

    A link is looked after only while something of ours passes it: when it is idle, nothing is on
    the clock, so a run in which nobody can go on ends as it would without other traffic.
    """

    def __init__(
        self, background: Background, clock: Clock, network: Network,
        links: Mapping[str, Port], stream: Stream,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._network = network
        self._loads: dict[Port, Load] = {
            port: Recorded(background)
            if background.trace
            else Bursts(background, stream("background", name))
            for name, port in links.items()
        }
        self._whole = {port: port.capacity for port in self._loads}
        self._watched: set[Port] = set()

    def set_whole(self, port: Port, capacity: float) -> None:
        """The capacity of a link, of which others use a part, has changed."""
        if port in self._loads:
            self._whole[port] = capacity
            share, _ = self._loads[port].at(self._clock.now / SECOND)
            capacity *= 1 - share
        self._network.set_link(port, capacity)

    def notice(self, ports: Iterable[Port]) -> None:
        """Something of ours begins to pass these links."""
        for port in ports:
            if port in self._loads and port not in self._watched:
                self._watched.add(port)
                self._follow(port)

    def _follow(self, port: Port) -> None:
        share, next_s = self._loads[port].at(self._clock.now / SECOND)
        self._network.set_link(port, self._whole[port] * (1 - share))
        if next_s < float("inf"):
            wait_ns = max(1, round(next_s * SECOND) - self._clock.now)
            self._clock.at(wait_ns, self._changed, port)

    def _changed(self, port: Port) -> None:
        if port.flows:
            self._follow(port)
        else:
            self._watched.discard(port)


class CardUse:
    """How long each card has been sending or receiving."""

    def __init__(self, clock: Clock, cards: int) -> None:
        self._clock = clock
        self._transfers = [0] * cards
        self._since_ns = [0] * cards
        self._busy_ns = [0] * cards

    def begin(self, *cards: int) -> None:
        for card in cards:
            if self._transfers[card] == 0:
                self._since_ns[card] = self._clock.now
            self._transfers[card] += 1

    def end(self, *cards: int) -> None:
        for card in cards:
            self._transfers[card] -= 1
            if self._transfers[card] == 0:
                self._busy_ns[card] += self._clock.now - self._since_ns[card]

    def busy_ns(self, card: int) -> int:
        """Until now."""
        running = self._clock.now - self._since_ns[card] if self._transfers[card] else 0
        return self._busy_ns[card] + running
