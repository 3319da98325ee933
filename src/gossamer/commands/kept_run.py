"""A command that keeps a run: its folder, its simulations, its page, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from gossamer.commands.console import command_line, say_line, warn
from gossamer.commands.view.live import live_page
from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings
from gossamer.observe.observer import Observer
from gossamer.observe.strip import Strip
from gossamer.report.page.build import build_page
from gossamer.report.page.html_file import write_page
from gossamer.report.pictures.figure import has_matplotlib
from gossamer.report.pictures.main_picture import Advice, main_picture
from gossamer.runs.folder import RunFolder
from gossamer.runs.kept_runs import Folder, read_folder
from gossamer.runs.result import Result, Row
from gossamer.sim.engine import Engine
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import Simulation
from gossamer.tasks.flat_model import FlatModel

_DIVERGED = 100.0
_SHOWN_STEPS = 25.0
_SHOWN_STEPS_OF_THE_SLOWEST = 3.5


@contextmanager
def kept_run(
    runs: Path,
    name: str,
    config: Row | None = None,
    *,
    resumed: Path | None = None,
    live: int | None = None,
    picture: str = "report.png",
    has_page: bool = True,
) -> Generator[RunFolder | None]:
    """The folder that a command keeps its run in, or None where `--runs none` keeps nothing.

    What ends the command early is written into the folder. In the end the user is told where the
    folder is, and its page and its picture are made. `--live` shows the page in the meantime.
    """
    is_kept = keeps_folder(runs) or resumed is not None
    with live_page(live, keeps_folder=is_kept) as page:
        folder = None if resumed is None else RunFolder(resumed)
        if folder is None and is_kept:
            folder = RunFolder.create(runs, name)
        if folder is not None and page is not None:
            page.show(folder)
        try:
            if folder is not None and config is not None and resumed is None:
                folder.write_config({**config, "command_line": command_line()})
            yield folder
        except BaseException as error:
            if folder is not None:
                if not folder.has_summary:
                    folder.write_summary({"ended": ended_by(error)})
                warn(f"kept in {folder.path}")
                keep_report(folder, has_failed=True)
            raise
        if folder is not None:
            say_line(f"kept in {folder.path}")
            if has_page:
                keep_report(folder, picture=picture)


def keeps_folder(runs: Path) -> bool:
    return str(runs) != "none"


def slug(text: str) -> str:
    """A method's spec as part of a file name, which may not be too long."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text[:80])


def keep_report(
    folder: RunFolder, *, has_failed: bool = False, picture: str = "report.png"
) -> None:
    """The page and the picture inside the folder of a command that has ended, however it did."""
    place = folder.path / "report.html"
    with complete(folder, has_failed=has_failed):
        folders = [read_folder(folder.path)]
        write_page(place, build_page(folders))
        # Standard output is for results.
        (warn if has_failed else say_line)(f"report: {place}")
        draw(folder.path / picture, folders)


@contextmanager
def complete(folder: RunFolder, *, has_failed: bool = False) -> Generator[None]:
    """Around the page, which is made when the result has been told: a folder that is not whole
    ends the command with a sentence, unless something worse ends it already."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if not has_failed:
        folder.check()  # what came first is the cause
        if isinstance(failure, OSError):
            raise failure
    if failure is not None:
        text = f"no report: {failure or type(failure).__name__}"
        warn(text)
        if not has_failed:
            raise typer.Exit(1)


def draw(
    path: Path,
    folders: Sequence[Folder],
    target: float | None = None,
    advice: Advice | None = None,
) -> Path | None:
    """The main picture of these folders, where it can be drawn."""
    if not has_matplotlib():
        return None
    try:
        return path if main_picture(path, folders, target=target, advice=advice) else None
    except OSError:
        raise
    except Exception as error:
        # The page has it all; a picture is not worth losing how the command ended.
        warn(f"no picture: {error or type(error).__name__}")
        return None


# ---------------------------------------------------------------------- simulations


class EngineCache:
    """Engines kept between the runs of one command: a traced model serves them all."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Engine, FlatModel]] = {}

    def place(self, folder: RunFolder | None) -> None:
        """Where the next run is kept; an engine keeps nothing there."""

    def simulation(
        self, settings: Settings, on_row: Callable[[Row], None], observers: Sequence[Observer]
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
            observers=observers,
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
    engines: EngineCache,
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
        strip = Strip(settings.cluster.workers, _shown_ns(settings.cluster))
        engines.place(folder)
        simulation = engines.simulation(settings, record, _observers(folder, strip))
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


def _observers(folder: RunFolder | None, strip: Strip) -> Sequence[Observer]:
    """The beginning of a run is kept for its page, all of it where a timeline is wanted."""
    if folder is None:
        return ()
    return (strip,) if folder.timeline is None else (strip, folder.timeline)


def _shown_ns(cluster: Cluster) -> int:
    """A few dozen steps, of the slowest worker at least a few."""
    slowest = max([1.0, *(f.amount for f in cluster.faults if f.kind == "slow" and f.is_trait)])
    step = cluster.compute.seconds + cluster.compute.unoverlapped_seconds
    return round(max(_SHOWN_STEPS, _SHOWN_STEPS_OF_THE_SLOWEST * slowest) * step * SECOND)


def ended_by(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) or type(error).__name__


def _ending(result: Result) -> Row:
    """How the run ended, and what a reader of its figures must be told."""
    summary = result.summary
    notices = list(summary["notices"])
    if summary["living"] == 0:
        of = f" of {result.settings.samples}" if result.settings.epochs else ""
        notices.append(f"all workers died: {summary['samples']}{of} samples were processed")
    has_diverged = diverged(result.history)
    if has_diverged:
        notices.append("the run diverged: its loss grew beyond bounds; try a smaller learning rate")
    ended = "finished" if summary["living"] else "all workers died"
    return {"ended": ended, "diverged": has_diverged, "notices": notices}


def diverged(history: Sequence[Row]) -> bool:
    """Whether the loss of the output is no number, or a hundred times what it began with."""
    losses = [float(row["loss"]) for row in history if row.get("loss") is not None]
    return bool(losses) and not losses[-1] <= _DIVERGED * max(losses[0], 1.0)
