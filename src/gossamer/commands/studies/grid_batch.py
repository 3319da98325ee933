"""The grid of a laboratory, trained as a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.commands.console import Reporter
from gossamer.commands.studies.batch import (
    BatchOptions,
    BatchPlan,
    MachineOptions,
    continued_plan,
    interruptible,
    new_plan,
    reading,
)
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.studies.lab.grid import Grid, GridGroup
from gossamer.studies.lab.results import GridResults
from gossamer.studies.lab.sweep import Sweep
from gossamer.studies.lab.training import GroupTraining
from gossamer.tasks import Task, make_task


def grid_plan(
    task: str, grid: Grid, machine: MachineOptions, table: str | None = None
) -> BatchPlan:
    """Plan a grid; `table` names the published table that it reproduces."""
    return new_plan({"task": task, "grid": grid.as_dict(), "table": table}, machine)


def continued_grid(path: Path, machine: MachineOptions, asked: Mapping[str, object]) -> BatchPlan:
    return continued_plan(path, machine, asked, ("task", "grid", "table"), "grid")


@dataclass
class GridBatch:
    """All trainings of one grid."""

    plan: BatchPlan
    options: BatchOptions
    described: Callable[[GridResults], Row]
    """What summary.json keeps of the results."""
    shown: Callable[[Task, GridResults, RunFolder | None], None]
    task: Task = field(init=False)
    ended: str = "running"

    def __post_init__(self) -> None:
        """Refuse what cannot be run before anything is written."""
        plan, resume = self.plan, self.options.resume
        self.task = make_task(plan.choices["task"], data=plan.data)
        with reading(resume or Path()):
            self.grid = Grid.from_dict(plan.choices["grid"])
        self.grid.check_fits(self.task)
        # Settings refuse a device and a number of threads in the same words everywhere.
        settings = make_settings(
            self.task, "ensemble", Cluster(workers=1), device=plan.device, threads=plan.threads,
            precision=plan.precision,
        )  # fmt: skip
        self.options.check()
        self._sweep = Sweep(
            self.task, self.grid, device=plan.device, threads=plan.threads,
            precision=settings.precision,
        )  # fmt: skip
        if resume is not None:
            self._sweep.resume(resume)

    @property
    def notices(self) -> list[str]:
        return self._sweep.notices

    def config(self) -> Row:
        return self.plan.as_dict()

    def summary(self) -> Row:
        top = {"ended": self.ended, "task": self.task.name, **self.grid.as_dict()}
        return {**top, "notices": self.notices, **self.described(self._sweep.results())}

    def show(self, folder: RunFolder | None) -> None:
        self.shown(self.task, self._sweep.results(), folder)

    def train(self, folder: RunFolder | None, deadline: float) -> str:
        sweep = self._sweep
        sweep.folder = None if folder is None else folder.path

        def write() -> None:
            if folder is not None:
                folder.write_summary(self.summary())

        def report(group: GridGroup) -> None:
            reporter.finished(f"{group.label}: {counted(len(group.points), 'training')}")

        def at(training: GroupTraining) -> None:
            shown = f"{training.group.label}  epoch {training.epochs:.1f}"
            reporter.at(shown, training.step / training.steps)

        with Reporter(len(sweep.groups), "laboratory") as reporter, interruptible() as is_asked:
            for group in sweep.groups:
                if group.label in sweep.finished:
                    report(group)
            sweep.on_step, sweep.on_score, sweep.on_group = at, write, report
            if sweep.run(lambda: is_asked() or time.monotonic() > deadline):
                return "finished"
            return "interrupted" if is_asked() else "stopped"
