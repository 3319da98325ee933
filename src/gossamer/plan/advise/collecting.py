"""What it costs to have the model that was scored.

The score of most methods is that of the mean of all workers, whose models differ. A simulation has
the mean at every moment; on a cluster it takes one more average over the network. Without that
price the best advice for a slow network would be never to communicate at all.
"""

from __future__ import annotations

from gossamer.config.collective_costs import all_reduce_seconds
from gossamer.config.settings import Settings
from gossamer.tasks.flat_model import model_size


def model_bytes(settings: Settings) -> int:
    """The bytes that the network is charged for one model."""
    if settings.model_bytes is not None:
        return settings.model_bytes
    return model_size(settings.task).model_bytes


def collecting_seconds(settings: Settings, size_bytes: int) -> float:
    """The time of one average over all machines; 0 where a server or every worker has the model."""
    method, cluster = settings.method.method, settings.cluster
    if method.output != "mean" or method.family == "synchronous":
        return 0.0
    wires = cluster.network
    machines = cluster.machine_of(cluster.workers - 1) + 1
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow-link")])
    sites = cluster.sites
    rate = min(wires.egress, wires.ingress)
    latency = max((max(row) for row in sites.latency), default=wires.latency)
    if cluster.rack_of(machines - 1) > 0:
        latency += wires.rack_latency
        # A ring leaves each rack once.
        rate = min(rate / wires.oversubscription, wires.uplink or rate)
    between = [entry for row in sites.bandwidth for entry in row if entry]
    per_byte = slowest / min([rate, *between])
    return all_reduce_seconds(wires.collective, machines, size_bytes, latency, per_byte)
