"""A published table whose cells are simulated trainings, trained as a batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gossamer.commands.console import Reporter, can_draw, say
from gossamer.commands.studies.batch import BatchOptions, BatchPlan, reading
from gossamer.commands.studies.published_table import show_table
from gossamer.commands.work.jobs import JobWatch, run_jobs
from gossamer.commands.work.simulations import EngineCache, OnRow, SimulationJob
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.specs import check_range
from gossamer.studies.reproductions import PublishedCell, PublishedTable
from gossamer.studies.reproductions.table import Trainings, mean_cell
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained, brief

KEYS = ("table", "seed", "quick", "epochs", "seeds")
"""What decides the cells of such a table, as config.json keeps it."""


def _finished(path: Path) -> dict[str, Trained]:
    """The trainings that a folder holds; none where it was stopped before the first evaluation."""
    progress = path / "progress.json"
    if not progress.exists():
        return {}
    with reading(path):
        kept = json.loads(progress.read_text(encoding="utf-8"))["finished"]
        return {one["label"]: Trained.from_dict(one) for one in kept}


# The cells of a table share their task, so that each process loads it once.
_load = lru_cache(maxsize=1)(Problem.load)


@dataclass(frozen=True)
class CellJob:
    """The training of one cell, as plain data: a process loads the task by itself."""

    training: CellTraining
    problem: Problem
    plan: BatchPlan

    @property
    def label(self) -> str:
        return self.training.label

    @property
    def folder(self) -> None:
        """A cell is kept in the folder of its table."""

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Trained:
        task, plan = _load(self.problem, self.plan.data), self.plan
        settings = self.training.settings(task, plan.device, plan.threads, plan.precision)
        job = SimulationJob(self.label, settings)
        return Trained.of(self.training, job.run(engines, on_row, is_over))


@dataclass
class TrainingsBatch:
    """The trainings of a table. The folder is brought up to date after every evaluation."""

    table: PublishedTable
    trainings: Trainings
    plan: BatchPlan
    options: BatchOptions
    jobs: int
    trained: dict[str, Trained] = field(default_factory=dict[str, Trained])
    unfinished: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    """The evaluations of trainings that have not ended."""
    ended: str = "running"
    work: list[CellTraining] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained before anything is written."""
        check_range("jobs", self.jobs, 1)
        self.options.check()
        if self.options.resume is not None:
            self.trained = _finished(self.options.resume)
        plan = self.plan
        self.epochs: float = plan.choices["epochs"]
        task = _load(self.trainings.problem, plan.data)
        check_range("seeds", plan.choices["seeds"], 1)
        self.work = [
            dataclasses.replace(one, repeat=repeat)
            for repeat in range(plan.choices["seeds"])
            for one in self._trainings_of(plan.choices["seed"] + repeat)
        ]
        for one in self.work:
            one.settings(task, plan.device, plan.threads, plan.precision)

    def _trainings_of(self, seed: int) -> list[CellTraining]:
        return self.trainings.make(seed, self.plan.choices["quick"], self.epochs)

    @property
    def notices(self) -> list[str]:
        return [notice for one in self.trained.values() for notice in one.notices]

    def config(self) -> Row:
        return {**self.plan.as_dict(), "settings": self.table.settings}

    def cells(self) -> list[PublishedCell]:
        """The cells that are known, in the order of the table."""
        return [cell for cell, _ in self._cells()]

    def _cells(self) -> list[tuple[PublishedCell, Row]]:
        """Each cell whose seeds are all trained, with the summary of the first of them."""
        found: list[tuple[PublishedCell, Row]] = []
        places: dict[tuple[str, str], list[CellTraining]] = {}
        for one in self.work:
            places.setdefault((one.row, one.column), []).append(one)
        for several in places.values():
            if all(one.label in self.trained for one in several):
                summary = self.trained[several[0].label].summary
                known = [
                    {(cell.row, cell.column): cell for cell in self._cells_of(one)}
                    for one in several
                ]
                found += [
                    (mean_cell([cells[place] for cells in known]), summary)
                    for place in known[0]
                    if all(place in cells for cells in known)
                ]
        return found

    def _cells_of(self, one: CellTraining) -> list[PublishedCell]:
        ours = self.trainings.value(self.trained[one.label].summary)
        cell = PublishedCell(one.row, one.column, one.published, ours, one.evidence)
        further = self.trainings.further(one, self.trained) if self.trainings.further else []
        return [cell, *further]

    def summary(self) -> Row:
        cells = [detail | cell.as_dict() for cell, detail in self._cells()]
        plan = {key: value for key, value in self.plan.as_dict().items() if key != "data"}
        return {"ended": self.ended, **plan, "notices": self.notices, "cells": cells}

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        shares: dict[str, float] = {}

        def write() -> None:
            if folder is not None:
                finished = [one.as_dict() for one in self.trained.values()]
                folder.write_progress({"finished": finished, "unfinished": self.unfinished})
                folder.write_summary(self.summary())

        def at(job: CellJob, row: Row) -> None:
            self.unfinished.setdefault(job.label, []).append(brief(row))
            write()
            shares[job.label] = min(1.0, row["epochs"] / self.epochs)
            reporter.at(f"{job.label}  epoch {row['epochs']:.1f}", sum(shares.values()))

        def done(job: CellJob, trained: Trained) -> None:
            self.trained[job.label] = trained
            self.unfinished.pop(job.label, None)
            write()
            shares.pop(job.label, None)
            report(job.label)

        def report(label: str) -> None:
            summary = self.trained[label].summary
            value = f"{self.trainings.value(summary):.4g} {self.table.unit}".rstrip()
            reporter.finished(f"{label}: {value}, in {summary['wall_seconds']:.0f} s")

        missing = [one for one in self.work if one.label not in self.trained]
        jobs = [CellJob(one, self.trainings.problem, self.plan) for one in missing]
        with Reporter(len(self.work), self.table.name) as reporter:
            for one in self.work:
                if one.label in self.trained:
                    report(one.label)
            try:
                for _ in run_jobs(jobs, JobWatch(at, done, deadline), processes=self.jobs):
                    pass
            except KeyboardInterrupt:
                return "interrupted"
        return "finished" if len(self.trained) == len(self.work) else "stopped"

    def show(self, folder: RunFolder | None) -> None:
        cells = self.cells()
        show_table(self.table, cells)
        seeds = counted(self.plan.choices["seeds"], "seed")
        say(
            f"this run: {counted(self.epochs, 'epoch')} (in full: {self.trainings.epochs:g}), "
            f"{seeds}, "
            f"{counted(len(cells), 'cell')} of {self.table.cells}"
        )
        if folder is not None and self.trained and can_draw():
            first = [one for one in self.work if not one.repeat]
            if any(one.label in self.trained for one in first):
                self.trainings.picture(folder.path / "table.png", first, self.trained)
