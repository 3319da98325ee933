"""The results of a sweep: scores by place in the grid, what failed, and the largest good rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gossamer.optim.optimisers import make_optimiser
from gossamer.runs.statistics import Interval, interval
from gossamer.studies.lab.grid import Grid, GridPoint, Place
from gossamer.studies.lab.theory import edge_of
from gossamer.tasks import Task

CHANCE_FACTOR = 1.6
"""An accuracy up to so many times chance level counts as failed, as in the published tables."""
_NEAR = 0.9


@dataclass(frozen=True)
class Score:
    """The loss and accuracy of one point after so many epochs."""

    epochs: float
    loss: float
    accuracy: float
    is_final: bool


@dataclass(frozen=True)
class Yardstick:
    """Which score is compared, accuracy or loss, and the limit beyond which a training failed."""

    key: str
    limit: float
    chance: float | None
    """The accuracy of always naming the most common class."""

    @staticmethod
    def of(task: Task, initial_loss: float) -> Yardstick:
        if not task.has_accuracy:
            return Yardstick("loss", initial_loss, None)
        counts = torch.bincount(task.test.labels.flatten())
        chance = float(counts.max() / counts.sum())
        return Yardstick("accuracy", CHANCE_FACTOR * chance, chance)

    def value(self, score: Score) -> float:
        return score.accuracy if self.key == "accuracy" else score.loss

    def fails(self, value: float) -> bool:
        """Whether a score is no number, at chance level, or worse than that of no training."""
        trained = value > self.limit if self.key == "accuracy" else value < self.limit
        return not trained

    def is_near(self, value: float, best: float) -> bool:
        """Whether a score is still about as good as the best one."""
        return value >= _NEAR * best if self.key == "accuracy" else not self.fails(value)

    def better(self, value: float) -> float:
        """The score as a key for sorting: more is better."""
        return value if self.key == "accuracy" else -value


@dataclass(frozen=True)
class ResultCell:
    """The scores of all seeds at one place in the grid."""

    place: Place
    interval: Interval
    epochs: float
    is_final: bool
    fails: bool

    @property
    def value(self) -> float:
        return self.interval.mean


@dataclass(frozen=True)
class Best:
    """One optimiser at one delay: its best place, and the largest rate that works."""

    optimiser: str
    delay: int
    cell: ResultCell
    largest_rate: float | None
    """The largest rate that comes close to the best at some batch size."""
    predicted_edge: float | None
    """The rate beyond which the quadratic theory expects no training."""


class GridResults:
    """All scores of a grid that are known."""

    def __init__(
        self,
        grid: Grid,
        yardstick: Yardstick,
        scores: Mapping[GridPoint, Score],
        curvature: float | None,
    ) -> None:
        self.grid = grid
        self.yardstick = yardstick
        self.curvature = curvature
        by_place: dict[Place, list[Score]] = {}
        for point, score in scores.items():
            by_place.setdefault(point.place, []).append(score)
        self.cells = {place: self._cell(place, own) for place, own in by_place.items()}

    def _cell(self, place: Place, scores: Sequence[Score]) -> ResultCell:
        values = [self.yardstick.value(score) for score in scores]
        found = interval(values)
        # The mean decides whether a place failed: one seed of five at chance level lowers it.
        return ResultCell(
            place,
            found,
            min(score.epochs for score in scores),
            all(score.is_final for score in scores),
            self.yardstick.fails(found.mean),
        )

    def cells_of(self, optimiser: str, delay: int) -> list[ResultCell]:
        return [cell for cell in self.cells.values() if cell.place[:2] == (optimiser, delay)]

    def best(self) -> list[Best]:
        """The best cell of each optimiser and delay that has results."""
        pairs = product(self.grid.optimisers, self.grid.delays)
        return [self._best(*pair, own) for pair in pairs if (own := self.cells_of(*pair))]

    def _best(self, optimiser: str, delay: int, cells: Sequence[ResultCell]) -> Best:
        trained = [cell for cell in cells if not cell.fails]
        best = max(trained or cells, key=lambda cell: self._rank(cell.value))
        near = [c.place[3] for c in trained if self.yardstick.is_near(c.value, best.value)]
        largest = max(near, default=None)
        return Best(optimiser, delay, best, largest, self.edge(optimiser, delay))

    def _rank(self, value: float) -> float:
        return -math.inf if math.isnan(value) else self.yardstick.better(value)

    def edge(self, optimiser: str, delay: int) -> float | None:
        """The predicted edge as a rate of the grid."""
        edge = edge_of(make_optimiser(optimiser), delay)
        if edge is None or self.curvature is None or not self.curvature > 0.0:
            return None
        workers = delay + 1 if self.grid.halve else 1
        return workers * edge / self.curvature

    def as_dict(self) -> dict[str, Any]:
        return {
            "measure": self.yardstick.key,
            "chance": self.yardstick.chance,
            "curvature": self.curvature,
            "points": [self._described(cell) for cell in self.cells.values()],
            "best": [
                {
                    "optimiser": best.optimiser,
                    "delay": best.delay,
                    self.yardstick.key: best.cell.value,
                    "batch": best.cell.place[2],
                    "learning_rate": best.cell.place[3],
                    "largest_rate": best.largest_rate,
                    "predicted_edge": best.predicted_edge,
                }
                for best in self.best()
            ],
        }

    def _described(self, cell: ResultCell) -> dict[str, Any]:
        optimiser, delay, batch, rate = cell.place
        return {
            "optimiser": optimiser,
            "delay": delay,
            "batch": batch,
            "learning_rate": rate,
            self.yardstick.key: cell.value,
            "interval": [cell.interval.low, cell.interval.high],
            "epochs": cell.epochs,
            "finished": cell.is_final,
            "failed": cell.fails,
        }
