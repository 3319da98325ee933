"""Run the grid of a laboratory: progress, Ctrl-C, a time limit, and going on from a folder."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol

import typer

from gossamer.commands.console import Reporter, command_line, err, out
from gossamer.commands.execute import ended_by, recorded
from gossamer.commands.report import keep_report
from gossamer.config.cluster import Cluster
from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.studies.lab.grid import Grid, GridGroup
from gossamer.studies.lab.results import GridResults
from gossamer.studies.lab.sweep import Sweep
from gossamer.studies.lab.training import GroupTraining
from gossamer.tasks import Task

Summary = dict[str, Any]

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="To train on: cpu (the default) or cuda.")
]
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", help="Go on with a run that was stopped.")
]
MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", help="Stop after this many minutes; --resume continues the run."),
]


@dataclass(frozen=True)
class Setup:
    """What a sweep is made from, as config.json keeps it."""

    task: str
    data: Path | None
    device: str
    threads: int
    grid: Grid
    table: str | None = None
    """The published table that is reproduced, if one is."""

    def check(self, task: Task, minutes: float | None) -> None:
        """Refuse what cannot be run, before anything is written."""
        self.grid.check_fits(task)
        # Device and threads are those of every run, and are refused in the same words.
        make_settings(
            task, "ensemble", Cluster(workers=1), device=self.device, threads=self.threads
        )
        if minutes is not None and not minutes > 0:
            raise ConfigurationError(f"minutes must be above 0, got {minutes:g}")

    def as_dict(self) -> Summary:
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return rest | {"grid": self.grid.as_dict(), "data": self.data and str(self.data.resolve())}


@dataclass(frozen=True)
class Run:
    """What came out of running a sweep for a while."""

    results: GridResults
    ended: str
    """finished, stopped (by the time limit) or interrupted."""
    summary: Summary
    notices: list[str]


def continued(
    path: Path,
    asked: Mapping[str, object],
    device: str | None,
    threads: int,
    data: Path | None,
) -> tuple[Setup, RunFolder]:
    """The setup that a run folder was made with; what would change its results is refused."""
    changed = [option for option, value in asked.items() if value is not None]
    if changed:
        raise ConfigurationError(
            f"--resume goes on with the grid of its folder; leave out {', '.join(changed)}"
        )
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        grid = Grid.from_dict(config["grid"])
        kept = config["data"]
        setup = Setup(
            config["task"],
            data or (Path(kept) if kept else None),
            device or config["device"],
            threads,
            grid,
            config["table"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigurationError(
            f"{path} cannot be resumed, because it is not the folder of a laboratory run; give the "
            "one that the stopped run named"
        ) from None
    return setup, RunFolder(path)


def run_sweep(
    task: Task,
    setup: Setup,
    folder: RunFolder | None,
    *,
    is_new: bool,
    minutes: float | None,
    described: Callable[[GridResults], Summary],
) -> Run:
    """Train until done, or until time or the user says stop; `described` goes to summary.json."""
    sweep = Sweep(
        task,
        setup.grid,
        device=setup.device,
        threads=setup.threads,
        folder=None if folder is None else folder.path,
    )
    if is_new and folder is not None:
        folder.write_config({**setup.as_dict(), "command_line": command_line()})
    elif not is_new:
        sweep.resume()
    ended = "failed"

    def summary() -> Summary:
        top = {"ended": ended, "task": task.name, **setup.grid.as_dict()}
        return {**top, "notices": sweep.notices, **described(sweep.results())}

    def write() -> None:
        if folder is not None:
            folder.write_summary({**summary(), "ended": "running"})

    with recorded(folder):
        try:
            ended = _train(sweep, minutes, write)
        except BaseException as error:
            ended = ended_by(error)
            raise
        finally:
            if folder is not None:
                folder.write_summary(summary())
    return Run(sweep.results(), ended, summary(), sweep.notices)


def _train(sweep: Sweep, minutes: float | None, write: Callable[[], None]) -> str:
    deadline = float("inf") if minutes is None else time.monotonic() + 60.0 * minutes

    def report(group: GridGroup) -> None:
        reporter.finished(f"{group.label}: {counted(len(group.points), 'training')}")

    def at(training: GroupTraining) -> None:
        shown = f"{training.group.label}  epoch {training.epochs:.1f}"
        reporter.at(shown, training.step / training.steps)

    with Reporter(len(sweep.groups), "laboratory") as reporter, interruptible() as is_interrupted:
        for group in sweep.groups:
            if group.label in sweep.finished:
                report(group)
        sweep.on_step, sweep.on_score, sweep.on_group = at, write, report
        is_done = sweep.run(lambda: is_interrupted() or time.monotonic() > deadline)
        if is_done:
            return "finished"
        return "interrupted" if is_interrupted() else "stopped"


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """The first Ctrl-C only asks to stop, so that no step is cut in half; the second one ends."""
    asked = False

    def ask(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        err.print("stopping after this step", markup=False)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:
        # Only the main thread may do this; elsewhere nobody presses Ctrl-C.
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


class Ended(Protocol):
    """What the last words about a run need to know of it."""

    @property
    def ended(self) -> str: ...

    @property
    def notices(self) -> Sequence[str]: ...


def say_how_to_go_on(run: Ended, folder: RunFolder | None, command: str) -> None:
    """The last words about a run: notices, where it lies, how to continue what was stopped."""
    for notice in run.notices:
        out.print(f"notice: {notice}", markup=False, soft_wrap=True)
    if folder is not None:
        out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
    if run.ended != "finished":
        how = (
            "nothing was kept, as --runs none asks for"
            if folder is None
            else f"go on with `{command} --resume {folder.path}`"
        )
        out.print(f"{run.ended} before the end; {how}", markup=False, soft_wrap=True)
    keep_report(folder)
