"""One simulation that a command runs: it is kept in a run folder, and shares its engine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gossamer.commands.console import warn
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.errors import Error, Unfinished
from gossamer.observe.observer import Observer
from gossamer.observe.strip import Strip
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import MODEL, Result, Row, read_model
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.engine import Engine
from gossamer.sim.forms.table import device_kind, shipped_table
from gossamer.sim.kernel import SECOND
from gossamer.sim.memory.forecast import forecast
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel

_DIVERGED = 100.0
_NOTEBOOKS = ("ipykernel_launcher.py", "colab_kernel_launcher.py")
_MUCH = 1_000_000_000
"""A command says what a run needs if it is at least so many bytes."""
_SHOWN_STEPS = 25.0
_SHOWN_STEPS_OF_THE_SLOWEST = 3.5
Answer_co = TypeVar("Answer_co", covariant=True)
OnRow = Callable[[Row], None]


class OutOfMinutes(Error):
    """The time of a batch is over: the job that is running ends here, without an answer."""


class EngineCache:
    """The engines of one command: its runs share a traced model."""

    def __init__(self) -> None:
        self._models: dict[tuple[object, ...], FlatModel] = {}
        self._engines: dict[tuple[object, ...], Engine] = {}
        self.running: Simulation | None = None
        """The simulation that was made last."""

    def place(self, folder: RunFolder | None) -> None:
        """Hear where the next run is kept; an engine keeps nothing there."""

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], observers: Sequence[Observer],
        piece: RunPiece | None = None,
    ) -> Simulation:  # fmt: skip
        """Make a simulation, with the engine of an earlier one where the two fit together."""
        wanted = ("seed", "engine", "device", "precision", "compiled")
        split = settings.method.shape.has_split_points
        key = (settings.task.name, split, *(getattr(settings, name) for name in wanted))
        model, width = self._models.get(key), settings.width
        if model is not None and settings.engine != "none":
            width = forecast(settings, model).width
        # A resumed run has the width that it began with, whatever this device would choose.
        is_fresh = piece is not None and piece.resumes
        engine = None if is_fresh else self._engines.get((*key, width))
        simulation = Simulation(
            settings, on_row=on_row, observers=observers, engine=engine, model=model, piece=piece
        )
        self._models[key] = simulation.model
        self._engines[*key, simulation.settings.width] = simulation.engine
        self.running = simulation
        return simulation


class Job(Protocol[Answer_co]):
    """One run of a batch. A job that runs in another process must be plain data."""

    @property
    def label(self) -> str:
        """The name of the job, which no other job of the batch has."""
        ...

    @property
    def folder(self) -> RunFolder | None:
        """Where the run is kept."""
        ...

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Answer_co:
        """Do the work. `on_row` hears of evaluations; `is_over` says whether to end early."""
        ...


@dataclass(frozen=True)
class SimulationJob:
    """One simulated run. An error that is tolerated is an answer about the run."""

    label: str
    settings: Settings
    folder: RunFolder | None = None
    trace: bool = False
    tolerated: tuple[type[Error], ...] = ()
    piece: RunPiece | None = None
    """If the run is made in pieces, the present one; its checkpoint lies in the folder."""

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Any:
        """Run the simulation and return its `Result`, or the error that was tolerated."""

        def watch(row: Row) -> None:
            on_row(row)
            # After the last evaluation no time is left to save.
            if row["samples"] < self.settings.samples and is_over():
                raise OutOfMinutes

        if self.piece is not None and (kept := finished_run(self.settings, self.folder)):
            return kept
        try:
            return execute(
                self.settings, folder=self.folder, on_row=watch, engines=engines, trace=self.trace,
                piece=self.piece,
            )  # fmt: skip
        except self.tolerated as error:
            return error


def execute(
    settings: Settings,
    *,
    folder: RunFolder | None,
    on_row: Callable[[Row], None],
    engines: EngineCache,
    trace: bool = False,
    piece: RunPiece | None = None,
) -> Result:
    """Run one simulation. The folder gets each row as it comes, and also how the run ended."""
    last: Row = {}
    resumed = None if piece is None else piece.checkpoint()

    def record(row: Row) -> None:
        last.update(row)
        if folder is not None:
            folder.add_row(row)
        on_row(row)

    engines.place(folder)
    if folder is None:
        result = engines.simulation(settings, record, ()).run()
        result.summary.update(_ending(result))
        return result
    try:
        if resumed is None:
            folder.write_config(_config(settings))
        if piece is not None:
            folder.keep_rows([] if resumed is None else resumed.rows)
        folder.defer_failures()
        strip = Strip(settings.cluster.workers, _shown_ns(settings.cluster, settings.batch or 0))
        if trace:
            folder.open_trace(settings.cluster.workers)
        observers = (strip,) if folder.timeline is None else (strip, folder.timeline)
        simulation = engines.simulation(settings, record, observers, piece)
        if resumed is None and simulation.settings.width is not None:
            folder.write_config(_config(simulation.settings))
        if trace and simulation.forecast is not None and simulation.forecast.bytes > _MUCH:
            warn(f"memory: {simulation.forecast}")
        result = simulation.run()
        result.summary.update(_ending(result))
        world = simulation.world
        folder.write_strip(strip.as_dict(world.ends - world.size, world.duration_ns))
        if result.state:
            folder.write_model(result.state)
        folder.write_summary({**result.summary, "staleness_histogram": result.staleness})
    except BaseException as error:
        folder.write_summary({"method": str(settings.method), **last, "ended": ended_by(error)})
        raise
    finally:
        folder.close()
    return result


def finished_run(settings: Settings, kept: RunFolder | None) -> Result | None:
    """The result of a run that an earlier piece of the command has finished; None if none has."""
    if kept is None:
        return None
    folder = kept.path
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if summary["ended"] != "finished":
            return None
        staleness = {int(k): count for k, count in summary.pop("staleness_histogram").items()}
        rows = [json.loads(line) for line in lines]
        return Result(settings, summary, rows, None, staleness, read_model(folder / MODEL))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is made again


def _config(settings: Settings) -> Row:
    """All that decided a run. Beside the settings that is how operations of many workers were
    computed: the table's choices, named by their fingerprint, for this kind of device."""
    config = {**settings.as_dict(), "command_line": command_line()}
    if settings.engine == "vector":
        kind = device_kind(torch.device(settings.device))
        config["forms"] = {"device": kind, "table": shipped_table().fingerprint}
    return config


def _shown_ns(cluster: Cluster, batch: int) -> int:
    """How much of a run its page shows: a few dozen steps, and a few steps of a slow worker."""
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow" and f.is_trait)])
    step = cluster.compute.mean_seconds(batch) + cluster.compute.unoverlapped_seconds
    return round(max(_SHOWN_STEPS, _SHOWN_STEPS_OF_THE_SLOWEST * slowest) * step * SECOND)


def _ending(result: Result) -> Row:
    """How the run ended, and what a reader of its figures must know."""
    summary = result.summary
    notices = list(summary["notices"])
    if summary["living"] == 0:
        of = f" of {result.settings.samples}" if result.settings.epochs else ""
        notices.append(f"all workers died: {summary['samples']}{of} samples were processed")
    losses = [float(row["loss"]) for row in result.history if row.get("loss") is not None]
    # A loss that is no number fails this comparison, too.
    diverged = bool(losses) and not losses[-1] <= _DIVERGED * max(losses[0], 1.0)
    if diverged:
        notices.append("the run diverged: its loss grew beyond bounds; try a smaller learning rate")
    ended = "finished" if summary["living"] else "all workers died"
    return {"ended": ended, "diverged": diverged, "notices": notices}


def ended_by(error: BaseException) -> str:
    """How a summary names the error that ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, Unfinished):
        return "unfinished"
    return str(error) or type(error).__name__


def command_line() -> str:
    """The command that the user typed, quoted such that a shell can read it again.

    For a program that calls a function of ours it is the program, for a notebook nothing.
    """
    program = Path(sys.argv[0])
    is_ours = program.name == "gossamer" or program.parts[-2:] == ("gossamer", "__main__.py")
    if not is_ours and (program.suffix != ".py" or program.name in _NOTEBOOKS):
        return ""
    return shlex.join([*(["gossamer"] if is_ours else ["python", str(program)]), *sys.argv[1:]])


def slug(text: str) -> str:
    """Write a text such as a method's spec as part of a file name, which has a limited length."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text[:80])
