"""Methods against each other, each at its best rate of the grid: what console and page both say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from gossamer.runs.arrival import arrival, held_at_the_end, is_lower_better
from gossamer.runs.ranking import LEVEL, Ranking
from gossamer.runs.statistics import best_rate, beyond, final, interval, measure, show_number
from gossamer.runs.verdict import verdict

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
    """One method with its runs: those that chose its rate, and those that count, one a seed."""

    label: str
    results: dict[float, list[One]] = field(default_factory=dict[float, list[One]])
    tried: dict[float, list[One]] = field(default_factory=dict[float, list[One]])
    """By rate, on a seed that does not count; empty where nobody chose the rate so."""

    def histories(self, rate: float) -> list[Sequence[dict[str, Any]]]:
        return [result.history for result in self.results[rate]]

    @property
    def grid(self) -> dict[float, list[One]]:
        """What the rate is chosen from."""
        return self.tried or self.results

    def mean(self, rate: float, key: str) -> float | None:
        """Over the seeds; None unless all of them know the figure."""
        values = [result.summary.get(key) for result in self.results[rate]]
        known = [float(value) for value in values if isinstance(value, int | float)]
        return interval(known).mean if known and len(known) == len(values) else None


class Contest(Generic[One]):
    """What comes out of a grid of runs: the target, each method's rate, the ranking."""

    def __init__(
        self,
        entries: Mapping[str, Entry[One]],
        target: float | None = None,
        *,
        level: float = LEVEL,
        cut_short: str = "",
    ) -> None:
        """`cut_short` says why no winner may be named, where the runs did not come to their end."""
        self.entries = entries
        self._target = target
        self._level = level
        self._cut_short = cut_short

    @cached_property
    def key(self) -> str:
        """What the methods are judged by."""
        return measure([one.history for _, _, runs in self._grids() for one in runs])

    @cached_property
    def target(self) -> float:
        """Given, or near the best that any method ends with: 98 % of accuracy, 110 % of loss."""
        if self._target is not None:
            return self._target
        ends = [
            interval([held_at_the_end(one.history, self.key) for one in runs]).mean
            for _, _, runs in self._grids()
        ]
        finite = [end for end in ends if end == end]
        if is_lower_better(self.key):
            best = min(finite, default=0.0)
            return best + 0.1 * abs(best)
        if self.key != "accuracy" and finite:
            return max(finite) - 0.02 * abs(max(finite))
        # Where all diverged, what the untrained model scored must not count as reached.
        return int(98 * max(finite)) / 100 if finite else 1.0

    def _grids(self) -> list[tuple[str, float, list[One]]]:
        return [
            (entry.label, rate, runs)
            for entry in self.entries.values()
            for rate, runs in entry.grid.items()
        ]

    @cached_property
    def chosen(self) -> dict[str, float]:
        """The rate of the grid at which each method is shown."""
        return {label: self._choose(entry) for label, entry in self.entries.items()}

    def _choose(self, entry: Entry[One]) -> float:
        best = best_rate(
            {rate: [one.history for one in runs] for rate, runs in entry.grid.items()},
            self.target,
            self.key,
        )
        # A page whose target is another one than the runs had may not have them at its best rate.
        return best if best in entry.results else next(iter(entry.results))

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate, _ in self._grids()})

    def edges(self) -> list[str]:
        """Of methods whose best rate is the outermost tried: a better one may lie beyond it."""
        found: dict[float, list[str]] = {}
        for label, entry in self.entries.items():
            further = beyond(self.chosen[label], list(entry.grid))
            if further is not None:
                found.setdefault(further, []).append(label)
        return [
            f"the best rate of {', '.join(labels)} is at the edge of the grid, and a better one "
            f"may lie beyond it; put {further:g} into --lr"
            for further, labels in sorted(found.items())
        ]

    @cached_property
    def ranking(self) -> Ranking:
        """By the time to the target, each method at its best rate."""
        return Ranking(
            [
                arrival(label, entry.histories(rate), self.target, self.key, seeds_of(runs))
                for label, entry in self.entries.items()
                for rate in [self.chosen[label]]
                for runs in [entry.results[rate]]
            ],
            self._level,
        )

    def verdict(self) -> str:
        ends = {
            label: _ends(self.entries[label].results[rate], self.key)
            for label, rate in self.chosen.items()
        }
        return verdict(self.ranking, self.target, self.key, ends, self._cut_short)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method at its best rate, the fastest to the target first."""
        rows: list[dict[str, Any]] = []
        for place in self.ranking.places:
            label, span = place.label, place.span
            rate, entry = self.chosen[label], self.entries[label]
            row: dict[str, Any] = {
                "method": label,
                "learning_rate": rate,
                "seconds_to_target": None if span is None else span.mean,
                "low": None if span is None else span.low,
                "high": None if span is None else span.high,
                "times_the_first": place.times,
                "may_be_first": place.is_close,
                "seconds_of_seeds": list(place.arrival.seconds),
            }
            figures = dict.fromkeys((*_FIGURES, str(self.key)))
            rows.append(row | {name: entry.mean(rate, name) for name in figures})
        return rows

    def tried(self, label: str, rate: float) -> tuple[float | None, float]:
        """What a rate of the grid came to: the time to the target, and the score at the end."""
        runs = self.entries[label].grid[rate]
        found = arrival(label, [one.history for one in runs], self.target, self.key)
        return found.mean, _ends(runs, self.key)

    def show_tried(self, label: str, rate: float) -> str:
        """In a few letters: the time, or where it ended that never arrived."""
        seconds, end = self.tried(label, rate)
        if seconds is not None:
            return f"{show_number(seconds)} s"
        if end != end:
            return "diverged"
        return f"({100 * end:.1f} %)" if self.key == "accuracy" else f"({end:.4g})"

    def grid(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By method and rate: when the target was reached, and the score at the end."""
        found: dict[str, dict[str, dict[str, float | None]]] = {}
        for label, rate, _ in self._grids():
            seconds, end = self.tried(label, rate)
            found.setdefault(label, {})[f"{rate:g}"] = {
                "seconds_to_target": seconds,
                self.key: end,
            }
        return found


def _ends(runs: Sequence[Finished], key: str) -> float:
    """The mean score at the end; not-a-number if one run has none."""
    return interval([final(one.history, key) for one in runs]).mean


def seeds_of(runs: Sequence[Finished]) -> list[object]:
    """The seed of each run, and which one of it where it was repeated on a real machine."""
    seen: dict[object, int] = {}
    found: list[object] = []
    for at, run in enumerate(runs):
        known = getattr(run, "seed", None)
        seed = ("unknown", at) if known is None else known
        seen[seed] = seen.get(seed, 0) + 1
        found.append((seed, seen[seed]))
    return found
