"""A published table whose cells are simulated trainings: progress, stopping, going on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, can_draw, command_line, out, print_json
from gossamer.commands.execute import ended_by, recorded
from gossamer.commands.published import show_table
from gossamer.commands.sweep import say_how_to_go_on
from gossamer.commands.trainers import Site, Watch, train_here, train_side_by_side
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.specs import check_range
from gossamer.studies.reproductions import PublishedCell, PublishedTable
from gossamer.studies.reproductions.table import Trainings
from gossamer.studies.reproductions.trainings import CellTraining, Trained, brief
from gossamer.tasks import Task


@dataclass(frozen=True)
class Plan:
    """What decides the cells of such a table, as config.json keeps it."""

    table: str
    seed: int
    quick: bool
    epochs: float
    data: Path | None
    device: str
    threads: int

    def as_dict(self) -> Row:
        return vars(self) | {"data": self.data and str(self.data.resolve())}


@dataclass
class Done:
    """What has come out so far: written down after every evaluation of every training."""

    table: PublishedTable
    plan: Plan
    work: list[CellTraining]
    folder: RunFolder | None
    trained: dict[str, Trained] = field(default_factory=dict[str, Trained])
    unfinished: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    """The evaluations of trainings that are under way, or were when everything was stopped."""
    ended: str = "running"

    @property
    def notices(self) -> list[str]:
        return [notice for one in self.trained.values() for notice in one.notices]

    def add_row(self, training: CellTraining, row: Row) -> None:
        history = self.unfinished.setdefault(training.label, [])
        history.append(brief(row))
        self._write()

    def add(self, training: CellTraining, trained: Trained) -> None:
        self.trained[training.label] = trained
        self.unfinished.pop(training.label, None)
        self._write()

    def _write(self) -> None:
        if self.folder is not None:
            finished = [one.as_dict() for one in self.trained.values()]
            self.folder.write_progress({"finished": finished, "unfinished": self.unfinished})
            self.folder.write_summary(self.summary())

    def cells(self) -> list[PublishedCell]:
        """In the table's order, whatever the order in which they were finished."""
        return [cell for cell, _ in self._cells()]

    def _cells(self) -> list[tuple[PublishedCell, Row]]:
        """Each with the summary of the training that it comes from."""
        trainings = _trainings(self.table)
        found: list[tuple[PublishedCell, Row]] = []
        for one in self.work:
            if one.label in self.trained:
                trained = self.trained[one.label]
                ours = trainings.value(trained.summary)
                cell = PublishedCell(one.row, one.column, one.published, ours, one.evidence)
                further = trainings.further(one, trained) if trainings.further else []
                found += [(each, trained.summary) for each in (cell, *further)]
        return found

    def summary(self) -> Row:
        cells = [detail | cell.as_dict() for cell, detail in self._cells()]
        plan = {key: value for key, value in self.plan.as_dict().items() if key != "data"}
        return {"ended": self.ended, **plan, "notices": self.notices, "cells": cells}


def _trainings(table: PublishedTable) -> Trainings:
    assert table.trainings is not None
    return table.trainings


def planned(
    table: PublishedTable,
    *,
    seed: int,
    quick: bool,
    epochs: float | None,
    data: Path | None,
    device: str | None,
    threads: int,
) -> Plan:
    trainings = _trainings(table)
    if epochs is None:
        epochs = trainings.quick_epochs if quick else trainings.epochs
    return Plan(table.name, seed, quick, epochs, data, device or "cpu", threads)


def continued_plan(
    table: PublishedTable,
    path: Path,
    *,
    asked: Mapping[str, object],
    data: Path | None,
    device: str | None,
    threads: int,
) -> tuple[Plan, dict[str, Trained]]:
    """The plan of a run folder and what is finished; what would change the cells is refused."""
    changed = [option for option, value in asked.items() if value is not None]
    if changed:
        raise ConfigurationError(
            f"--resume goes on with the trainings of its folder; leave out {', '.join(changed)}"
        )
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        name = config["table"]
        if name == table.name:
            kept = config["data"]
            plan = Plan(
                name,
                config["seed"],
                config["quick"],
                config["epochs"],
                data or (Path(kept) if kept else None),
                device or config["device"],
                threads,
            )
            return plan, _finished(path)
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} cannot be resumed, because it is not the folder of such a run; give the one "
            "that the stopped run named"
        ) from None
    raise ConfigurationError(
        f"{path} holds {name or 'another run'}, not {table.name}; name its own table"
    )


def _finished(path: Path) -> dict[str, Trained]:
    progress = path / "progress.json"
    if not progress.exists():
        # It was stopped before the first evaluation.
        return {}
    kept = json.loads(progress.read_text(encoding="utf-8"))["finished"]
    return {one["label"]: Trained.from_dict(one) for one in kept}


def run_trainings(
    table: PublishedTable,
    plan: Plan,
    *,
    resumed: Path | None,
    finished: dict[str, Trained],
    jobs: int,
    minutes: float | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Train what is missing, and show the table."""
    trainings = _trainings(table)
    check_range("jobs", jobs, 1)
    if minutes is not None and not minutes > 0:
        raise ConfigurationError(f"minutes must be above 0, got {minutes:g}")
    site = Site(trainings.problem, plan.data, plan.device, plan.threads)
    task = site.problem.load(site.data)
    work = trainings.make(plan.seed, plan.quick, plan.epochs)
    for one in work:
        # What cannot be trained is refused before anything is written.
        one.settings(task, site.device, site.threads)
    folder = None if resumed is None else RunFolder(resumed)
    if folder is None and given.keeps_folder(runs):
        folder = RunFolder.create(runs, f"reproduce-{table.name}")
        kept = {**plan.as_dict(), "settings": table.settings, "command_line": command_line()}
        folder.write_config(kept)
    done = Done(table, plan, work, folder, finished)
    deadline = float("inf") if minutes is None else time.monotonic() + 60.0 * minutes
    _train(done, task, site, jobs, deadline)
    _show(done, trainings, as_json)
    if done.ended == "interrupted":
        raise KeyboardInterrupt


def _train(done: Done, task: Task, site: Site, jobs: int, deadline: float) -> None:
    """Until all is done, time is over, or the user says stop; the folder tells which."""
    missing = [one for one in done.work if one.label not in done.trained]
    shares: dict[str, float] = {}

    def on_row(training: CellTraining, row: Row) -> None:
        done.add_row(training, row)
        shares[training.label] = min(1.0, row["epochs"] / done.plan.epochs)
        reporter.at(f"{training.label}  epoch {row['epochs']:.1f}", sum(shares.values()))

    def on_done(training: CellTraining, trained: Trained) -> None:
        shares.pop(training.label, None)
        done.add(training, trained)
        report(training)

    def report(training: CellTraining) -> None:
        summary = done.trained[training.label].summary
        value = f"{_trainings(done.table).value(summary):.4g} {done.table.unit}".rstrip()
        reporter.finished(f"{training.label}: {value}, in {summary['wall_seconds']:.0f} s")

    with recorded(done.folder), Reporter(len(done.work), done.table.name) as reporter:
        for one in done.work:
            if one.label in done.trained:
                report(one)
        watch = Watch(on_row, on_done, deadline)
        try:
            if jobs == 1:
                train_here(missing, task, site, watch)
            else:
                train_side_by_side(missing, jobs, site, watch)
            done.ended = "finished" if len(done.trained) == len(done.work) else "stopped"
        except KeyboardInterrupt:
            done.ended = "interrupted"
        except BaseException as error:
            done.ended = ended_by(error)
            raise
        finally:
            if done.folder is not None:
                done.folder.write_summary(done.summary())


def _show(done: Done, trainings: Trainings, as_json: bool) -> None:
    cells = done.cells()
    show_table(done.table, cells)
    out.print(
        f"this run: {counted(done.plan.epochs, 'epoch')} (in full: {trainings.epochs:g}), "
        f"{counted(len(cells), 'cell')} of {done.table.cells}",
        markup=False,
    )
    if as_json:
        print_json(done.summary())
    if done.folder is not None and done.trained and can_draw():
        trainings.picture(done.folder.path / "table.png", done.work, done.trained)
    say_how_to_go_on(done, done.folder, f"gossamer reproduce {done.table.name}")
