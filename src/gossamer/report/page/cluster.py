"""The drawing of a cluster: machines at sites and in racks, with their faults."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.config.cluster import Cluster, Compute, cluster_from
from gossamer.config.faults import FOREVER, Fault, read_fault
from gossamer.config.network import CARDS, SITES, UPLINKS, Sites, Wires
from gossamer.errors import ConfigurationError
from gossamer.quantities import show_bandwidth, show_percent, show_seconds
from gossamer.report.page.data import ClusterData, Machine
from gossamer.runs.json_files import members, text, texts
from gossamer.runs.result import Row

_MOST_WORKERS = 4096


def read_cluster(config: Row) -> Cluster | None:
    """The cluster of a run's settings; None if there is none that can be drawn."""
    kept = members(config.get("cluster"))
    if not kept:
        return None
    try:
        cluster = cluster_from(kept)
    except (ConfigurationError, ValueError, TypeError, AttributeError):
        return None
    return cluster if cluster.workers <= _MOST_WORKERS else None


def drawn_cluster(
    cluster: Cluster, servers: int, *, own_machines: bool, batch: int = 0
) -> ClusterData:
    """A simulated cluster; servers have machines of their own or run on those of workers."""
    wires = cluster.network
    notes = [*_about_network(cluster), *_about_everyone(cluster.faults)]
    if servers and not own_machines:
        notes.append("Servers sit on the workers' machines and share their cards.")
    if servers and own_machines and wires.server_bandwidth:
        notes.append(f"A server's own card carries {show_bandwidth(wires.server_bandwidth)}.")
    return ClusterData(
        name=cluster.name,
        title=cluster.title,
        workers=cluster.workers,
        machines=_machines(cluster, cluster.faults),
        servers=servers,
        bandwidth=_card(wires),
        latency=show_seconds(wires.latency),
        step=shown_step(cluster.compute, batch),
        notes=notes,
    )


def drawn_host(cluster: Cluster, config: Row, servers: int) -> ClusterData:
    """Real workers: processes on one host, with the faults that were injected."""
    faults: list[Fault] = []
    for line in texts(config.get("faults")):
        try:
            faults.append(read_fault(line))
        except ConfigurationError:
            continue  # the fault is from a later version; the settings show the line
    machines = _machines(cluster, faults)
    for machine in machines:
        machine["name"] = machine["name"].replace("machine", "process")
    transport = text(config.get("transport")) or "the default transport"
    return ClusterData(
        name=cluster.name,
        title=f"{cluster.workers} real workers by {transport}",
        workers=cluster.workers,
        machines=machines,
        servers=servers,
        bandwidth="",
        latency="",
        step="",
        notes=["Real processes: each box is one of them, and nothing is simulated."],
    )


def _machines(cluster: Cluster, faults: Sequence[Fault]) -> list[Machine]:
    per_machine = cluster.workers_per_machine
    machines: list[Machine] = []
    for first in range(0, cluster.workers, per_machine):
        ranks = list(range(first, min(first + per_machine, cluster.workers)))
        number = cluster.machine_of(first)
        own = [fault for fault in faults if fault.worker in ranks]
        machines.append(
            Machine(
                name=f"machine {number}",
                workers=ranks,
                place=_place(cluster, number),
                slow=_factor(own, "slow"),
                slow_link=_factor(own, "slow-link"),
                dies=any(fault.kind == "kill" for fault in own),
                notes=[_sentence(fault) for fault in own],
            )
        )
    return machines


def _place(cluster: Cluster, machine: int) -> str:
    names = cluster.sites.names
    site = [names[cluster.site_of(machine)]] if names else []
    rack = [f"rack {cluster.rack_of(machine)}"] if cluster.machines_per_rack else []
    return ", ".join(site + rack)


def _factor(faults: Sequence[Fault], kind: str) -> float:
    """The largest factor; at least 1, as a fast worker is not drawn as slow."""
    return max((fault.amount for fault in faults if fault.kind == kind), default=1.0)


def _sentence(fault: Fault) -> str:
    worker = f"worker {fault.worker}"
    match fault.kind:
        case "kill":
            return f"{worker} dies at {show_seconds(fault.at)}"
        case "return":
            return f"{worker} comes back at {show_seconds(fault.at)}"
        case "kill-server":
            return f"server {fault.worker} dies at {show_seconds(fault.at)}"
        case "arrive":
            return f"{worker} arrives at {show_seconds(fault.at)}"
        case "pause":
            return f"{worker} stands still{_when(fault)}"
        case "slow":
            return f"{worker} computes {fault.amount:g} times slower{_when(fault)}"
        case _:
            return f"the card of {worker} is {fault.amount:g} times slower{_when(fault)}"


def _when(fault: Fault) -> str:
    if fault.at == 0 and fault.lasts == FOREVER:
        return ""
    start = f" from {show_seconds(fault.at)} on"
    return start if fault.lasts == FOREVER else f"{start}, for {show_seconds(fault.lasts)}"


def _about_everyone(faults: Sequence[Fault]) -> list[str]:
    """The faults of the network that belong to no machine."""
    notes: list[str] = []
    for fault in faults:
        if fault.kind == "drop":
            share = show_percent(fault.amount)
            notes.append(f"{share} of the messages are lost and sent again{_when(fault)}.")
        elif fault.kind == "delay":
            notes.append(f"Every message is {show_seconds(fault.amount)} later{_when(fault)}.")
        elif fault.kind == "partition":
            sides = " and ".join(_ranks(sorted(side)) for side in fault.sides)
            notes.append(f"Nothing crosses between {sides}{_when(fault)}.")
    return notes


def _ranks(side: Sequence[int]) -> str:
    shown = ", ".join(map(str, side[:8])) + (", ..." if len(side) > 8 else "")
    return f"workers {shown}"


def _about_network(cluster: Cluster) -> list[str]:
    wires = cluster.network
    notes: list[str] = []
    if cluster.workers_per_machine > 1:
        inside = wires.memory_bandwidth
        speed = f"at {show_bandwidth(inside)}" if inside else "free of charge"
        notes.append(f"Inside a machine transfers are {speed}.")
    if cluster.machines_per_rack and wires.rack_latency:
        notes.append(f"Leaving a rack takes {show_seconds(wires.rack_latency)} more.")
    if cluster.machines_per_rack and wires.oversubscription > 1:
        notes.append(f"A byte that leaves its rack costs {wires.oversubscription:g} times as much.")
    if cluster.machines_per_rack and wires.uplink:
        notes.append(f"All that leaves or enters a rack shares {show_bandwidth(wires.uplink)}.")
    if wires.processor_share:
        share = show_percent(wires.processor_share)
        notes.append(f"While a machine sends or receives it computes {share} slower.")
    return notes + _about_sites(cluster.sites) + _about_others(cluster)


def _card(wires: Wires) -> str:
    up, down = show_bandwidth(wires.egress), show_bandwidth(wires.ingress)
    return up if up == down else f"{up} up, {down} down"


def _about_sites(sites: Sites) -> list[str]:
    """What lies between sites, from the slowest to the fastest pair."""
    apart = [(a, b) for a in range(len(sites.names)) for b in range(len(sites.names)) if a != b]
    notes: list[str] = []
    if apart and sites.bandwidth:
        rates = [sites.bandwidth[one][other] for one, other in apart]
        least, most = show_bandwidth(min(rates)), show_bandwidth(max(rates))
        span = least if least == most else f"{least} to {most}"
        who = "all flows together" if sites.shared else "one flow"
        notes.append(f"Between two sites {who} can have {span}.")
    if apart and sites.latency:
        times = [sites.latency[one][other] for one, other in apart]
        least, most = show_seconds(min(times)), show_seconds(max(times))
        span = least if least == most else f"{least} to {most}"
        notes.append(f"A message to another site takes {span} before its first byte.")
    return notes


_OTHERS_ON = {CARDS: "each card", UPLINKS: "each rack's uplink", SITES: "each pipe between sites"}


def _about_others(cluster: Cluster) -> list[str]:
    """Other traffic, and slowness that workers share."""
    background, phases = cluster.background, cluster.phases
    notes: list[str] = []
    if background.trace:
        notes.append(f"Others use {_OTHERS_ON[background.on]} as a trace says.")
    elif background.is_there:
        notes.append(
            f"Others take {show_percent(background.load)} of {_OTHERS_ON[background.on]}, for "
            f"{show_seconds(background.lasts)} every {show_seconds(background.every)} on average."
        )
    who = "The whole cluster" if phases.shared_by == "all" else f"Each {phases.shared_by}"
    if phases.are_there and phases.factor != 1:
        notes.append(
            f"{who} computes {phases.factor:g} times slower for {show_seconds(phases.lasts)} every "
            f"{show_seconds(phases.every)} on average."
        )
    if phases.jitter:
        notes.append(f"{who} has a pace that varies by {show_percent(phases.jitter)}.")
    return notes


def shown_step(compute: Compute, batch: int) -> str:
    """How long a gradient takes, and which part of that follows the batch; a batch of 0 is one that
    the run does not name."""
    shown = show_seconds(compute.mean_seconds(batch) if batch else compute.seconds)
    if compute.per_sample:
        each = f"{show_seconds(compute.per_sample)} a sample"
        parts = f"{show_seconds(compute.seconds)} and {each}"
        shown = f"{shown} for {batch} samples ({parts})" if batch else parts
    if compute.distribution == "exponential":
        shown += " on average, exponentially distributed"
    elif compute.distribution != "constant" and compute.jitter:
        shown += f" ± {show_percent(compute.jitter)}"
    if compute.unoverlapped_seconds:
        shown += f", then {show_seconds(compute.unoverlapped_seconds)} of copying"
    if compute.pause_probability:
        shown += (
            f"; {show_seconds(compute.pause_seconds)} longer with probability "
            f"{show_percent(compute.pause_probability)}"
        )
    return shown
