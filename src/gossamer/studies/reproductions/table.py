"""What a published table is, and what a reproduction of it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.studies.lab.grid import Grid
from gossamer.studies.lab.results import GridResults
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained


@dataclass(frozen=True)
class PublishedCell:
    """One number of a table, theirs and ours."""

    row: str
    column: str
    published: float | None
    """None where the paper gives no number for the cell."""
    ours: float
    evidence: str = ""
    """How we know the published number: read in the paper, or quoted from memory of it."""

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
        }


Progress = Callable[[str], None]


@dataclass(frozen=True)
class Experiment:
    """A table of trainings: the laboratory trains its grid, in several pieces if need be."""

    task: str
    grid: Callable[[int, bool], Grid]
    """From a seed; True: a quick part of it."""
    cells: Callable[[GridResults], list[PublishedCell]]
    """Those that were trained to the end."""
    show: Callable[[PublishedCell], str]
    verdict: Callable[[list[PublishedCell]], str]
    """How far ours and the published cells agree."""
    picture: Callable[[Path, GridResults], None]


@dataclass(frozen=True)
class Trainings:
    """A table of simulated trainings, which may run side by side; each cell is done or is not."""

    problem: Problem
    epochs: float
    """In full: as published, or as chosen where the paper trains on other data."""
    quick_epochs: float
    make: Callable[[int, bool, float], list[CellTraining]]
    """From a seed, whether only a quick part is wanted, and the epochs; in the table's order."""
    value: Callable[[Mapping[str, Any]], float]
    """The number of a cell, from the summary of its training."""
    show: Callable[[PublishedCell], str]
    verdict: Callable[[list[PublishedCell]], str]
    """How far ours and the published cells agree."""
    picture: Callable[[Path, Sequence[CellTraining], Mapping[str, Trained]], None]
    """From those that are done, by label; at least one is."""
    further: Callable[[CellTraining, Trained], list[PublishedCell]] | None = None
    """More cells from the history of one training, such as when it reached an accuracy."""


@dataclass(frozen=True)
class PublishedTable:
    """A table that `gossamer reproduce` computes: at once, as an experiment, or by trainings."""

    name: str
    title: str
    source: str
    unit: str
    settings: str
    """Every setting that matters, and what the paper leaves open and we chose."""
    cells: int
    compute: Callable[[int, Progress], list[PublishedCell]] | None = None
    """From a seed; calls back after each cell."""
    experiment: Experiment | None = None
    """Instead of `compute`, for a table that takes long and needs data: one laboratory grid."""
    trainings: Trainings | None = None
    """Instead of both, for a table whose cells are simulated trainings, each on its own."""


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
