"""Where one method overtakes another over the workers, the bandwidth, the model or the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from types import MappingProxyType
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.plan.cost.case import NoClosedForm
from gossamer.plan.cost.step_time import predict
from gossamer.plan.cost.workload import Workload
from gossamer.quantities import counted

TIE = 1e-3
"""Methods whose speeds differ by less than this share count as equal."""
SIMULATED_TIE = 0.02
"""The same share if one of the speeds was simulated, as it then contains some noise."""

Known = Mapping[tuple[str, int], float]
"""Simulated samples per second, by method and number of workers."""
_NOTHING: Known = MappingProxyType({})
Speed = Callable[[str, float], float | None]
"""Samples per second of a method at a value of the axis; None without a closed form."""


@dataclass(frozen=True)
class Crossing:
    """From `value` on (for workers: the first such number), `faster` is faster than `slower`."""

    axis: str
    value: float
    faster: str
    slower: str

    def __str__(self) -> str:
        # The number of workers is an integer, so from 23 on means above 22.
        least = self.value - 1 if self.axis == "workers" else self.value
        return f"above {show_value(self.axis, least)} {self.faster} overtakes {self.slower}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


AXES = ("workers", "bandwidth", "model_bytes", "batch")


def show_value(axis: str, value: float) -> str:
    """A value of an axis with its unit."""
    if axis == "workers":
        return counted(round(value), "worker")
    if axis == "bandwidth":
        bits = 8 * value
        unit, size = ("Gbit/s", 1e9) if bits >= 1e9 else ("Mbit/s", 1e6)
        return f"{bits / size:.3g} {unit}"
    if axis == "batch":
        return f"a batch of {value:.0f}"
    unit, size = ("GB", 1e9) if value >= 1e9 else ("MB", 1e6) if value >= 1e6 else ("kB", 1e3)
    return f"a model of {value / size:.3g} {unit}"


def speeds_over(axis: str, cluster: Cluster, workload: Workload, known: Known = _NOTHING) -> Speed:
    """The speed of a method as a function of one axis, with everything else as given.

    Over the number of workers, simulated speeds stand in where there is no closed form.
    """
    if axis not in AXES:
        raise unknown_name("axis", axis, AXES)

    def speed(method: str, value: float) -> float | None:
        where, what = cluster, workload
        if axis == "workers" and (method, round(value)) in known:
            return known[method, round(value)]
        if axis == "workers":
            where = cluster.changed(workers=round(value))
        elif axis == "bandwidth":
            wires = dataclasses.replace(cluster.network, bandwidth=value)
            where = dataclasses.replace(cluster, network=wires)
        elif axis == "batch":
            what = dataclasses.replace(workload, batch=max(1, round(value)))
        else:
            what = workload.scaled(value)
        try:
            return predict(method, where, what).samples_per_second
        except NoClosedForm:
            return None
        except ConfigurationError:
            if axis != "workers":
                raise
            return None  # such as an odd number of workers on a graph that needs an even one

    return speed


def crossings(
    axis: str,
    methods: Sequence[str],
    values: Sequence[float],
    cluster: Cluster,
    workload: Workload,
    known: Known = _NOTHING,
) -> list[Crossing]:
    """All crossings between the first and the last value, in order.

    Neighbouring values are compared, so two crossings of one pair between two neighbours are not
    found; more values find them.
    """
    speed = speeds_over(axis, cluster, workload, known)

    def tie(pair: Sequence[str], value: float) -> float:
        return _tie(known, pair, value)

    found = order_changes(axis, list(dict.fromkeys(methods)), sorted(set(values)), speed, tie)
    return sorted(found, key=lambda crossing: (crossing.value, crossing.faster, crossing.slower))


def order_changes(
    axis: str,
    methods: Sequence[str],
    grid: Sequence[float],
    speed: Speed,
    tie: Callable[[Sequence[str], float], float],
) -> list[Crossing]:
    """The same for speeds from anywhere, pair by pair."""
    found: list[Crossing] = []
    for first, second in combinations(methods, 2):
        orders: list[tuple[float, int]] = []
        for value in grid:
            order = _order(speed, first, second, value, tie([first, second], value))
            # Ties are skipped: a method overtakes if it was slower and is then faster.
            if order:
                orders.append((value, order))
        for (low, before), (high, after) in pairwise(orders):
            if before != after:
                # Simulated speeds are known at the given numbers of workers only.
                at = _between(axis, speed, first, second, (low, before), high)
                faster, slower = (first, second) if after > 0 else (second, first)
                found.append(Crossing(axis, at, faster, slower))
    return found


def _tie(known: Known, methods: Sequence[str], value: float) -> float:
    is_simulated = any((method, round(value)) in known for method in methods)
    return SIMULATED_TIE if is_simulated else TIE


def _order(speed: Speed, first: str, second: str, value: float, tie: float = TIE) -> int:
    """1 if the first is faster, -1 if the second is, 0 for a tie or without a closed form."""
    one, other = speed(first, value), speed(second, value)
    if one is None or other is None or abs(one - other) <= tie * max(one, other):
        return 0
    return 1 if one > other else -1


def _between(
    axis: str, speed: Speed, first: str, second: str, start: tuple[float, int], high: float
) -> float:
    """The least value at which the order differs from that at the start."""
    low, before = start
    if axis == "workers":
        # Some numbers of workers have no closed form, so the first with the new order counts.
        for count in range(round(low) + 1, round(high)):
            if _order(speed, first, second, count) == -before:
                return count
        return high
    for _ in range(60):
        middle = math.sqrt(low * high)
        if _order(speed, first, second, middle) == before:
            low = middle
        else:
            high = middle
    return high


def fastest(
    axis: str,
    methods: Sequence[str],
    values: Sequence[float],
    cluster: Cluster,
    workload: Workload,
    known: Known = _NOTHING,
) -> dict[float, list[str]]:
    """The fastest methods at each value; several if they tie, none without any closed form."""
    speed = speeds_over(axis, cluster, workload, known)
    best: dict[float, list[str]] = {}
    for value in values:
        speeds = {method: found for method in methods if (found := speed(method, value))}
        top = max(speeds.values(), default=0.0)
        tie = _tie(known, methods, value) if axis == "workers" else TIE
        best[value] = [method for method, own in speeds.items() if own >= top * (1 - tie)]
    return best
