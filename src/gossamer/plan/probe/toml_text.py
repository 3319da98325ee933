"""The TOML file of a measured cluster, with comments on what was measured and its spread."""

from __future__ import annotations

import json
import statistics
import textwrap
import time
from collections.abc import Sequence

import numpy as np

from gossamer.config.cluster import Cluster
from gossamer.config.network import Sites, Wires
from gossamer.plan.probe.description import (
    between,
    card_rates,
    crowd_of,
    described_regions,
    inside,
    measured_as_network,
    measured_line,
    notices,
    speeds_of,
)
from gossamer.plan.probe.findings import MeasuredLink, ProbeFindings
from gossamer.plan.probe.regions import flows_across
from gossamer.quantities import counted

_MOST_LINES = 64
_LINE = 96


def to_toml(cluster: Cluster, findings: ProbeFindings) -> str:
    """The text of the file, which `load_cluster` reads."""
    lines = [
        *_header(findings),
        f"title = {json.dumps(cluster.title)}",
        f"workers = {cluster.workers}",
    ]
    if cluster.workers_per_machine > 1:
        lines.append(f"workers_per_machine = {cluster.workers_per_machine}")
    if cluster.machines_per_rack:
        lines += comment("Hosts that are near each other, as the shortest round trips show.")
        lines.append(f"machines_per_rack = {cluster.machines_per_rack}")
    lines += ["", "[compute]", *_compute(cluster, findings), "", "[network]"]
    lines += _network(cluster, findings)
    if cluster.sites.names:
        lines += ["", "[sites]", *_sites(cluster.sites, findings)]
    if cluster.compression:
        lines += ["", "[compression]", *_compression(cluster)]
    for kind, table, what in (
        ("slow", "slow", "How many times longer than the typical worker's their steps are."),
        ("slow-link", "slow_link", "How many times slower than the typical one their cards are."),
    ):
        faults = [fault for fault in cluster.faults if fault.kind == kind]
        if faults:
            lines += ["", f"[{table}]", f"# {what}"]
            lines += [f"{fault.worker} = {fault.amount!r}" for fault in faults]
    return "\n".join(lines) + "\n"


def _compression(cluster: Cluster) -> list[str]:
    return [
        *comment(
            "Nanoseconds that a number takes to be encoded and to be decoded, in a vector of a "
            "million."
        ),
        *(f"{entry} = [{up!r}, {down!r}]" for entry, (up, down) in cluster.compression.items()),
    ]


def show_time(seconds: float) -> str:
    """A time as `quantities.seconds` reads it."""
    return _with_unit(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def show_rate(bytes_per_second: float) -> str:
    """A rate as `quantities.bytes_per_second` reads it."""
    return _with_unit(bytes_per_second, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def _with_unit(value: float, units: dict[str, float]) -> str:
    unit = next((unit for unit, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:.4g}{unit}"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The range that holds nine of ten values."""
    low, high = np.quantile(values, [0.05, 0.95])
    return float(low), float(high)


def comment(text: str) -> list[str]:
    """A sentence as lines of a comment."""
    return textwrap.wrap(
        text, _LINE, initial_indent="# ", subsequent_indent="# ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- the parts


def _header(findings: ProbeFindings) -> list[str]:
    inquiry = findings.inquiry
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(findings.began))
    lines = comment(
        f"Measured by gossamer probe on {when}, in {findings.seconds:.0f} s: task {inquiry.task}, "
        f"batch {inquiry.batch}, {inquiry.optimiser}, {counted(inquiry.threads, 'thread')} of "
        "torch in each worker."
    )
    for host in findings.host_names[:_MOST_LINES]:
        ranks = [str(rank) for rank, there in enumerate(findings.hosts) if there == host]
        word = "worker" if len(ranks) == 1 else "workers"
        lines += comment(f"{_name(host)}: {word} {', '.join(ranks)}.")
    for notice in notices(findings):
        lines += comment(f"Note: {notice}.")
    return lines


def _name(host: str) -> str:
    printable = "".join(character for character in host if character.isprintable())
    return printable.partition("/")[0]


def _compute(cluster: Cluster, findings: ProbeFindings) -> list[str]:
    compute, speeds = cluster.compute, speeds_of(findings)
    total = sum(steps.count for steps in findings.steps)
    lines = comment(
        f"{counted(total, 'step')} after warming up, all workers at once. A gradient's median, and "
        "from where to where nine of ten lie:"
    )
    for rank, steps in enumerate(findings.steps[:_MOST_LINES]):
        low, high = spread(steps.compute)
        factor = speeds.slow.get(rank)
        named = "" if factor is None else f", on average {factor:.3g} times the typical one"
        lines.append(
            f"#   worker {rank}: {show_time(speeds.medians[rank])} ({show_time(low)} to "
            f"{show_time(high)}), {counted(steps.count, 'step')}{named}"
        )
    line = measured_line(findings)
    if line is not None:
        sizes = ", ".join(f"{size}: {show_time(took)}" for size, took in line.times.items())
        lines += comment(
            f"Medians by size of the batch: {sizes}. The line seconds + per_sample * batch misses "
            f"them by at most {100 * line.error:.0f} %."
        )
    lines += [
        f'seconds = "{show_time(compute.seconds)}"',
        *([] if line is None else [f'per_sample = "{show_time(compute.per_sample)}"']),
        f'distribution = "{compute.distribution}"',
        f"jitter = {compute.jitter:.4f}",
    ]
    others = [statistics.fmean(steps.other) for steps in findings.steps]
    lines += comment(
        f"Copying the parameters and applying the optimiser: means from {show_time(min(others))} "
        f"to {show_time(max(others))} among the workers."
    )
    lines.append(f'unoverlapped_seconds = "{show_time(compute.unoverlapped_seconds)}"')
    if compute.pause_probability > 0:
        lines += comment("Steps much longer than the others.")
        lines.append(f"pause_probability = {_plain(compute.pause_probability)}")
        lines.append(f'pause_seconds = "{show_time(compute.pause_seconds)}"')
    return lines


def _plain(share: float) -> str:
    return np.format_float_positional(share, precision=4, fractional=False, trim="-")


def _network(cluster: Cluster, findings: ProbeFindings) -> list[str]:
    wires, links = cluster.network, measured_as_network(findings)
    values = [
        f'bandwidth = "{show_rate(wires.bandwidth)}"', f'latency = "{show_time(wires.latency)}"',
    ]  # fmt: skip
    if not links:
        return [
            *comment("Not measured: there was one worker only. These are the defaults."), *values,
        ]  # fmt: skip
    near = "near hosts" if len(described_regions(findings)) > 1 else "hosts"
    where = f"between {near}" if between(findings) else "inside the host"
    lines = comment(
        f"Messages over {findings.transport} {where}, {len(links)} directions of pairs, alone:"
    )
    lines += [f"#   {line}" for line in _spreads(links)]
    lines += [*_crowds(findings), *values]
    if wires.memory_bandwidth > 0:
        if between(findings):
            lines += comment("Inside a host, alone:")
            lines += [f"#   {line}" for line in _spreads(inside(findings))]
        else:
            lines += comment(
                "Workers of one machine reach each other through memory: these bytes per second, "
                "those of a crowd if they are fewer; the simulator takes their latency as 1us."
            )
        lines.append(f'memory_bandwidth = "{show_rate(wires.memory_bandwidth)}"')
    return lines + _racks(wires)


def _racks(wires: Wires) -> list[str]:
    lines: list[str] = []
    if wires.rack_latency:
        lines.append(f'rack_latency = "{show_time(wires.rack_latency)}"')
    if wires.uplink:
        lines += comment("All hosts of a rack together, to those of the next.")
        lines.append(f'uplink = "{show_rate(wires.uplink)}"')
    return lines


def _sites(sites: Sites, findings: ProbeFindings) -> list[str]:
    """The groups of near hosts, and what lies between them."""
    groups = described_regions(findings)
    lines: list[str] = []
    for name, group in zip(sites.names, groups, strict=True):
        lines += comment(f"{name}: {', '.join(map(_name, group[:_MOST_LINES]))}.")
    lines.append(f"names = {json.dumps(list(sites.names))}")
    lines.append(f"machines = {list(sites.machines)}")
    lines += comment("From the row's site to the column's; 0 means: as the cards.")
    if found := list(flows_across(findings, groups)):
        whole = "; ".join(
            f"{show_rate(one.alone)} alone, {show_rate(one.together)} together for {one.flows}"
            for one in found
        )
        lines += comment(f"One flow, and one from each host at once: {whole}.")
    rates = [[show_rate(rate) if rate else 0 for rate in row] for row in sites.bandwidth]
    times = [[show_time(time) for time in row] for row in sites.latency]
    for what, matrix in (("bandwidth", rates), ("latency", times)):
        lines += [f"{what} = [", *(f"    {json.dumps(row)}," for row in matrix), "]"]
    if sites.shared:
        lines.append("shared = true")
    return lines


def _spreads(links: Sequence[MeasuredLink]) -> list[str]:
    rates = [link.bandwidth for link in links]
    delays = [link.latency for link in links]
    (slow, fast), (short, long) = spread(rates), spread(delays)
    return [
        f"bandwidth {show_rate(statistics.median(rates))} per second ({show_rate(slow)} to "
        f"{show_rate(fast)}), {counted(sum(link.messages for link in links), 'message')}",
        f"latency {show_time(statistics.median(delays))} ({show_time(short)} to "
        f"{show_time(long)}), {counted(sum(link.trips for link in links), 'round trip')}",
    ]


def _crowds(findings: ProbeFindings) -> list[str]:
    lines: list[str] = []
    if (crowd := crowd_of(findings, "inside")) is not None:
        rate = statistics.median(crowd.rates.values())
        lines.append(f"each to the next on its host: {show_rate(rate)} per second and sender")
    if (crowd := crowd_of(findings, "between")) is not None:
        rate = statistics.median(card_rates(findings, crowd.rates).values())
        lines.append(f"each to the next host: {show_rate(rate)} per second and card")
    if (crowd := crowd_of(findings, "to_one")) is not None:
        total = sum(crowd.rates.values())
        lines.append(
            f"{crowd.senders} senders to worker {crowd.target}: {show_rate(total)} per second "
            f"together, the least of them {show_rate(min(crowd.rates.values()))}"
        )
    return ["# At once:", *(f"#   {line}" for line in lines)] if lines else []
