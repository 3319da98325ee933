"""The grid of a laboratory, trained as a batch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.commands.console import Reporter
from gossamer.commands.studies.batch import BatchOptions, continued, interruptible
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


@dataclass(frozen=True)
class GridPlan:
    """What the trainings of a grid are made from, as config.json keeps it."""

    task: str
    data: Path | None
    device: str
    threads: int
    grid: Grid
    table: str | None = None
    """The published table that is reproduced, if one is."""

    def as_dict(self) -> Row:
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return rest | {"grid": self.grid.as_dict(), "data": self.data and str(self.data.resolve())}


def continued_grid(
    path: Path, asked: Mapping[str, object], device: str | None, threads: int, data: Path | None
) -> GridPlan:
    """The plan of a folder; where and on what it is trained may change."""

    def read(config: dict[str, Any]) -> GridPlan:
        kept = config["data"]
        return GridPlan(
            config["task"], data or (Path(kept) if kept else None), device or config["device"],
            threads, Grid.from_dict(config["grid"]), config["table"],
        )  # fmt: skip

    return continued(path, asked, read, what="grid", whose="a laboratory run")


@dataclass
class GridBatch:
    """All trainings of one grid."""

    plan: GridPlan
    options: BatchOptions
    described: Callable[[GridResults], Row]
    """What goes to summary.json."""
    shown: Callable[[Task, GridResults, RunFolder | None], None]
    task: Task = field(init=False)
    ended: str = "running"

    def __post_init__(self) -> None:
        """What cannot be run is refused before anything is written."""
        plan = self.plan
        self.task = make_task(plan.task, data=plan.data)
        plan.grid.check_fits(self.task)
        # Device and threads are those of every run, and are refused in the same words.
        make_settings(
            self.task, "ensemble", Cluster(workers=1), device=plan.device, threads=plan.threads
        )
        self.options.check()
        self._sweep = Sweep(self.task, plan.grid, device=plan.device, threads=plan.threads)
        if self.options.resume is not None:
            self._sweep.resume(self.options.resume)

    @property
    def notices(self) -> list[str]:
        return self._sweep.notices

    def config(self) -> Row:
        return self.plan.as_dict()

    def summary(self) -> Row:
        top = {"ended": self.ended, "task": self.task.name, **self.plan.grid.as_dict()}
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
