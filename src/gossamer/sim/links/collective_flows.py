"""Collectives that share the cards with everything else: each round of one is a set of flows.

A formula would give a collective whole cards while messages use them. As flows they slow each
other, by the same max-min rule as messages, and a rack's uplink or a pipe between sites holds a
collective up where it crosses them. On cards that nothing else uses the flows take as long as the
formula, to a nanosecond in each round. The steps of a ring are alike, so they are one round: each
member has one flow to the next, of all that it sends there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from gossamer.sim.delivery import Delivery
from gossamer.sim.kernel import SECOND, Kernel, Timer
from gossamer.sim.network import Flow

Hop = tuple[int, int]
"""The members from which and to which a flow goes, by their places in the order of members."""


class Round(NamedTuple):
    """Transfers of equal size at the same time, which all end before the next round begins."""

    hops: list[Hop]
    size_bytes: float
    steps: int = 1
    """How often the latency passes."""


def rounds_of(kind: str, algorithm: str, members: int, size_bytes: int) -> list[Round]:
    """The rounds of a collective among members that have a card each; the first one is the root."""
    ring = [(member, (member + 1) % members) for member in range(members)]
    if members == 1:
        return []
    if kind == "broadcast":
        return _spread(members, size_bytes)
    if kind == "all_gather":
        return [Round(ring, (members - 1) * size_bytes, members - 1)]
    if algorithm == "ring":
        return [Round(ring, 2 * (members - 1) / members * size_bytes, 2 * (members - 1))]
    if algorithm == "tree":
        down = _spread(members, size_bytes)
        return [Round(_back(one.hops), one.size_bytes) for one in reversed(down)] + down
    power = members.bit_length() - 1
    core = 1 << power
    extra = [(core + place, place) for place in range(members - core)]
    # Members beyond the largest power of two send their vectors first and get the sum last.
    first, last = ([Round(extra, size_bytes)], [Round(_back(extra), size_bytes)])
    exchanges = [[(place, place ^ 1 << bit) for place in range(core)] for bit in range(power)]
    if algorithm == "butterfly":
        middle = [Round(hops, size_bytes) for hops in exchanges]
    else:
        halving = [
            Round(hops, size_bytes / (1 << step))
            for step, hops in enumerate(reversed(exchanges), 1)
        ]
        middle = [*halving, *reversed(halving)]
    return [*first, *middle, *last] if extra else middle


def _spread(members: int, size_bytes: int) -> list[Round]:
    """Down a binomial tree: whoever has the vector sends it to one more."""
    counts = [1 << step for step in range((members - 1).bit_length())]
    return [
        Round([(at, at + have) for at in range(min(have, members - have))], size_bytes)
        for have in counts
    ]


def _back(hops: Sequence[Hop]) -> list[Hop]:
    return [(to, source) for source, to in hops]


class FlowingCollective:
    """One collective on its way: rounds of flows, one after the other."""

    def __init__(
        self, kernel: Kernel, post: Delivery, cards: Sequence[int], rounds: Sequence[Round],
        inside_s: float, done: Callable[[], None],
    ) -> None:  # fmt: skip
        """`inside_s` is what the members of a machine take among themselves, before the rounds."""
        self._kernel = kernel
        self._post = post
        self._cards = cards
        self._rounds = deque(rounds)
        self._done = done
        self._flows: dict[int, Flow] = {}
        self._timer: Timer | None = kernel.at(round(inside_s * SECOND), self._next)

    def cancel(self) -> None:
        """It never ends, and frees the cards."""
        if self._timer is not None:
            self._timer.cancel()
        for flow in self._flows.values():
            self._post.abort(flow)
        self._flows.clear()

    def _next(self) -> None:
        """Begin the next round: its latency first, which every step of it waits for."""
        self._timer = None
        if not self._rounds:
            self._done()
            return
        hops, size_bytes, steps = self._rounds.popleft()
        pairs = [(self._cards[one], self._cards[other]) for one, other in hops]
        latency_s = max(self._post.latency_s(*pair) for pair in pairs)
        begin = partial(self._begin, pairs, round(size_bytes))
        self._timer = self._kernel.at(round(steps * latency_s * SECOND), begin)

    def _begin(self, pairs: Sequence[tuple[int, int]], size_bytes: int) -> None:
        self._timer = None
        for number, (source, target) in enumerate(pairs):
            ended = partial(self._ended, number, size_bytes)
            self._flows[number] = self._post.transfer(source, target, size_bytes, ended)

    def _ended(self, number: int, size_bytes: int) -> None:
        flow = self._flows.pop(number)
        self._post.count_egress(flow.source, flow.target, size_bytes)
        if not self._flows:
            self._next()


class Cancellable(Protocol):
    """What is under way, and can be given up."""

    def cancel(self) -> None: ...


@dataclass(slots=True, eq=False)
class QueuedCollective:
    """A collective that is complete, and what starts it."""

    members: Sequence[int]
    start: Callable[[], Cancellable]
    under_way: Cancellable | None = None


class CollectiveQueue:
    """The collectives of one worker follow each other, in the order in which they were complete."""

    def __init__(self) -> None:
        self._lines: defaultdict[int, deque[QueuedCollective]] = defaultdict(deque)

    def add(self, members: Sequence[int], start: Callable[[], Cancellable]) -> QueuedCollective:
        """Start it when all collectives before it have ended that share a member with it."""
        queued = QueuedCollective(members, start)
        for rank in members:
            self._lines[rank].append(queued)
        self._consider(queued)
        return queued

    def _consider(self, queued: QueuedCollective) -> None:
        is_next = all(self._lines[rank][0] is queued for rank in queued.members)
        if queued.under_way is None and is_next:
            queued.under_way = queued.start()

    def leave(self, queued: QueuedCollective) -> None:
        """It has ended, or is given up; those that waited for it may start."""
        if queued.under_way is not None:
            queued.under_way.cancel()
        for rank in queued.members:
            self._lines[rank].remove(queued)
        heads = [self._lines[rank][0] for rank in queued.members if self._lines[rank]]
        for head in dict.fromkeys(heads):
            self._consider(head)
