"""A whole grid, trained group by group; a sweep can stop at any step and continue later.

The folder of a sweep holds its checkpoint:

progress.json   what is finished, and which state belongs to the group that is not
state-N.npz     the matrices of the group in training, plain arrays without pickle

The state is written first and under a new name. Replacing progress.json, which names the state, is
the one moment at which the checkpoint changes: a power cut leaves the old checkpoint whole.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from gossamer.errors import ConfigurationError
from gossamer.files import replace_text, replacement
from gossamer.optim.optimisers import make_optimiser
from gossamer.precision import default_precision, rounding_as
from gossamer.runs.folder import to_json
from gossamer.runs.result import Row
from gossamer.studies.lab.grid import Grid, GridGroup, GridPoint
from gossamer.studies.lab.results import GridResults, Score, Yardstick
from gossamer.studies.lab.theory import edge_of, largest_curvature
from gossamer.studies.lab.training import Arrays, GroupTraining, Models
from gossamer.tasks import Task

EVALUATIONS = 10
"""How many times a group is evaluated on the way, at equal distances."""
_SAVE_EVERY_S = 60.0
# Large rings take seconds to write; saving may take at most this part of the time.
_SAVING_SHARE = 0.05

History = list[Row]
"""The evaluations of one group: the epochs, and the losses and accuracies of all rows."""


class Sweep:
    """Trains the groups of a grid one after the other; `run` may be called again after a stop."""

    def __init__(
        self, task: Task, grid: Grid, *, device: str = "cpu", threads: int = 1,
        precision: str | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        grid.check_fits(task)
        self.task = task
        self.grid = grid
        self.folder = folder
        """Where checkpoints go; None keeps none."""
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
        place = torch.device(device)
        self._models = Models(task, place, grid.seeds, precision or default_precision(place))
        self._current: GroupTraining | None = None
        self._history: History = []
        self._initial_loss: float | None = None
        """The loss before the first step; None until it is measured."""
        self._saved_at = time.monotonic()
        self._saving_s = 0.0

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until all is done or `should_stop` says so; return whether all is done."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        first = self._models.first
        try:
            with rounding_as(first.precision, first.device):
                if self._initial_loss is None:
                    self._prepare()
                missing = [group for group in self.groups if group.label not in self.finished]
                return all(self._train(group, should_stop) for group in missing)
        finally:
            torch.set_num_threads(threads)

    def _prepare(self) -> None:
        """Measure the loss and the curvature before the first step."""
        first = self._models.first
        start = self._models.scores(first.initial.unsqueeze(0), first.initial_buffers.unsqueeze(0))
        self._initial_loss = start.losses[0]
        if any(edge_of(make_optimiser(name), 0) is not None for name in self.grid.optimisers):
            self.curvature = largest_curvature(first)
            if self.curvature is None:
                self.notices.append(
                    f"{self.task.name} cannot be differentiated twice, so no edge is predicted"
                )

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
            wait = max(_SAVE_EVERY_S, self._saving_s / _SAVING_SHARE)
            if time.monotonic() - self._saved_at > wait:
                self._save()
        self.notices += [n for n in training.engine.notices if n not in self.notices]
        self.finished[group.label] = self._history
        self._current = None
        self._save()
        self.on_group(group)
        return True

    def _evaluate(self, training: GroupTraining) -> None:
        """Evaluate a group, but only once at a step: a stop may come just after an evaluation."""
        if not self._history or self._history[-1]["step"] != training.step:
            found = training.scores()
            here = {"step": training.step, "epochs": training.epochs}
            self._history.append({**here, "losses": found.losses, "accuracies": found.accuracies})

    # ------------------------------------------------------------------ results

    def scores(self) -> dict[GridPoint, Score]:
        """The latest score of every point that has been evaluated."""
        found: dict[GridPoint, Score] = {}
        for group in self.groups:
            history = self.finished.get(group.label, [])
            if self._current is not None and self._current.group.label == group.label:
                history = self._history
            for last in history[-1:]:
                rows = zip(group.points, last["losses"], last["accuracies"], strict=True)
                for point, loss, accuracy in rows:
                    is_final = group.label in self.finished
                    found[point] = Score(last["epochs"], loss, accuracy, is_final)
        return found

    def results(self) -> GridResults:
        loss = math.nan if self._initial_loss is None else self._initial_loss
        yardstick = Yardstick.of(self.task, loss)
        return GridResults(self.grid, yardstick, self.scores(), self.curvature)

    # ------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        """Replace the checkpoint by the present state."""
        if self.folder is None:
            return
        began = time.monotonic()
        training, name = self._current, None
        old = [path for path in self.folder.glob("state-*.npz") if path.stem[6:].isdecimal()]
        if training is not None:
            name = f"state-{1 + max((int(path.stem[6:]) for path in old), default=0)}.npz"
            with replacement(self.folder / name) as part, part.open("wb") as file:
                np.savez(file, allow_pickle=False, **training.arrays())
        progress = {
            "initial_loss": self._initial_loss,
            "curvature": self.curvature,
            "notices": self.notices,
            "finished": self.finished,
            "group": None if training is None else training.group.label,
            "step": 0 if training is None else training.step,
            "history": [] if training is None else self._history,
            "state": name,
        }
        replace_text(self.folder / "progress.json", to_json(progress) + "\n")
        for path in old:
            path.unlink()
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began

    def resume(self, folder: Path) -> None:
        """Continue with the checkpoint in this folder."""
        self.folder = folder
        progress, arrays = _load(folder)
        loss = progress["initial_loss"]
        self._initial_loss = math.nan if loss is None else loss
        self.curvature = progress["curvature"]
        self.notices = progress["notices"]
        self.finished = {label: _read(rows) for label, rows in progress["finished"].items()}
        for group in self.groups:
            if group.label == progress["group"] and arrays is not None:
                self._current = GroupTraining(self._models, group, self.grid)
                self._current.load(progress["step"], arrays)
                self._history = _read(progress["history"])


def _load(folder: Path) -> tuple[Row, Arrays | None]:
    try:
        progress: Row = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        if progress["state"] is None:
            return progress, None
        # The file is opened here, because numpy does not close a file that it cannot read.
        place: Path = folder / progress["state"]
        with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return progress, dict(arrays)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} cannot be resumed, because it has no {Path(error.filename).name}; "
            "give the folder of a run that was stopped"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise ConfigurationError(
            f"{folder} cannot be resumed, because its checkpoint is damaged ({error}); "
            "start the run again"
        ) from None


def _read(history: History) -> History:
    """Turn the null of JSON back into NaN, which JSON does not have."""

    def numbers(values: list[Any]) -> list[float]:
        return [math.nan if value is None else value for value in values]

    return [row | {key: numbers(row[key]) for key in ("losses", "accuracies")} for row in history]
