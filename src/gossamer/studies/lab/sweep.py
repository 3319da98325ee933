"""A whole grid, trained group by group: with progress, a time limit, and checkpoints to resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.studies.lab.checkpoint import SweepCheckpoint
from gossamer.studies.lab.curvature import largest_curvature
from gossamer.studies.lab.grid import Grid, GridGroup, GridPoint
from gossamer.studies.lab.results import GridResults, Score, Yardstick
from gossamer.studies.lab.theory import edge_of
from gossamer.studies.lab.training import GroupTraining, Models
from gossamer.tasks import Task

EVALUATIONS = 10
"""How many times a group is evaluated on the way, at equal distances."""
_SAVE_EVERY_S = 60.0
# Saving may take this part of the time at most: large rings take seconds to write.
_SAVING_SHARE = 0.05

History = list[dict[str, Any]]
"""The evaluations of one group: epochs, and for all rows losses and accuracies."""


class Sweep:
    """Trains the groups of a grid one after the other; `run` may be called again after a stop."""

    def __init__(
        self,
        task: Task,
        grid: Grid,
        *,
        device: str = "cpu",
        threads: int = 1,
        folder: Path | None = None,
    ) -> None:
        grid.check_fits(task)
        self.task = task
        self.grid = grid
        self.groups = grid.groups()
        self.finished: dict[str, History] = {}
        self.notices: list[str] = []
        self.curvature: float | None = None
        self.on_step: Callable[[GroupTraining], None] = lambda _: None
        self.on_score: Callable[[], None] = lambda: None
        """Called after each evaluation, when there is something new to show or to write."""
        self.on_group: Callable[[GridGroup], None] = lambda _: None
        """Called when a group is finished."""
        self._threads = threads
        self._models = Models(task, torch.device(device), grid.seeds)
        self._checkpoint = None if folder is None else SweepCheckpoint(folder)
        self._current: GroupTraining | None = None
        self._history: History = []
        self._initial_loss = math.nan
        self._is_prepared = False
        self._saved_at = time.monotonic()
        self._saving_s = 0.0

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until everything is done or `should_stop`; whether everything is done."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            self._prepare()
            for group in self.groups:
                if group.label not in self.finished and not self._train(group, should_stop):
                    return False
        finally:
            torch.set_num_threads(threads)
        return True

    def _prepare(self) -> None:
        """What is measured once, before the first step."""
        if self._is_prepared:
            return
        first = self._models.first
        start = self._models.scores(first.initial.unsqueeze(0), first.initial_buffers.unsqueeze(0))
        self._initial_loss = start.losses[0]
        if any(edge_of(make_optimiser(name), 0) is not None for name in self.grid.optimisers):
            self.curvature = largest_curvature(first)
            if self.curvature is None:
                self.notices.append(
                    f"{self.task.name} cannot be differentiated twice, so no edge is predicted"
                )
        self._is_prepared = True

    def _train(self, group: GridGroup, should_stop: Callable[[], bool]) -> bool:
        training = self._current
        if training is None or training.group.label != group.label:
            training = self._current = GroupTraining(self._models, group, self.grid)
            self._history = []
        marks = {math.ceil(k * training.steps / EVALUATIONS) for k in range(1, EVALUATIONS + 1)}
        while not training.is_over:
            if should_stop():
                self._evaluate(training)
                self._save()
                return False
            training.advance()
            self.on_step(training)
            if training.step in marks:
                self._evaluate(training)
                self.on_score()
            if self._is_time_to_save():
                self._save()
        self.notices += [n for n in training.engine.notices if n not in self.notices]
        self.finished[group.label] = self._history
        self._current = None
        self._save()
        self.on_group(group)
        return True

    def _evaluate(self, training: GroupTraining) -> None:
        """At most once a step: a stop may come where a mark is."""
        if self._history and self._history[-1]["step"] == training.step:
            return
        found = training.scores()
        self._history.append(
            {
                "step": training.step,
                "epochs": training.epochs,
                "losses": found.losses,
                "accuracies": found.accuracies,
            }
        )

    # ------------------------------------------------------------------ what is there

    def scores(self) -> dict[GridPoint, Score]:
        """The latest score of every point that has been evaluated."""
        found: dict[GridPoint, Score] = {}
        for group in self.groups:
            is_final = group.label in self.finished
            history = self.finished.get(group.label, [])
            if self._current is not None and self._current.group.label == group.label:
                history = self._history
            if history:
                last = history[-1]
                rows = zip(group.points, last["losses"], last["accuracies"], strict=True)
                for point, loss, accuracy in rows:
                    found[point] = Score(last["epochs"], loss, accuracy, is_final)
        return found

    def results(self) -> GridResults:
        yardstick = Yardstick.of(self.task, self._initial_loss)
        return GridResults(self.grid, yardstick, self.scores(), self.curvature)

    # ------------------------------------------------------------------ to disk and back

    def _is_time_to_save(self) -> bool:
        wait = max(_SAVE_EVERY_S, self._saving_s / _SAVING_SHARE)
        return self._checkpoint is not None and time.monotonic() - self._saved_at > wait

    def _save(self) -> None:
        if self._checkpoint is None:
            return
        began = time.monotonic()
        training = self._current
        progress: dict[str, Any] = {
            "initial_loss": self._initial_loss,
            "curvature": self.curvature,
            "notices": self.notices,
            "finished": self.finished,
            "group": None if training is None else training.group.label,
            "step": 0 if training is None else training.step,
            "history": self._history if training is not None else [],
        }
        self._checkpoint.save(progress, None if training is None else training.arrays())
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began

    def resume(self) -> None:
        """Take up what the folder holds."""
        if self._checkpoint is None:
            raise ConfigurationError("a sweep without a folder has nothing to resume from")
        progress, arrays = self._checkpoint.load()
        self._initial_loss = progress["initial_loss"]
        self.curvature = progress["curvature"]
        self.notices = progress["notices"]
        self.finished = {label: _read(rows) for label, rows in progress["finished"].items()}
        self._is_prepared = True
        for group in self.groups:
            if group.label == progress["group"] and arrays is not None:
                self._current = GroupTraining(self._models, group, self.grid)
                self._current.load(progress["step"], arrays)
                self._history = _read(progress["history"])


def _read(history: History) -> History:
    """JSON has no NaN: what was not a number comes back as null."""
    return [
        {
            **row,
            **{
                key: [math.nan if value is None else value for value in row[key]]
                for key in ("losses", "accuracies")
            },
        }
        for row in history
    ]
