"""A comparison of methods, each at its best learning rate: the source for console and page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from gossamer.runs.arrival import arrival, held_at_the_end, is_lower_better
from gossamer.runs.expense import Expense, economy, expenses, pareto_front
from gossamer.runs.ranking import LEVEL, Ranking
from gossamer.runs.statistics import (
    best_rate,
    beyond,
    final_mean,
    interval,
    mean_of,
    measure,
    show_number,
)
from gossamer.runs.verdict import verdict

_FIGURES = (
    "loss", "accuracy", "virtual_seconds", "wall_seconds", "waiting_fraction", "mean_staleness",
    "mean_global_staleness", "bytes_per_step", "consensus_distance", "exchanges_per_step",
    "noise_scale",
    "compression_ratio", "coding_seconds_per_step", "residual_norm", "displacement_cosine",
    "bubble_fraction",
)  # fmt: skip


class Finished(Protocol):
    """The part of a run that a contest reads, whether it was just made or read from its folder."""

    @property
    def summary(self) -> Mapping[str, Any]: ...

    @property
    def history(self) -> Sequence[dict[str, Any]]: ...


One = TypeVar("One", bound=Finished)


@dataclass
class Entry(Generic[One]):
    """One method with its runs: those that chose its rate, and those that are ranked."""

    label: str
    results: dict[float, list[One]] = field(default_factory=dict[float, list[One]])
    tried: dict[float, list[One]] = field(default_factory=dict[float, list[One]])
    """The runs by rate on a seed that is not ranked; empty if the rate was not chosen that way."""

    @property
    def grid(self) -> dict[float, list[One]]:
        """The runs from which the rate is chosen."""
        return self.tried or self.results


class Contest(Generic[One]):
    """The results of a grid of runs: the target, each method's rate, the ranking."""

    def __init__(
        self,
        entries: Mapping[str, Entry[One]],
        target: float | None = None,
        *,
        level: float = LEVEL,
        cut_short: str = "",
    ) -> None:
        """`cut_short` says why no winner may be named, if the runs did not finish."""
        self.entries = entries
        self._target = target
        self._level = level
        self._cut_short = cut_short

    @cached_property
    def key(self) -> str:
        """The score by which the methods are judged."""
        return measure([history for _, _, runs in self._grids() for history in _histories(runs)])

    @cached_property
    def target(self) -> float:
        """The given target, or 98 % of the best accuracy (110 % of the best loss) at the end."""
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
        # If every run diverged, the score of the untrained model must not reach the target.
        return int(98 * max(finite)) / 100 if finite else 1.0

    def _grids(self) -> list[tuple[str, float, list[One]]]:
        return [
            (entry.label, rate, runs)
            for entry in self.entries.values()
            for rate, runs in entry.grid.items()
        ]

    @cached_property
    def chosen(self) -> dict[str, float]:
        """The learning rate at which each method is shown."""
        return {label: self._choose(entry) for label, entry in self.entries.items()}

    def _choose(self, entry: Entry[One]) -> float:
        best = best_rate(
            {rate: _histories(runs) for rate, runs in entry.grid.items()}, self.target, self.key
        )
        # With a target other than that of the runs, the best rate may have no ranked runs.
        return best if best in entry.results else next(iter(entry.results))

    @cached_property
    def shown(self) -> dict[str, list[One]]:
        """The ranked runs of each method at its rate."""
        return {label: entry.results[self.chosen[label]] for label, entry in self.entries.items()}

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate, _ in self._grids()})

    def edges(self) -> list[str]:
        """A sentence for the methods whose best rate is the smallest or the largest of the grid."""
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
        """The ranking by time to the target, each method at its best rate."""
        return Ranking(
            [
                arrival(label, _histories(runs), self.target, self.key, _seeds_of(runs))
                for label, runs in self.shown.items()
            ],
            self._level,
        )

    def verdict(self) -> str:
        ends = {label: final_mean(_histories(runs), self.key) for label, runs in self.shown.items()}
        return verdict(self.ranking, self.target, self.key, ends, self._cut_short)

    @cached_property
    def expenses(self) -> list[Expense]:
        """What each method spends, the fastest first; empty where the cluster has no prices."""
        histories = {label: _histories(runs) for label, runs in self.shown.items()}
        return expenses(self.ranking.places, histories, self.target, self.key)

    def economy(self) -> str:
        """Who is the cheapest, in one sentence; empty where the cluster has no prices."""
        return economy(self.expenses)

    def rows(self) -> list[dict[str, Any]]:
        """One row per method at its best rate, the fastest to the target first."""
        rows: list[dict[str, Any]] = []
        spent = {one.label: one for one in self.expenses}
        front = pareto_front(self.expenses)
        for place in self.ranking.places:
            mean, low, high = place.bounds
            runs = self.shown[place.label]
            row: dict[str, Any] = {
                "method": place.label,
                "learning_rate": self.chosen[place.label],
                "seconds_to_target": mean,
                "low": low,
                "high": high,
                "times_the_first": place.times,
                "may_be_first": place.is_close,
                "seconds_of_seeds": list(place.arrival.seconds),
            }
            names = dict.fromkeys((*_FIGURES, str(self.key)))
            row |= {name: mean_of([run.summary.get(name) for run in runs]) for name in names}
            if spent:
                row |= spent[place.label].row(front) | dict(spent[place.label].in_all)
            rows.append(row)
        return rows

    def tried(self, label: str, rate: float) -> tuple[float | None, float]:
        """The time to the target at a rate of the grid, and the score at the end."""
        histories = _histories(self.entries[label].grid[rate])
        found = arrival(label, histories, self.target, self.key)
        return found.mean, final_mean(histories, self.key)

    def show_tried(self, label: str, rate: float) -> str:
        """`tried` as a short text: the time, or the score at the end if the target was missed."""
        seconds, end = self.tried(label, rate)
        if seconds is not None:
            return f"{show_number(seconds)} s"
        if end != end:
            return "diverged"
        return f"({100 * end:.1f} %)" if self.key == "accuracy" else f"({end:.4g})"

    def grid(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """When the target was reached and the score at the end, by method and rate."""
        found: dict[str, dict[str, dict[str, float | None]]] = {}
        for label, rate, _ in self._grids():
            seconds, end = self.tried(label, rate)
            found.setdefault(label, {})[f"{rate:g}"] = {
                "seconds_to_target": seconds,
                self.key: end,
            }
        return found


def _histories(runs: Sequence[Finished]) -> list[Sequence[dict[str, Any]]]:
    return [run.history for run in runs]


def _seeds_of(runs: Sequence[Finished]) -> list[object]:
    """The seed of each run, numbered where a real run was repeated with the same seed."""
    seen: dict[object, int] = {}
    found: list[object] = []
    for at, run in enumerate(runs):
        known = getattr(run, "seed", None)
        seed = ("unknown", at) if known is None else known
        seen[seed] = seen.get(seed, 0) + 1
        found.append((seed, seen[seed]))
    return found
