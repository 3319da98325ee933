"""The grid of a laboratory, trained as a batch."""

from __future__ import annotations

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
from gossamer.commands.work.jobs import JobWatch, number_of_jobs, run_jobs
from gossamer.commands.work.simulations import EngineCache, OnRow, OutOfMinutes
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.studies.lab.grid import Grid, GridGroup
from gossamer.studies.lab.results import GridResults
from gossamer.studies.lab.sweep import GroupRun, Sweep, TrainedGroup
from gossamer.tasks import Task, make_task


def grid_plan(
    task: str, grid: Grid, machine: MachineOptions, table: str | None = None
) -> BatchPlan:
    """Plan a grid; `table` names the published table that it reproduces."""
    return new_plan({"task": task, "grid": grid.as_dict(), "table": table}, machine)


def continued_grid(path: Path, machine: MachineOptions, asked: Mapping[str, object]) -> BatchPlan:
    return continued_plan(path, machine, asked, ("task", "grid", "table"), "grid")


@dataclass(frozen=True)
class GroupJob:
    """The training of one group, which stops between two steps."""

    group: GroupRun

    @property
    def label(self) -> str:
        return self.group.group.label

    @property
    def folder(self) -> None:
        """A group is kept in the folder of its grid."""

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> TrainedGroup:
        trained = self.group.run(on_row, is_over)
        if not trained.is_over:
            raise OutOfMinutes
        return trained


@dataclass
class GridBatch:
    """All trainings of one grid."""

    plan: BatchPlan
    options: BatchOptions
    jobs: int | None
    """How many groups are trained at a time, each in a process."""
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
        # On a GPU one group uses all of it, and its rings of gradients much of the memory.
        self._processes = number_of_jobs(
            1 if self.jobs is None and plan.device != "cpu" else self.jobs
        )
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

        def at(job: GroupJob, row: Row) -> None:
            if sweep.heard(job.group, row):
                write()
            shares[job.label] = row["step"] / row["steps"]
            reporter.at(f"{job.label}  epoch {row['epochs']:.1f}", sum(shares.values()))

        def done(job: GroupJob, trained: TrainedGroup) -> None:
            sweep.ended(job.group, trained)
            shares.pop(job.label, None)
            report(job.group.group)

        shares: dict[str, float] = {}
        with Reporter(len(sweep.groups), "laboratory") as reporter, interruptible() as is_asked:
            for group in sweep.groups:
                if group.label in sweep.finished:
                    report(group)
            sweep.prepare()
            watch = JobWatch(at, done, deadline, is_asked)
            for _ in run_jobs(self._work(), watch, processes=self._processes):
                pass
            if not sweep.missing():
                return "finished"
            return "interrupted" if is_asked() else "stopped"

    def _work(self) -> list[GroupJob]:
        """One after the other the quickest come first, so that results appear early; together the
        longest, so that none of them is left for the end."""
        jobs = [GroupJob(one) for one in self._sweep.missing()]
        if self._processes == 1:
            return jobs
        return sorted(jobs, key=lambda job: -len(job.group.group.points) / job.group.group.batch)
