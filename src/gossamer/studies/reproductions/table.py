"""What a published table is, and how it is computed again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gossamer.runs.statistics import interval
from gossamer.studies.lab.grid import Grid
from gossamer.studies.lab.results import GridResults
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained


@dataclass(frozen=True)
class PublishedCell:
    """One number of a table, as published and as we compute it."""

    row: str
    column: str
    published: float | None
    """None where the paper gives no number for the cell."""
    ours: float
    evidence: str = ""
    """How we know the published number: read in the paper, or quoted from memory of it."""
    half_width: float | None = None
    """Half the width of the 95 % interval of ours, where several seeds were run."""
    seeds: int = 1
    """How many seeds ours is the mean of."""

    @property
    def deviation(self) -> float | None:
        return None if self.published is None else self.ours / self.published - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "column": self.column,
            "published": self.published,
            "ours": self.ours,
            "deviation": self.deviation,
            "evidence": self.evidence,
            **({} if self.half_width is None else {"half_width": self.half_width}),
        }


Progress = Callable[[str], None]


@dataclass
class TrialBook:
    """What a table of many small trainings has computed, by label, as plain values."""

    seed: int
    progress: Progress
    kept: dict[str, Any] = field(default_factory=dict[str, Any])
    on_new: Callable[[str, Any], None] = lambda label, value: None
    """Told what was computed just now."""
    is_over: Callable[[], bool] = lambda: False
    """Whether nothing more may be begun."""

    def keep(self, label: str, compute: Callable[[], Any]) -> Any:
        """What is known by this label, or else is computed now."""
        if label not in self.kept:
            if self.is_over():
                raise TrialsStopped
            self.kept[label] = compute()
            self.on_new(label, self.kept[label])
        return self.kept[label]


class TrialsStopped(Exception):
    """The time is over, and a table of trials is not complete."""


@dataclass(frozen=True)
class Experiment:
    """A table of trainings: the laboratory trains its grid, in several pieces if need be."""

    task: str
    grid: Callable[[int, bool], Grid]
    """Makes the grid from a seed, or a quick part of it where the flag is set."""
    cells: Callable[[GridResults], list[PublishedCell]]
    """The cells that were trained to the end."""
    show: Callable[[PublishedCell], str]
    verdict: Callable[[list[PublishedCell]], str]
    """How far ours and the published cells agree."""
    picture: Callable[[Path, GridResults], None]


@dataclass(frozen=True)
class Trainings:
    """A table of simulated trainings, which may run side by side; each cell is done or is not."""

    problem: Problem
    epochs: float
    """The epochs of the paper, or our choice where the paper trains on other data."""
    quick_epochs: float
    make: Callable[[int, bool, float], list[CellTraining]]
    """Makes the trainings from a seed, a flag for a quick part, and the epochs, in order."""
    value: Callable[[Mapping[str, Any]], float]
    """The number of a cell, from the summary of its training."""
    show: Callable[[PublishedCell], str]
    verdict: Callable[[list[PublishedCell]], str]
    """How far ours and the published cells agree."""
    picture: Callable[[Path, Sequence[CellTraining], Mapping[str, Trained]], None]
    """Draws the trainings that are done, at least one, by label."""
    further: Callable[[CellTraining, Mapping[str, Trained]], list[PublishedCell]] | None = None
    """More cells from the history of one training, such as when it reached an accuracy; all that
    are trained are given by label, because an accuracy may be one of another training."""
    seeds: int = 1
    """How often each cell is trained in full."""


@dataclass(frozen=True)
class PublishedTable:
    """A table that `gossamer reproduce` computes: at once, as an experiment, or by trainings."""

    name: str
    title: str
    source: str
    unit: str
    settings: str
    """Every setting that matters, and our choices where the paper is silent."""
    cells: int
    compute: Callable[[int, Progress], list[PublishedCell]] | None = None
    """Computes the cells from a seed at once, and reports each of them."""
    trials: Callable[[TrialBook], list[PublishedCell]] | None = None
    """Instead of `compute`, for a table of many small trainings, which may be stopped and go on."""
    verdict: Callable[[list[PublishedCell]], str] | None = None
    """How far a table of `compute` or `trials` agrees, where a deviation does not say it."""
    experiment: Experiment | None = None
    """Instead of `compute`, for a table that takes long and needs data: one laboratory grid."""
    trainings: Trainings | None = None
    """Instead of both, for a table whose cells are simulated trainings, each on its own."""


def mean_cell(seeds: Sequence[PublishedCell]) -> PublishedCell:
    """One cell from those of several seeds: their mean and half the width of its 95 % interval;
    NaN unless every seed has a value."""
    first = seeds[0]
    if len(seeds) == 1:
        return first
    found = interval([cell.ours for cell in seeds])
    half_width = found.high - found.mean
    return replace(first, ours=found.mean, half_width=half_width, seeds=len(seeds))


def show_percent(cell: PublishedCell) -> str:
    """A cell in percent: ours, and beside it theirs where the paper has one."""
    within = "" if cell.half_width is None else f" ± {cell.half_width:.2f}"
    ours = "diverged" if math.isnan(cell.ours) else f"{cell.ours:.2f}{within}"
    return ours if cell.published is None else f"{ours} | {cell.published:.2f}"


def largest_deviation(cells: Sequence[PublishedCell]) -> list[str]:
    """One sentence on cells in percent, or none where nothing can be compared."""
    apart = [
        (cell.ours - cell.published, cell)
        for cell in cells
        if cell.published is not None and not math.isnan(cell.ours)
    ]
    if not apart:
        return []
    points, worst = max(apart, key=lambda pair: abs(pair[0]))
    where = f"{worst.row}, {worst.column}"
    return [f"largest deviation of {len(apart)} cells: {points:+.2f} points ({where})"]
