"""The cluster that describes the findings of a probe to the simulator."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.config.cluster import Cluster, Compute, Wires
from gossamer.config.faults import Fault
from gossamer.config.network import Sites
from gossamer.plan.batch_line import BatchLine, batch_line
from gossamer.plan.probe.findings import Crowd, MeasuredLink, ProbeFindings
from gossamer.plan.probe.fit import fit
from gossamer.plan.probe.links import ring_between
from gossamer.plan.probe.regions import (
    Groups,
    are_in_order,
    are_racks,
    flows_across,
    links_of,
    regions_of,
    sites_of,
)
from gossamer.quantities import counted

SLOW_WORKER = 1.25
"""A worker is described as slow if its steps take this many times the typical time."""
SLOW_CARD = 1.5
"""A network card is slow if the typical card has this many times its bandwidth."""
CROWDED = 0.8
"""A notice is given if a sender in a crowd gets less than this share of its rate alone."""


@dataclass(frozen=True)
class Speeds:
    """A comparison of the step times of all workers."""

    medians: list[float]
    typical: float
    """The median step time of a typical worker."""
    factors: list[float]
    """How many times longer than the typical worker's each one's steps are, on average."""
    slow: dict[int, float]
    """How many times as long their steps take, on average, for the workers that differ."""


def speeds_of(findings: ProbeFindings) -> Speeds:
    """A worker differs if both its median and its mean differ; the means say by how much.

    A single pause does not make a worker slow, so its median must differ as well. The throughput of
    a slow worker follows from its mean, which includes long steps.
    """
    medians = [statistics.median(steps.compute) for steps in findings.steps]
    means = [statistics.fmean(steps.compute) for steps in findings.steps]
    # Of two workers that differ, the slow one is named.
    typical, typical_mean = statistics.median_low(medians), statistics.median_low(means)
    factors = [mean / typical_mean for mean in means]
    slow = {
        rank: factor
        for rank, factor in enumerate(factors)
        if min(factor, medians[rank] / typical) > SLOW_WORKER
        or max(factor, medians[rank] / typical) < 1 / SLOW_WORKER
    }
    return Speeds(medians, typical, factors, slow)


def describe(findings: ProbeFindings, name: str = "measured") -> Cluster:
    """A cluster of typical machines at the sites or in the racks that were found, with faults for
    the workers and cards that differ."""
    per_machine = workers_per_machine(findings.hosts)
    groups = described_regions(findings)
    wires, racks = _wires(findings, per_machine), 0
    sites = Sites()
    if len(groups) > 1 and are_racks(findings, groups):
        racks = len(groups[0])
        wires = _with_racks(wires, findings, groups)
    elif len(groups) > 1:
        sites = sites_of(findings, groups, per_machine)
    speeds = speeds_of(findings)
    faults = [Fault("slow", worker=rank, amount=_rounded(f)) for rank, f in speeds.slow.items()]
    for host, factor in slow_cards(findings).items():
        ranks = [rank for rank, there in enumerate(findings.hosts) if there == host]
        # Workers of one machine share its card, which must be slowed only once.
        for rank in ranks[:1] if per_machine > 1 else ranks:
            faults.append(Fault("slow-link", worker=rank, amount=_rounded(factor)))
    return Cluster(
        name=name, title=_title(findings), workers=findings.workers,
        workers_per_machine=per_machine, compute=_compute(findings, speeds),
        network=wires, faults=tuple(faults), machines_per_rack=racks, sites=sites,
    )  # fmt: skip


def described_regions(findings: ProbeFindings) -> Groups:
    """The groups of near hosts that a description can hold: their workers follow each other."""
    groups = regions_of(findings.hosts, findings.links)
    if are_in_order(findings, groups):
        return groups
    return [findings.host_names]


def _with_racks(wires: Wires, findings: ProbeFindings, groups: Groups) -> Wires:
    """What leaving a rack costs: more latency, and a part of the uplink where that was full."""
    inside, outside = links_of(findings, groups)
    distance = min(one.shortest for one in outside) - min(one.shortest for one in inside)
    full = [one.together for one in flows_across(findings, groups) if one.is_shared]
    return dataclasses.replace(
        wires, rack_latency=max(0.0, distance), uplink=statistics.median(full) if full else 0.0
    )


def workers_per_machine(hosts: Sequence[str]) -> int:
    """The workers on each host, if all hosts have the same number and in order; otherwise 1."""
    names = list(dict.fromkeys(hosts))
    share, rest = divmod(len(hosts), len(names))
    is_regular = rest == 0 and all(host == names[rank // share] for rank, host in enumerate(hosts))
    return share if is_regular else 1


def _title(findings: ProbeFindings) -> str:
    workers = counted(findings.workers, "worker")
    hosts = counted(len(findings.host_names), "host")
    return f"{workers} on {hosts}, measured with {findings.inquiry.task}"


def _compute(findings: ProbeFindings, speeds: Speeds) -> Compute:
    """One distribution is fitted to the times of typical workers, each over its own median."""
    relative = [
        value / speeds.medians[rank]
        for rank, steps in enumerate(findings.steps)
        if rank not in speeds.slow
        for value in steps.compute
    ]
    fitted = fit(relative)
    # A cluster has no pauses between gradients, so the mean includes the interruptions there.
    others = [statistics.fmean(steps.other) for steps in findings.steps]
    mean, line = speeds.typical * fitted.seconds, measured_line(findings)
    per_sample = 0.0 if line is None else line.per_sample * fitted.seconds
    return Compute(
        # The mean at the batch that was measured longest is kept, whatever the line says.
        seconds=max(0.0, mean - per_sample * findings.inquiry.batch),
        per_sample=per_sample,
        distribution=fitted.distribution,
        jitter=fitted.jitter,
        unoverlapped_seconds=statistics.median(others),
        pause_probability=fitted.pause_probability,
        pause_seconds=speeds.typical * fitted.pause_seconds,
    )


def measured_line(findings: ProbeFindings) -> BatchLine | None:
    """The line through the medians of typical workers at the sizes of the batch."""
    speeds = speeds_of(findings)
    typical = [steps for rank, steps in enumerate(findings.steps) if rank not in speeds.slow]
    sizes = sorted({size for steps in typical for size, _ in steps.by_batch})
    others = {
        size: statistics.median(dict(steps.by_batch)[size] for steps in typical) for size in sizes
    }
    return batch_line(findings.inquiry.batch, speeds.typical, others)


# ---------------------------------------------------------------------------------- the network


def inside(findings: ProbeFindings) -> list[MeasuredLink]:
    """The links between workers of one host."""
    return [link for link in findings.links if findings.are_together(link.source, link.target)]


def between(findings: ProbeFindings) -> list[MeasuredLink]:
    """The links between workers of different hosts."""
    return [link for link in findings.links if not findings.are_together(link.source, link.target)]


def measured_as_network(findings: ProbeFindings) -> list[MeasuredLink]:
    """The links described as the network: those between near hosts, if there are several hosts."""
    near, _ = links_of(findings, described_regions(findings))
    return near or between(findings) or inside(findings)


def slow_cards(findings: ProbeFindings) -> dict[str, float]:
    """The hosts whose cards are slow, and how many times slower than the typical card.

    A link is as fast as the slower of its cards, so a card is as fast as its best link. With two
    hosts it cannot be decided which of them has the slow card.
    """
    best: dict[str, float] = {}
    near, far = links_of(findings, described_regions(findings))
    for link in near or far:
        for end in (link.source, link.target):
            host = findings.hosts[end]
            best[host] = max(best.get(host, 0.0), link.bandwidth)
    if len(best) < 3 or not near:
        return {}
    typical = statistics.median_high(best.values())
    return {host: typical / speed for host, speed in best.items() if typical / speed > SLOW_CARD}


def _wires(findings: ProbeFindings, per_machine: int) -> Wires:
    found = measured_as_network(findings)
    if not found:
        return Wires()
    slow = slow_cards(findings)
    typical = [
        link for link in found
        if findings.hosts[link.source] not in slow and findings.hosts[link.target] not in slow
    ]  # fmt: skip
    memory = 0.0
    if per_machine > 1 and (together := inside(findings)):
        memory = statistics.median(link.bandwidth for link in together)
        if (crowd := crowd_of(findings, "inside")) is not None:
            # The simulator's transfers inside a machine do not share bandwidth, so each gets what
            # a sender gets in a crowd.
            memory = min(memory, statistics.median(crowd.rates.values()))
    return Wires(
        bandwidth=statistics.median(link.bandwidth for link in typical or found),
        latency=statistics.median(link.latency for link in typical or found),
        memory_bandwidth=memory,
    )


def crowd_of(findings: ProbeFindings, pattern: str) -> Crowd | None:
    return next((crowd for crowd in findings.crowds if crowd.pattern == pattern), None)


def share_in_a_crowd(findings: ProbeFindings) -> float | None:
    """The rate of a typical card while all hosts send, over the rate of the same links alone."""
    crowd = crowd_of(findings, "between")
    if crowd is None:
        return None
    targets = ring_between(findings.hosts)
    alone: dict[str, list[float]] = {}
    for link in findings.links:
        if targets.get(link.source) == link.target:
            alone.setdefault(findings.hosts[link.source], []).append(link.bandwidth)
    rates = card_rates(findings, crowd.rates)
    shares = [rates[host] / statistics.median(found) for host, found in alone.items()]
    return statistics.median(shares) if shares else None


def card_rates(findings: ProbeFindings, rates: Mapping[int, float]) -> dict[str, float]:
    """The rate of each host's card: the sum over the senders of that host."""
    found: dict[str, float] = {}
    for rank, rate in rates.items():
        host = findings.hosts[rank]
        found[host] = found.get(host, 0.0) + rate
    return found


def notices(findings: ProbeFindings) -> list[str]:
    """Sentences on what was not measured and what a cluster cannot describe."""
    said: list[str] = []
    if findings.workers == 1:
        said.append(
            "there are no peers to measure links with, so [network] has the simulator's defaults; "
            "start several workers: `gossamer probe -n 4` on one host, `torchrun --nproc-per-node "
            "4 -m gossamer probe` or `mpirun -n 4 gossamer probe` on any number of them"
        )
        return said
    if len(findings.host_names) == 1:
        said.append(
            "all workers share one host: what is written of the network was measured inside it"
        )
    elif workers_per_machine(findings.hosts) == 1 and len(findings.host_names) < findings.workers:
        said.append(
            "the hosts have different numbers of workers, or not in order, which no cluster file "
            "can say: each worker is described as a machine of its own"
        )
    regions = regions_of(findings.hosts, findings.links)
    if len(regions) > 1 and not are_in_order(findings, regions):
        said.append(
            f"{len(regions)} groups of near hosts were found, but their workers do not follow each "
            "other in rank, which no cluster file can say: all are described as one place; start "
            "the workers of each group one after the other"
        )
    looked_at = {
        (min(one.source, one.target), max(one.source, one.target)) for one in findings.links
    }
    if len(looked_at) < findings.pairs:
        said.append(
            f"{len(looked_at)} of {findings.pairs} pairs were measured in the time given; "
            "a larger --seconds measures more"
        )
    share = share_in_a_crowd(findings)
    if share is not None and share < CROWDED and len(regions) == 1:
        said.append(
            f"with all hosts sending at once a card gets {100 * share:.0f} % of what it gets "
            "alone: something between the hosts is shared, which the simulator does not know; "
            "lower bandwidth in the file for methods whose workers send in step"
        )
    return said


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
