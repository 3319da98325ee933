"""What groups of machines tell each other, on the cards and in the memory of a cluster.

Workers are numbered as the simulator numbers them: those that hold a layer together follow each
other, then the stages, then the copies. A group is every so manieth worker. What lies on one
machine goes through its memory; a card carries what all workers of its machine send at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from gossamer.config.cluster import Cluster
from gossamer.config.collective_costs import all_gather_seconds, all_reduce_seconds
from gossamer.plan.cost.alpha_beta import AlphaBeta


@dataclass(frozen=True)
class ClusterLinks:
    """The links of a cluster whose workers are all busy with the same."""

    cluster: Cluster

    def _near(self) -> AlphaBeta:
        speed = self.cluster.network.memory_bandwidth
        return AlphaBeta(0.0, 1 / speed if speed else 0.0)

    def _far(self, machines: int, sharing: int) -> AlphaBeta:
        wires, racks = self.cluster.network, self.cluster.machines_per_rack
        per_byte, latency = sharing / min(wires.egress, wires.ingress), wires.latency
        if racks and machines > racks:
            return AlphaBeta(latency + wires.rack_latency, per_byte * wires.oversubscription)
        return AlphaBeta(latency, per_byte)

    def _layout(self, members: int, stride: int) -> tuple[int, int, int]:
        """Members on a machine, machines, and groups that use a card at the same time. A group
        that does not divide the machines may lie across two of them."""
        crowd = self.cluster.workers_per_machine
        inside = max(1, gcd(members * stride, crowd) // stride)
        return inside, -(-members // inside), min(stride, crowd)

    @property
    def slowest(self) -> AlphaBeta:
        """Between two workers of different machines, or of one if there is only one."""
        return self._near() if self.cluster.machines == 1 else self._far(self.cluster.machines, 1)

    def all_reduce_s(self, members: int, stride: int, size_bytes: float) -> float:
        """Until all have the sum: inside machines first, then between them."""
        if members == 1 or not size_bytes:
            return 0.0
        inside, machines, sharing = self._layout(members, stride)
        algorithm, size = self.cluster.network.collective, round(size_bytes)
        near, far = self._near(), self._far(machines * max(1, stride), sharing)
        return all_reduce_seconds(
            algorithm, inside, size, near.latency_s, near.seconds_per_byte
        ) + all_reduce_seconds(algorithm, machines, size, far.latency_s, far.seconds_per_byte)

    def all_gather_s(self, members: int, stride: int, size_bytes: float) -> float:
        """Until all have all blocks, of `size_bytes` together; a reduce-scatter takes as long."""
        if members == 1 or not size_bytes:
            return 0.0
        inside, machines, sharing = self._layout(members, stride)
        size = round(size_bytes)
        near, far = self._near(), self._far(machines * max(1, stride), sharing)
        between = all_gather_seconds(machines, size, far.latency_s, far.seconds_per_byte)
        return between + all_gather_seconds(inside, size, near.latency_s, near.seconds_per_byte)

    def send_s(self, distance: int, span: int, size_bytes: float) -> float:
        """From one worker to another so far on, in a replica of `span` workers: where the replica
        does not stand on one machine, some such pair crosses the network."""
        crowd = self.cluster.workers_per_machine
        is_near = span <= crowd and crowd % span == 0
        link = self._near() if is_near else self._far(-(-span // crowd), 1)
        return link.message_s(size_bytes) if distance else 0.0
