"""Run one set of settings, keep its folder, survive Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from gossamer.commands.console import command_line, err
from gossamer.commands.report import keep_report
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.sim.engine import Engine
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel
from gossamer.trace import Recorder, Recorders, Strip

_DIVERGED = 100.0
_SHOWN_STEPS = 25.0
_SHOWN_STEPS_OF_THE_SLOWEST = 3.5


class Engines:
    """Engines kept between the runs of one command: a traced model serves them all."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Engine, FlatModel]] = {}

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], recorder: Recorder | None
    ) -> Simulation:
        key = (
            settings.task.name,
            settings.seed,
            settings.engine,
            settings.device,
            settings.compiled,
        )
        engine, model = self._kept.get(key, (None, None))
        simulation = Simulation(
            settings,
            on_row=on_row,
            recorder=recorder,
            engine=engine,
            model=model,
        )
        self._kept[key] = (simulation.engine, simulation.model)
        return simulation


def execute(
    settings: Settings,
    *,
    folder: RunFolder | None,
    on_row: Callable[[Row], None],
    engines: Engines,
    trace: bool = False,
) -> Result:
    """One run; rows reach the folder as they come, and an interruption is written down too."""
    last: Row = {}

    def record(row: Row) -> None:
        last.update(row)
        if folder is not None:
            folder.add_row(row)
        on_row(row)

    try:
        if folder is not None:
            folder.write_config({**settings.as_dict(), "command_line": command_line()})
            folder.defer_failures()
            if trace:
                folder.open_trace(settings.cluster.workers)
        strip = Strip(_shown_ns(settings.cluster))
        simulation = engines.simulation(settings, record, _recorder(folder, strip))
        result = simulation.run()
        result.summary.update(_ending(result))
        if folder is not None:
            world = simulation.world
            folder.write_strip(strip.as_dict(world.ends - world.size, world.duration_ns))
            if result.state:
                folder.write_model(result.state)
            folder.write_summary({**result.summary, "staleness_histogram": result.staleness})
    except BaseException as error:
        if folder is not None:
            so_far = {"method": str(settings.method), **last, "ended": ended_by(error)}
            folder.write_summary(so_far)
        raise
    finally:
        if folder is not None:
            folder.close()
    return result


def _recorder(folder: RunFolder | None, strip: Strip) -> Recorder | None:
    """The beginning of a run is kept for its page, all of it where a timeline is wanted."""
    if folder is None:
        return None
    return strip if folder.timeline is None else Recorders([strip, folder.timeline])


def _shown_ns(cluster: Cluster) -> int:
    """A few dozen steps, of the slowest worker at least a few."""
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow" and f.is_trait)])
    step = cluster.compute.seconds + cluster.compute.unoverlapped_seconds
    return round(max(_SHOWN_STEPS, _SHOWN_STEPS_OF_THE_SLOWEST * slowest) * step * SECOND)


@contextmanager
def recorded(folder: RunFolder | None) -> Generator[None]:
    """Whatever ends a command early is written into the folder of the whole command."""
    try:
        yield
    except BaseException as error:
        if folder is not None:
            if not folder.has_summary:
                folder.write_summary({"ended": ended_by(error)})
            err.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
            keep_report(folder, has_failed=True)
        raise


def ended_by(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) or type(error).__name__


def _ending(result: Result) -> Row:
    """How the run ended, and what a reader of its figures must be told."""
    summary = result.summary
    notices = list(summary["notices"])
    if summary["living"] == 0:
        notices.append(
            f"all workers died: {summary['samples']} of {result.settings.samples} samples "
            "were processed"
        )
    has_diverged = diverged(result.history)
    if has_diverged:
        notices.append("the run diverged: its loss grew beyond bounds; try a smaller learning rate")
    ended = "finished" if summary["living"] else "all workers died"
    return {"ended": ended, "diverged": has_diverged, "notices": notices}


def diverged(history: Sequence[Row]) -> bool:
    """Whether the loss of the output is no number, or a hundred times what it began with."""
    losses = [float(row["loss"]) for row in history if row.get("loss") is not None]
    return bool(losses) and not losses[-1] <= _DIVERGED * max(losses[0], 1.0)
