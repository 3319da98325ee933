"""What methods spend until they reach the target, and which of them nobody beats in time and money.

A run's rows tell what it has spent so far, where its cluster has prices. Between two evaluations
spending is a straight line, as time is in the rule for reaching a target. Means are those of times:
geometric, and only where every seed arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gossamer.config.price import SPENDINGS
from gossamer.runs.arrival import Arrival, History, seconds_to
from gossamer.runs.ranking import RankedMethod
from gossamer.runs.statistics import mean_of, show_number

FRONT = "* marks those that no other beats in both time and money."
_KILO = 1e3
_KILOWATT_HOUR = 3.6e6


@dataclass(frozen=True)
class Expense:
    """What one method spends, as means over its seeds; None where that is not known."""

    label: str
    seconds: float | None
    """The time to the target."""
    to_target: Mapping[str, float | None]
    """Dollars and joules until then; only what the cluster has prices for."""
    in_all: Mapping[str, float | None]
    """The same until the end of the run."""

    @property
    def dollars(self) -> float | None:
        return self.to_target.get("dollars")

    def row(self, front: Sequence[str]) -> dict[str, float | bool | None]:
        """The entries that a row of a ranking has more where the cluster has prices."""
        told = {f"{what}_to_target": spent for what, spent in self.to_target.items()}
        return told | ({"on_front": self.label in front} if "dollars" in self.to_target else {})


def spent_to(history: History, target: float, key: str, what: str) -> float | None:
    """What a run has spent when it reaches the target; None if it does not, or does not tell."""
    seconds = seconds_to(history, target, key)
    known = [
        (float(row["virtual_seconds"]), float(row[what]))
        for row in history
        if row.get(what) is not None
    ]
    if seconds is None or not known:
        return None
    times, spent = zip(*sorted(known), strict=True)
    return float(np.interp(seconds, times, spent))


def expense(
    place: RankedMethod, histories: Sequence[History], target: float, key: str
) -> Expense | None:
    """What a method of a ranking spends; None where its runs tell nothing about it."""
    ends = [history[-1] for history in histories if history]
    told = [what for what in SPENDINGS if ends and all(end.get(what) is not None for end in ends)]
    if not told:
        return None
    spent = {what: tuple(spent_to(h, target, key, what) for h in histories) for what in told}
    return Expense(
        place.label,
        place.bounds[0],
        {what: Arrival(place.label, values).mean for what, values in spent.items()},
        {what: mean_of([end[what] for end in ends]) for what in told},
    )


def expenses(
    places: Sequence[RankedMethod],
    histories: Mapping[str, Sequence[History]],
    target: float,
    key: str,
) -> list[Expense]:
    """What all methods spend, in the order of their ranking; empty where some runs tell nothing."""
    found = [expense(place, histories[place.label], target, key) for place in places]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else []


def pareto_front(found: Sequence[Expense]) -> list[str]:
    """The methods that no other beats, the fastest first: none is at most as slow and at most as
    dear as they are, and better in one of both."""
    points = [
        (one.seconds, one.dollars, one.label)
        for one in found
        if one.seconds is not None and one.dollars is not None
    ]
    return [
        label
        for seconds, dollars, label in sorted(points)
        if not any(
            other <= seconds and cost <= dollars and (other, cost) != (seconds, dollars)
            for other, cost, _ in points
        )
    ]


def economy(found: Sequence[Expense]) -> str:
    """One sentence about who is the cheapest, and at what loss of time; empty without prices."""
    front = {label: place for place, label in enumerate(pareto_front(found))}
    if not front:
        return ""
    known = {one.label: one for one in found}
    fastest, cheapest = (known[list(front)[end]] for end in (0, -1))
    if fastest.seconds is None or cheapest.seconds is None:
        return ""
    assert fastest.dollars is not None
    assert cheapest.dollars is not None
    if cheapest is fastest or cheapest.dollars == fastest.dollars:
        return f"{fastest.label} is also the cheapest, at {show_dollars(fastest.dollars)}."
    share = 100 * cheapest.dollars / fastest.dollars
    times = cheapest.seconds / fastest.seconds if fastest.seconds else 0.0
    late = f"{times:.3g} times as long" if times else "longer"
    return (
        f"{cheapest.label} is the cheapest: it reaches the target for "
        f"{show_dollars(cheapest.dollars)}, {share:.0f} % of what {fastest.label}, the fastest, "
        f"costs ({show_dollars(fastest.dollars)}), and takes {late}; these are means, and chance "
        "may decide between methods that are close."
    )


def show_dollars(value: float | None) -> str:
    return "-" if value is None else f"${show_number(value)}"


def show_joules(value: float | None) -> str:
    """In J, kJ or kWh."""
    if value is None:
        return "-"
    if value >= _KILOWATT_HOUR / 10:
        return f"{show_number(value / _KILOWATT_HOUR)} kWh"
    return f"{show_number(value / _KILO)} kJ" if value >= _KILO else f"{show_number(value)} J"


SHOWN = {"dollars": show_dollars, "joules": show_joules}
"""How each spending is written."""
HEADINGS = {"dollars": "cost", "joules": "energy"}
