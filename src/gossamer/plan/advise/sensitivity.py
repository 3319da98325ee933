"""What would change the answer: the contenders run again on clusters that differ in one thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.config.cluster import Cluster
from gossamer.config.faults import Fault
from gossamer.quantities import counted
from gossamer.runs.arrival import Arrival
from gossamer.runs.statistics import show_number

_SLOWER = 4.0
_WIDER = 10.0
RULE = (
    "Two seeds make no useful interval: here one method is called quicker than another where all "
    "of its times are below all of the other's."
)


@dataclass(frozen=True)
class ChangedCluster:
    """A cluster that differs from the given one in one thing."""

    what: str
    """What was changed: bandwidth, slow workers or workers."""
    title: str
    cluster: Cluster


def scenes(cluster: Cluster) -> list[ChangedCluster]:
    """Less and more bandwidth, other stragglers, fewer and more workers; none for one worker."""
    if cluster.workers == 1:
        return []
    found = [
        ChangedCluster(
            "bandwidth",
            f"a tenth of the bandwidth ({_bits(cluster.network.egress / _WIDER)})",
            cluster.with_bandwidth_times(1 / _WIDER),
        ),
        ChangedCluster(
            "bandwidth",
            f"ten times the bandwidth ({_bits(cluster.network.egress * _WIDER)})",
            cluster.with_bandwidth_times(_WIDER),
        ),
    ]
    slow = [fault for fault in cluster.faults if fault.kind in ("slow", "slow-link")]
    if slow:
        healed = tuple(fault for fault in cluster.faults if fault not in slow)
        named = "every worker equally fast"
        found.append(
            ChangedCluster("slow workers", named, dataclasses.replace(cluster, faults=healed))
        )
    else:
        lame = Fault("slow", worker=0, amount=_SLOWER)
        title = f"worker 0 {_SLOWER:g} times slower"
        found.append(ChangedCluster("slow workers", title, cluster.changed(faults=[lame])))
    for workers in (cluster.workers // 2, 2 * cluster.workers):
        if workers >= 2:
            found.append(
                ChangedCluster("workers", f"{workers} workers", with_workers(cluster, workers))
            )
    return found


def with_workers(cluster: Cluster, workers: int) -> Cluster:
    """The cluster with another number of workers, without the faults of those that are gone."""
    kept = tuple(
        fault for fault in cluster.faults
        if fault.worker < workers and all(r < workers for side in fault.sides for r in side)
    )  # fmt: skip
    price = cluster.price.for_workers(workers)
    return dataclasses.replace(cluster, workers=workers, faults=kept, price=price)


def _bits(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:g} {unit}"
    return f"{bits / 1e3:g} kbit/s"


@dataclass(frozen=True)
class SceneOutcome:
    """What the contenders did on one changed cluster."""

    scene: ChangedCluster
    arrivals: Mapping[str, Arrival]
    """By method, in the order of the ranking on the unchanged cluster."""
    failures: Mapping[str, str]

    def leader(self) -> str | None:
        """The fastest of the methods that arrive with every seed; None if no method does."""
        there = {method: one.mean for method, one in self.arrivals.items() if one.mean is not None}
        return min(there, key=lambda method: there[method]) if there else None


def sentence(outcome: SceneOutcome, winner: str, goal: str) -> str:
    """What this change does to the answer, with the times."""
    leader = outcome.leader()
    title = f"with {outcome.scene.title}"
    if leader is None:
        return f"{title}: none of the contenders reaches {goal} with every seed"
    others = [one for one in outcome.arrivals if one != leader]
    second = min(others, key=lambda method: _order(outcome, method)) if others else leader
    rival = winner if leader != winner and winner in outcome.arrivals else second
    best = _seconds(outcome, leader)
    if rival != leader and _overlap(outcome, leader, rival):
        times = f"{leader} ({best}) and {rival} ({_seconds(outcome, rival)})"
        return f"{title}: too close to call between {times}"
    if leader != winner:
        lost = outcome.failures.get(winner) or f"{winner} needs {_seconds(outcome, winner)}"
        return f"{title}: choose {leader} ({best}; {lost})"
    following = f"; next {second}, {_seconds(outcome, second)}" if others else ""
    return f"{title}: still {winner} ({best}{following})"


def thresholds(outcomes: Sequence[SceneOutcome], workers: int, winner: str) -> list[str]:
    """The number of workers from which on another method is the better choice."""
    said: list[str] = []
    for outcome in outcomes:
        if outcome.scene.what != "workers":
            continue
        leader, count = outcome.leader(), outcome.scene.cluster.workers
        if leader in (None, winner) or _overlap(outcome, leader or "", winner):
            continue
        side = f"above {workers}" if count > workers else f"below {workers}"
        said.append(f"{side} workers choose {leader} (measured with {count})")
    return said


def _order(outcome: SceneOutcome, method: str) -> float:
    mean = outcome.arrivals[method].mean
    return float("inf") if mean is None else mean


def _seconds(outcome: SceneOutcome, method: str) -> str:
    one = outcome.arrivals.get(method)
    if one is None:
        return "no time, it cannot run"
    if one.mean is None:
        return f"longer: {one.reached} of {counted(len(one.seconds), 'seed')} arrive"
    return f"{show_number(one.mean)} s"


def _overlap(outcome: SceneOutcome, one: str, other: str) -> bool:
    """Whether one method cannot be called quicker than the other by RULE."""
    first, second = outcome.arrivals.get(one), outcome.arrivals.get(other)
    if first is None or second is None or first.mean is None or second.mean is None:
        return False
    mine = [value for value in first.seconds if value is not None]
    theirs = [value for value in second.seconds if value is not None]
    return max(mine) >= min(theirs)
