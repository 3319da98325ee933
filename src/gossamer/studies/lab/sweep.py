"""A whole grid, trained group by group; a sweep can stop at any step and continue later.

The folder of a sweep holds its checkpoint:

progress.json   what is finished
group-N.npz     the matrices and the evaluations of a group in training, arrays without pickle

Each group is trained by a `GroupRun`, which may be in another process than the sweep. It alone
writes its file, whole or not at all; the sweep alone writes progress.json, and removes the file
of a group afterwards. A power cut leaves a checkpoint that is whole.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from gossamer.errors import ConfigurationError
from gossamer.files import replace_text, replacement
from gossamer.optim.optimisers import make_optimiser
from gossamer.precision import default_precision, rounding_as, threads_of
from gossamer.runs.folder import to_json
from gossamer.runs.result import Row
from gossamer.studies.lab.grid import Grid, GridGroup, GridPoint
from gossamer.studies.lab.results import GridResults, Score, Yardstick
from gossamer.studies.lab.theory import edge_of, largest_curvature
from gossamer.studies.lab.training import GroupTraining, Models
from gossamer.tasks import Task

EVALUATIONS = 10
"""How many times a group is evaluated on the way, at equal distances."""
_SAVE_EVERY_S = 60.0
# Large rings take seconds to write; saving may take at most this part of the time.
_SAVING_SHARE = 0.05
_SHOW_EVERY_S = 0.2

History = list[Row]
"""The evaluations of one group: the epochs, and the losses and accuracies of all rows."""


@dataclass(frozen=True)
class TrainedGroup:
    """A group that has been trained to its end, or was stopped before."""

    history: History
    notices: list[str]
    is_over: bool


@dataclass(frozen=True)
class GroupRun:
    """The training of one group, as plain data: any process can begin it or go on with it."""

    task: Task
    grid: Grid
    group: GridGroup
    file: Path | None
    """Its checkpoint; None keeps none."""
    device: str
    threads: int
    precision: str

    def run(self, on_row: Callable[[Row], object], should_stop: Callable[[], bool]) -> TrainedGroup:
        """Train until all is done or `should_stop` says so. Rows without losses say how far it is,
        a few times a second."""
        with threads_of(self.threads), rounding_as(self.precision, torch.device(self.device)):
            return self._run(on_row, should_stop)

    def _run(
        self, on_row: Callable[[Row], object], should_stop: Callable[[], bool]
    ) -> TrainedGroup:
        place = torch.device(self.device)
        models = Models.of(self.task, place, self.grid.seeds, self.precision)
        training = GroupTraining(models, self.group, self.grid)
        history: History = []
        if self.file is not None and self.file.exists():
            history = read_history(self.file)
            with _opened(self.file) as arrays:
                training.load(int(arrays["step"]), arrays)
        steps = training.steps
        marks = {math.ceil(k * steps / EVALUATIONS) for k in range(1, EVALUATIONS + 1)}
        saved_at = shown_at = time.monotonic()
        saving_s = 0.0
        while not training.is_over:
            is_stopped = should_stop()
            if not is_stopped:
                training.advance()
            now = time.monotonic()
            if is_stopped or training.step in marks:
                _evaluate(training, history, on_row)
            elif now - shown_at > _SHOW_EVERY_S:
                shown_at = now
                on_row(_where(training))
            if is_stopped or now - saved_at > max(_SAVE_EVERY_S, saving_s / _SAVING_SHARE):
                self._save(training, history)
                saved_at = time.monotonic()
                saving_s = saved_at - now
            if is_stopped:
                break
        return TrainedGroup(history, training.engine.notices, training.is_over)

    def _save(self, training: GroupTraining, history: History) -> None:
        """Replace the checkpoint by the present state."""
        if self.file is None:
            return
        text = np.frombuffer(json.dumps(history).encode(), np.uint8)
        own = {"step": np.array(training.step), "history": text}
        with replacement(self.file) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, **own, **training.arrays())


def _where(training: GroupTraining) -> Row:
    return {"step": training.step, "steps": training.steps, "epochs": training.epochs}


def _evaluate(training: GroupTraining, history: History, on_row: Callable[[Row], object]) -> None:
    """Evaluate a group, but only once at a step: a stop may come just after an evaluation."""
    if not history or history[-1]["step"] != training.step:
        found = training.scores()
        scores = {"losses": found.losses, "accuracies": found.accuracies}
        history.append({"step": training.step, "epochs": training.epochs, **scores})
        on_row(_where(training) | scores)


class Sweep:
    """What is known of a grid: the groups that are finished, and those that are not."""

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
        self.unfinished: dict[str, History] = {}
        self.curvature: float | None = None
        self._notices: dict[str, list[str]] = {}
        """The notices by group; those before the first step have an empty name."""
        self._device = device
        self._threads = threads
        self._precision = precision or default_precision(torch.device(device))
        self._initial_loss: float | None = None
        """The loss before the first step; None until it is measured."""

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Train group after group until all is done or `should_stop` says so; return whether all is
        done. It may be called again after a stop, and goes on from its folder."""
        self.prepare()
        for one in self.missing():
            found = one.run(lambda row, one=one: self.heard(one, row), should_stop)
            if not found.is_over:
                return False
            self.ended(one, found)
        return True

    def prepare(self) -> None:
        """Measure the loss and the curvature before the first step."""
        if self._initial_loss is not None:
            return
        place = torch.device(self._device)
        with threads_of(self._threads), rounding_as(self._precision, place):
            first = Models.of(self.task, place, self.grid.seeds, self._precision)
            model = first.first
            start = first.scores(model.initial.unsqueeze(0), model.initial_buffers.unsqueeze(0))
            self._initial_loss = start.losses[0]
            if any(edge_of(make_optimiser(name), 0) is not None for name in self.grid.optimisers):
                self.curvature = largest_curvature(model)
                if self.curvature is None:
                    self._notices[""] = [
                        f"{self.task.name} cannot be differentiated twice, so no edge is predicted"
                    ]
        self._save()

    def missing(self) -> list[GroupRun]:
        """The groups that have not been trained to their end."""
        return [
            GroupRun(
                self.task,
                self.grid,
                group,
                self._file(number),
                self._device,
                self._threads,
                self._precision,
            )
            for number, group in enumerate(self.groups)
            if group.label not in self.finished
        ]

    def heard(self, run: GroupRun, row: Row) -> bool:
        """Note an evaluation; whether this row is one."""
        if "losses" in row:
            self.unfinished.setdefault(run.group.label, []).append(row)
        return "losses" in row

    def ended(self, run: GroupRun, trained: TrainedGroup) -> None:
        """Note that a group is finished."""
        label = run.group.label
        self.finished[label] = trained.history
        self._notices[label] = trained.notices
        self.unfinished.pop(label, None)
        self._save()
        if run.file is not None:
            run.file.unlink(missing_ok=True)

    @property
    def notices(self) -> list[str]:
        labels = ["", *(group.label for group in self.groups)]
        return list(dict.fromkeys(n for label in labels for n in self._notices.get(label, ())))

    # ------------------------------------------------------------------ results

    def scores(self) -> dict[GridPoint, Score]:
        """The latest score of every point that has been evaluated."""
        found: dict[GridPoint, Score] = {}
        for group in self.groups:
            is_final = group.label in self.finished
            history = (self.finished if is_final else self.unfinished).get(group.label, [])
            for last in history[-1:]:
                rows = zip(group.points, last["losses"], last["accuracies"], strict=True)
                for point, loss, accuracy in rows:
                    found[point] = Score(last["epochs"], loss, accuracy, is_final)
        return found

    def results(self) -> GridResults:
        loss = math.nan if self._initial_loss is None else self._initial_loss
        yardstick = Yardstick.of(self.task, loss)
        return GridResults(self.grid, yardstick, self.scores(), self.curvature)

    # ------------------------------------------------------------------ checkpoints

    def _file(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"group-{number}.npz"

    def _save(self) -> None:
        if self.folder is None:
            return
        labels = [group.label for group in self.groups if group.label in self.finished]
        progress = {
            "initial_loss": self._initial_loss,
            "curvature": self.curvature,
            "notices": self._notices,
            "finished": {label: self.finished[label] for label in labels},
        }
        replace_text(self.folder / "progress.json", to_json(progress) + "\n")

    def resume(self, folder: Path) -> None:
        """Continue with the checkpoint in this folder."""
        self.folder = folder
        try:
            progress: Row = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
            loss = progress["initial_loss"]
            self._initial_loss = math.nan if loss is None else loss
            self.curvature = progress["curvature"]
            self._notices = progress["notices"]
            self.finished = {label: _read(rows) for label, rows in progress["finished"].items()}
        except FileNotFoundError:
            raise ConfigurationError(
                f"{folder} cannot be resumed, because it has no progress.json; give the folder of "
                "a run that was stopped"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, error) from None
        for number, group in enumerate(self.groups):
            file = folder / f"group-{number}.npz"
            if not file.exists():
                continue
            if group.label in self.finished:
                file.unlink()
            else:
                self.unfinished[group.label] = read_history(file)


def read_history(file: Path) -> History:
    """The evaluations in the checkpoint of a group."""
    with _opened(file) as arrays:
        return json.loads(arrays["history"].tobytes())


@contextmanager
def _opened(file: Path) -> Generator[Any]:
    """The arrays of a checkpoint. Here the file is opened, because numpy does not close a file that
    it cannot read."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise _damaged(file.parent, error) from None


def _damaged(folder: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{folder} cannot be resumed, because its checkpoint is damaged ({error}); start the run "
        "again"
    )


def _read(history: History) -> History:
    """Turn the null of JSON back into NaN, which JSON does not have."""

    def numbers(values: list[Any]) -> list[float]:
        return [math.nan if value is None else value for value in values]

    return [row | {key: numbers(row[key]) for key in ("losses", "accuracies")} for row in history]
