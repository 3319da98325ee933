"""A topology of the living workers."""

from __future__ import annotations

from gossamer.topology import Topology, make_topology
from gossamer.worker import Worker


class Neighbourhood:
    """The named topology over all workers, recomputed when the set of the living changes."""

    def __init__(self, spec: str, w: Worker) -> None:
        self.whole = make_topology(spec, w.size)
        self._live: frozenset[int] | None = None
        self._among = self.whole

    def among(self, live: frozenset[int]) -> Topology:
        if live is not self._live:
            self._live = live
            self._among = self.whole.among(live)
        return self._among
