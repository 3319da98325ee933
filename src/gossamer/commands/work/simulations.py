"""One simulation that a command runs: it is kept in a run folder, and shares its engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.errors import Error
from gossamer.observe.observer import Observer
from gossamer.observe.strip import Strip
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.sim.engine import Engine
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel

_DIVERGED = 100.0
_SHOWN_STEPS = 25.0
_SHOWN_STEPS_OF_THE_SLOWEST = 3.5
Answer_co = TypeVar("Answer_co", covariant=True)
OnRow = Callable[[Row], None]


class OutOfMinutes(Error):
    """The time of a batch is over: the job that is running ends here, without an answer."""


class EngineCache:
    """The engines of one command: its runs share a traced model."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Engine, FlatModel]] = {}
        self.running: Simulation | None = None
        """The simulation that was made last."""

    def place(self, folder: RunFolder | None) -> None:
        """Hear where the next run is kept; an engine keeps nothing there."""

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], observers: Sequence[Observer]
    ) -> Simulation:
        """Make a simulation, with the engine of an earlier one where the two fit together."""
        wanted = ("seed", "engine", "device", "precision", "compiled")
        key = (settings.task.name, *(getattr(settings, name) for name in wanted))
        engine, model = self._kept.get(key, (None, None))
        simulation = Simulation(
            settings, on_row=on_row, observers=observers, engine=engine, model=model
        )
        self._kept[key] = (simulation.engine, simulation.model)
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

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Any:
        """Run the simulation and return its `Result`, or the error that was tolerated."""

        def watch(row: Row) -> None:
            on_row(row)
            # After the last evaluation no time is left to save.
            if row["samples"] < self.settings.samples and is_over():
                raise OutOfMinutes

        try:
            return execute(
                self.settings, folder=self.folder, on_row=watch, engines=engines, trace=self.trace
            )
        except self.tolerated as error:
            return error


def execute(
    settings: Settings,
    *,
    folder: RunFolder | None,
    on_row: Callable[[Row], None],
    engines: EngineCache,
    trace: bool = False,
) -> Result:
    """Run one simulation. The folder gets each row as it comes, and also how the run ended."""
    last: Row = {}

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
        folder.write_config({**settings.as_dict(), "command_line": command_line()})
        folder.defer_failures()
        strip = Strip(settings.cluster.workers, _shown_ns(settings.cluster))
        if trace:
            folder.open_trace(settings.cluster.workers)
        observers = (strip,) if folder.timeline is None else (strip, folder.timeline)
        simulation = engines.simulation(settings, record, observers)
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


def _shown_ns(cluster: Cluster) -> int:
    """How much of a run its page shows: a few dozen steps, and a few steps of a slow worker."""
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow" and f.is_trait)])
    step = cluster.compute.seconds + cluster.compute.unoverlapped_seconds
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
    return str(error) or type(error).__name__


def command_line() -> str:
    """The command that the user typed, quoted such that a shell can read it again."""
    return shlex.join(["gossamer", *sys.argv[1:]])


def slug(text: str) -> str:
    """Write a text such as a method's spec as part of a file name, which has a limited length."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text[:80])
