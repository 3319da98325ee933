"""A topology of the living workers, and exchanges with the neighbours on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.replica import Replica
from gossamer.rules import weighted_sum
from gossamer.topology import Topology, make_topology
from gossamer.worker import Message, Worker

Inbox = Sequence[tuple[int, Pending[Message]]]
"""Each in-neighbour of a round, and what will come from it."""


class Neighbourhood:
    """The named topology over all workers, recomputed when the set of the living changes."""

    def __init__(self, spec: str, w: Worker) -> None:
        self.whole = make_topology(spec, w.size)
        self._live: frozenset[int] | None = None
        self._among = self.whole
        self.has_changed = False
        """Whether the last answer is another graph than the one before it."""

    def among(self, live: frozenset[int]) -> Topology:
        self.has_changed = False
        if live is not self._live:
            before, self._among = self._among, self.whole.among(live)
            self.has_changed = self._live is not None and before != self._among
            self._live = live
        return self._among


def exchange(w: Worker, mine: Any, graph: Topology, t: int) -> Inbox:
    """Send the same to all neighbours and post the receives of theirs."""
    for peer in graph.out_neighbours(w.rank, t):
        w.send(peer, mine, tag=("model", t))
    peers = graph.in_neighbours(w.rank, t)
    return [(peer, w.receive(("model", t), source=peer)) for peer in peers]


async def shares_of(
    w: Worker, graph: Topology, t: int, inbox: Inbox, mine: Any
) -> list[tuple[float, Any]]:
    """W_ij and what j sent, for every j; what is mine takes the weight of one that died."""
    weights = graph.weights(w.rank, t)
    shares = [(weights[w.rank], mine)]
    for peer, pending in inbox:
        try:
            shares.append((weights[peer], (await pending).payload))
        except PeerLost:
            shares.append((weights[peer], mine))
    return shares


async def mix(w: Worker, x: Replica, graph: Topology, t: int, inbox: Inbox) -> None:
    """x_i <- sum_j W_ij x_j."""
    if inbox:
        x.assign_(weighted_sum(await shares_of(w, graph, t, inbox, x.snapshot())))
