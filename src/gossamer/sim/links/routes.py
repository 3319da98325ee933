"""What lies between two cards: racks' uplinks, pipes between sites, caps of a flow, latency."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from gossamer.config.cluster import Cluster
from gossamer.sim.kernel import SECOND
from gossamer.sim.network import Network, Port

Place = tuple[int, int]
"""The rack and the site of a card."""


class Way(NamedTuple):
    """The way of a message from one card to another."""

    latency_s: float
    cost: float
    """How many times a byte counts on both cards."""
    through: tuple[Port, ...]
    """The links on the way that several cards share."""
    cap: float
    """Bytes per nanosecond that one flow can have."""


class Routes:
    """The ways of a cluster. Cards with the same rack and site have the same ones."""

    def __init__(self, cluster: Cluster, network: Network, cards: int) -> None:
        self._cluster = cluster
        self._network = network
        self._places: list[Place] = [
            (cluster.rack_of(card), cluster.site_of(card)) for card in range(cards)
        ]
        self.uplinks: dict[tuple[int, str], Port] = {}
        """The uplinks by rack and direction, out or in."""
        self.pipes: dict[tuple[int, int], Port] = {}
        """The pipes by the sites that they lead from and to."""
        self._ways: dict[tuple[Place, Place], Way] = {}
        if cluster.network.uplink:
            capacity = cluster.network.uplink / SECOND
            racks = dict.fromkeys(rack for rack, _ in self._places)
            self.uplinks = {
                (rack, side): network.add_link(capacity) for rack in racks for side in ("out", "in")
            }
        sites = range(len(cluster.sites.names))
        self.pipes = {
            (one, other): network.add_link(cluster.sites.bandwidth[one][other] / SECOND)
            for one in sites
            for other in sites
            if cluster.sites.is_shared(one, other)
        }

    def way(self, source: int, target: int) -> Way:
        pair = (self._places[source], self._places[target])
        way = self._ways.get(pair)
        if way is None:
            way = self._ways[pair] = self._way(*pair)
        return way

    def _way(self, source: Place, target: Place) -> Way:
        wires, sites = self._cluster.network, self._cluster.sites
        (rack, site), (other_rack, other_site) = source, target
        latency_s = sites.latency[site][other_site] if sites.latency else wires.latency
        cost, through, cap = 1.0, list[Port](), inf
        if rack != other_rack:
            latency_s += wires.rack_latency
            cost = wires.oversubscription
            if self.uplinks:
                through += [self.uplinks[rack, "out"], self.uplinks[other_rack, "in"]]
        if (site, other_site) in self.pipes:
            through.append(self.pipes[site, other_site])
        elif sites.bandwidth and sites.bandwidth[site][other_site]:
            cap = sites.bandwidth[site][other_site] / SECOND
        return Way(latency_s, cost, tuple(through), cap)
