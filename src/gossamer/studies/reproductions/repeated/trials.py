"""Trainings with three seeds each, at the learning rate that is best on a seed of its own.

A table of such trainings is a function of a `TrialBook`, which knows those that are done. So it can
be stopped between two of them and go on later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.sim.simulation import Simulation
from gossamer.studies.reproductions.table import PublishedCell, TrialBook, mean_cell
from gossamer.studies.reproductions.trainings import Trained, brief, error_of
from gossamer.tasks import make_task

SEEDS = 3
ABSENT = "no figure at hand"

Measure = Callable[[Trained], float]
"""A number of a run, of which less is better; NaN or infinite where the run did not get there."""

_KEPT = ("accuracy", "loss", "mean_staleness", "virtual_seconds", "bytes_per_step", "digest")

# All trials of a table share their task.
_task = lru_cache(maxsize=4)(make_task)


@dataclass(frozen=True)
class Trial:
    """A training but for its learning rate and its seed."""

    task: str
    method: str
    cluster: Cluster
    choices: Mapping[str, Any]
    """Further fields of `Settings`: epochs, batch, optimiser, ..."""

    def run(self, book: TrialBook, rate: float, seed: int) -> Trained:
        label = f"{self.task}, {self.method}, {self.cluster.workers}, {dict(self.choices)}"
        label += f", rate {rate!r}, seed {seed}"
        return Trained.from_dict(book.keep(label, lambda: self._run(label, rate, seed).as_dict()))

    def _run(self, label: str, rate: float, seed: int) -> Trained:
        settings = make_settings(
            _task(self.task), self.method, self.cluster, seed=seed, learning_rate=rate,
            **self.choices,
        )  # fmt: skip
        result = Simulation(settings).run()
        summary = {key: result.summary[key] for key in _KEPT}
        return Trained(label, summary, [brief(row) for row in result.history])


@dataclass(frozen=True)
class Repeated:
    """The runs of one trial at one rate, seed by seed."""

    rate: float
    runs: Sequence[Trained]

    def values(self, measure: Measure) -> list[float]:
        return [measure(run) for run in self.runs]

    def cell(
        self, row: str, column: str, measure: Measure, published: float | None = None,
        evidence: str = ABSENT,
    ) -> PublishedCell:  # fmt: skip
        """The mean of a measure with its interval; NaN unless every seed has a value."""
        return repeated_cell(row, column, self.values(measure), published, evidence)


def repeated_cell(
    row: str, column: str, values: Sequence[float], published: float | None = None,
    evidence: str = ABSENT,
) -> PublishedCell:  # fmt: skip
    """One value a seed as a cell: their mean and half the width of its 95 % interval."""
    return mean_cell([PublishedCell(row, column, published, one, evidence) for one in values])


def at_rate(trial: Trial, rate: float, book: TrialBook) -> Repeated:
    """The trial with all seeds at a given rate."""
    seeds = range(book.seed, book.seed + SEEDS)
    return Repeated(rate, [trial.run(book, rate, seed) for seed in seeds])


def tuned(trial: Trial, rates: Sequence[float], book: TrialBook, measure: Measure) -> Repeated:
    """The trial with all seeds, at the rate that is best by a measure on one seed more."""
    found = {rate: measure(trial.run(book, rate, book.seed + SEEDS)) for rate in rates}
    best = min(rates, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)
    return at_rate(trial, best, book)


def error(run: Trained) -> float:
    """The share of the test set that the output model gets wrong, in %; NaN where it diverged."""
    return error_of(run.summary)


def loss_of_test(run: Trained) -> float:
    """The loss on the test set; NaN where the model diverged."""
    loss = run.summary["loss"]
    return math.nan if loss is None else loss


def staleness(run: Trained) -> float:
    """The mean number of updates that a gradient has missed; 0 where there is no such thing."""
    return run.summary["mean_staleness"] or 0.0


def reached(target: float, along: str, score: str = "accuracy") -> Measure:
    """Where along a run, in `epochs` or `virtual_seconds`, it first meets a target: an accuracy
    from below or a loss from above; NaN where it does not. Between two evaluations the curve is a
    straight line."""
    sign = -1.0 if score == "loss" else 1.0

    def measure(run: Trained) -> float:
        before: tuple[float, float] | None = None
        for row in run.history:
            if row[score] is None:
                continue
            at, value = row[along], sign * row[score]
            # Scores are 32-bit numbers, which may be rounded down.
            if value >= sign * target - 1e-6:
                if before is None or not value > before[1]:
                    return at
                part = (sign * target - before[1]) / (value - before[1])
                return before[0] + max(0.0, part) * (at - before[0])
            before = at, value
        return math.nan

    return measure
