"""Run one set of settings, keep its folder, survive Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.report.folder import RunFolder
from gossamer.settings import Settings
from gossamer.sim.engine import Engine
from gossamer.sim.model import FlatModel
from gossamer.sim.simulation import Result, Row, Simulation


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
    if folder is not None:
        folder.write_config(settings.as_dict())
        if trace:
            folder.open_trace(settings.cluster.workers)

    def record(row: Row) -> None:
        last.update(row)
        if folder is not None:
            folder.add_row(row)
        on_row(row)

    try:
        result = engines.simulation(settings, record, folder).run()
    except BaseException as error:
        if folder is not None:
            ended = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            folder.write_summary({"method": str(settings.method), "ended": ended, **last})
            folder.close()
        raise
    if folder is not None:
        folder.write_summary(
            {"ended": "finished", **result.summary, "staleness_histogram": result.staleness}
        )
        folder.close()
    return result
