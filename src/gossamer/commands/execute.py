"""Run one set of settings, keep its folder, survive Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from gossamer.commands.console import err
from gossamer.model import FlatModel
from gossamer.report.folder import RunFolder
from gossamer.settings import Settings
from gossamer.sim.engine import Engine
from gossamer.sim.simulation import Result, Row, Simulation

_DIVERGED = 100.0


class Engines:
    """Engines kept between the runs of one command: a traced model serves them all."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Engine, FlatModel]] = {}

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], folder: RunFolder | None
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
            timeline=None if folder is None else folder.timeline,
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
            folder.write_config(settings.as_dict())
            if trace:
                folder.open_trace(settings.cluster.workers)
        result = _run(engines.simulation(settings, record, folder))
        result.summary.update(_ending(result))
        if folder is not None:
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


def _run(simulation: Simulation) -> Result:
    try:
        return simulation.run()
    except BaseException:
        # Python complains about coroutines that never ran: the first row comes before any did.
        for end in range(simulation.world.ends):
            simulation.world.kernel.end_tasks(end)
        raise


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
        raise


def ended_by(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)


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
