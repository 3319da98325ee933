"""Methods against each other, each at its best rate of the grid: what console and page both say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from gossamer.report.statistics import (
    Arrival,
    arrival,
    best_of,
    final,
    interval,
    is_lower_better,
    measure,
    verdict,
)

_FIGURES = (
    "loss", "accuracy", "virtual_seconds", "wall_seconds", "waiting_fraction", "mean_staleness",
    "mean_global_staleness", "bytes_per_step", "consensus_distance", "exchanges_per_step",
)  # fmt: skip


class Finished(Protocol):
    """A run as far as a contest looks at it: just made, or read from its folder."""

    @property
    def summary(self) -> Mapping[str, Any]: ...

    @property
    def history(self) -> Sequence[dict[str, Any]]: ...


One = TypeVar("One", bound=Finished)


@dataclass
class Entry(Generic[One]):
    """One method with the runs of all rates, one a seed."""

    label: str
    results: dict[float, list[One]] = field(default_factory=dict[float, list[One]])

    def histories(self, rate: float) -> list[Sequence[dict[str, Any]]]:
        return [result.history for result in self.results[rate]]

    def mean(self, rate: float, key: str) -> float | None:
        """Over the seeds; None unless all of them know the figure."""
        values = [result.summary.get(key) for result in self.results[rate]]
        known = [float(value) for value in values if isinstance(value, int | float)]
        return interval(known).mean if known and len(known) == len(values) else None


class Contest(Generic[One]):
    """What comes out of a grid of runs: the target, each method's rate, the ranking."""

    def __init__(self, entries: Mapping[str, Entry[One]], target: float | None = None) -> None:
        self.entries = entries
        self._target = target

    @cached_property
    def key(self) -> str:
        """What the methods are judged by."""
        entries = self.entries.values()
        return measure([h for e in entries for rate in e.results for h in e.histories(rate)])

    @cached_property
    def target(self) -> float:
        """Given, or near the best that any method ends with: 98 % of accuracy, 110 % of loss."""
        if self._target is not None:
            return self._target
        ends = [self.score(e.label, rate) for e in self.entries.values() for rate in e.results]
        finite = [end for end in ends if end == end]
        if is_lower_better(self.key):
            return 1.1 * min(finite, default=0.0)
        # Where all diverged, what the untrained model scored must not count as reached.
        return int(98 * max(finite)) / 100 if finite else 1.0

    @cached_property
    def chosen(self) -> dict[str, float]:
        """The rate of the grid at which each method is shown."""
        return {
            label: best_of(
                {rate: entry.histories(rate) for rate in entry.results}, self.target, self.key
            )
            for label, entry in self.entries.items()
        }

    @property
    def rates(self) -> list[float]:
        return sorted({rate for entry in self.entries.values() for rate in entry.results})

    def score(self, label: str, rate: float) -> float:
        """At the end of the runs at this rate; not-a-number if one of them has none."""
        return interval([final(h, self.key) for h in self.entries[label].histories(rate)]).mean

    def arrival(self, label: str) -> Arrival:
        """When the method reaches the target, at its best rate."""
        histories = self.entries[label].histories(self.chosen[label])
        return arrival(label, histories, self.target, self.key)

    def verdict(self) -> str:
        best = {label: self.entries[label].histories(rate) for label, rate in self.chosen.items()}
        return verdict(best, self.target, self.key)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method at its best rate, the fastest to the target first."""
        rows: list[dict[str, Any]] = []
        for label, rate in self.chosen.items():
            entry = self.entries[label]
            reached = self.arrival(label).interval
            row: dict[str, Any] = {"method": label, "learning_rate": rate}
            row["seconds_to_target"] = None if reached is None else reached.mean
            row["low"] = None if reached is None else reached.low
            row["high"] = None if reached is None else reached.high
            rows.append(row | {name: entry.mean(rate, name) for name in _FIGURES})

        def order(row: dict[str, Any]) -> float:
            seconds: float | None = row["seconds_to_target"]
            return math.inf if seconds is None else seconds

        return sorted(rows, key=order)

    def grid(self) -> dict[str, dict[str, list[float]]]:
        """The score at the end of every run, by method and rate."""
        return {
            label: {
                f"{rate:g}": [final(h, self.key) for h in entry.histories(rate)]
                for rate in entry.results
            }
            for label, entry in self.entries.items()
        }
