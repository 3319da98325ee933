"""Simulated trainings that are the cells of a published table, and their results.

A training is plain data, so that another process can run it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.runs.result import Result, Row
from gossamer.tasks import Task, make_task

_KEPT = (
    "accuracy", "loss", "epochs", "virtual_seconds", "wall_seconds", "mean_staleness",
    "max_staleness", "steps", "bytes_per_step", "waiting_fraction", "digest", "parameters_digest",
    "diverged", "worker_accuracy",
)  # fmt: skip
_KEPT_IF_THERE = ("compression_ratio", "residual_norm", "displacement_cosine")
_KEPT_OF_A_ROW = ("epochs", "virtual_seconds", "accuracy", "loss", "training_loss")


@dataclass(frozen=True)
class Problem:
    """The task that all cells of a table train."""

    task: str
    augmented: bool = True
    """Whether the task keeps its augmentation."""

    def load(self, data: Path | None) -> Task:
        task = make_task(self.task, data=data)
        return task if self.augmented else dataclasses.replace(task, augment=None)


@dataclass(frozen=True)
class CellTraining:
    """One cell of a table, before it is trained."""

    row: str
    column: str
    method: str
    cluster: Cluster
    """The cluster with the number of workers of this cell."""
    choices: Mapping[str, Any]
    """Further fields of `Settings`: seed, epochs, batch, learning_rate, optimiser, schedule, ..."""
    published: float | None = None
    evidence: str = "no figure at hand"
    repeat: int = 0
    """Which of several seeds of a cell it has, from 0 on."""

    @property
    def label(self) -> str:
        """The name of the training, which no other one of the table has."""
        seed = f", seed {self.choices['seed']}" if self.repeat else ""
        return f"{self.row}, {self.column}{seed}"

    def settings(
        self, task: Task, device: str, threads: int, precision: str | None = None
    ) -> Settings:
        """Make and check the settings of the simulation."""
        return make_settings(
            task, self.method, self.cluster, device=device, threads=threads, precision=precision,
            buffers="averaged",  # the published texts of the tables say so
            **self.choices,
        )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """One cell of a table that was trained to its end."""

    label: str
    summary: Row
    """The figures of the output model at the end, with the digests and the wall time of the run."""
    history: Sequence[Row]
    """The evaluations of the training."""
    notices: tuple[str, ...] = ()

    @staticmethod
    def of(training: CellTraining, result: Result) -> Trained:
        told = result.summary
        kept = {key: told[key] for key in _KEPT}
        kept |= {key: told[key] for key in _KEPT_IF_THERE if key in told}
        return Trained(
            training.label,
            {"method": str(result.settings.method), **kept},
            [brief(row) for row in result.history],
            tuple(f"{training.label}: {notice}" for notice in told["notices"]),
        )

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Trained:
        return Trained(kept["label"], kept["summary"], kept["history"], tuple(kept["notices"]))

    def as_dict(self) -> Row:
        return dataclasses.asdict(self)

    def points(self) -> tuple[list[float], list[float]]:
        """The epochs, and at each the error on the test set in %; NaN where the model diverged."""
        return [row["epochs"] for row in self.history], [error_of(row) for row in self.history]


def brief(row: Row) -> Row:
    """The entries of an evaluation that are kept."""
    return {key: row[key] for key in _KEPT_OF_A_ROW}


def error_of(row: Mapping[str, Any]) -> float:
    """The error on the test set in %; NaN where the model diverged, which JSON keeps as null."""
    accuracy = row["accuracy"]
    return math.nan if accuracy is None else 100.0 * (1.0 - accuracy)
