"""`gossamer simulate`: one method on one cluster, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    print_json,
    progress_line,
    say,
    shared_figures,
    show_bytes,
    show_figures,
    shown_while_it_grows,
)
from gossamer.commands.kept_run import kept_run
from gossamer.commands.work.jobs import JobWatch, run_jobs
from gossamer.commands.work.script_runs import ScriptRuns
from gossamer.commands.work.simulations import EngineCache, SimulationJob, command_line, slug
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import interval
from gossamer.sim.checkpoint.file import CHECKPOINT, RunCheckpoint
from gossamer.sim.checkpoint.pieces import RunPiece
from gossamer.sim.script.script_settings import Script
from gossamer.tasks import make_task

_DEFAULT_METHOD = "ad_psgd"
ResumeOption = Annotated[
    Path | None,
    given.shown(
        "Go on with the run of this folder, with the settings that it has; the bits are those of "
        "a run without interruption.",
        metavar="RUN",
    ),
]


@given.with_groups
def simulate(
    context: typer.Context,
    script: given.ScriptArgument = None,
    arguments: given.ArgumentsArgument = None,
    method: given.MethodOrOwnOption = None,
    task: given.TaskOption = "digits-mlp",
    where: given.ClusterOptions = given.ClusterOptions(),
    seed: given.SeedOption = 0,
    seeds: given.SeedsOption = 1,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.RateOption = None,
    running: given.RunOptions = given.RunOptions(),
    evaluations: Annotated[int, given.shown("Number of evaluations on the way.")] = 20,
    compute: given.ComputeOption = "cluster",
    keeping: given.KeepOptions = given.KeepOptions(),
    pieces: given.PieceOptions = given.PieceOptions(),
    resume: ResumeOption = None,
) -> None:
    """Train with one method on a simulated cluster.

    The gradients are true ones; time and network are simulated. A SCRIPT that couples its loop by
    `gossamer.join` is trained instead of a task, as it is:

    \b
    gossamer simulate train.py --cluster one-slow-of-16 -- --epochs 3

    A long run is made in pieces, which give the same bits as one:

    \b
    gossamer simulate --task cifar10-resnet20 --minutes 9
    gossamer simulate --resume runs/20261118-... --minutes 9
    """
    if resume is not None:
        _check_alone(context, resume)
        pieces.check(resume, script)
        checkpoint = RunCheckpoint.read(resume / CHECKPOINT)
        settings = Settings.from_json(checkpoint.settings, running.data)
        _simulate([settings], keeping, pieces=pieces, resumed=resume)
        return
    given.check_seeds(seeds)
    pieces.check(keeping.runs, script)
    if pieces.are_asked and seeds > 1:
        raise ConfigurationError(
            f"--minutes and --checkpoint-every are for one run, got --seeds {seeds}; begin each "
            "seed by a command of its own"
        )
    if script is not None:
        given.check_script_options(script, task, length, lr, running, evaluations)
        with ScriptRuns(Script(script, tuple(arguments or ())), show=shown_while_it_grows) as runs:
            (first,) = runs.settings(
                [method], where.described(), seed=seed, compute=compute, threads=running.threads,
                model_bytes=running.model_bytes,
            )  # fmt: skip
            _simulate([first.seeded(seed + number) for number in range(seeds)], keeping, runs)
        return
    given.check_no_script(compute)
    loaded = make_task(task, data=running.data)
    settings = make_settings(
        loaded, method or _DEFAULT_METHOD, where.described(), seed=seed,
        epochs=length.epochs_of(loaded), batch=length.batch, learning_rate=lr,
        evaluations=evaluations, **running.settings(),
    )  # fmt: skip
    own = [dataclasses.replace(settings, seed=seed + n) for n in range(seeds)]
    _simulate(own, keeping, pieces=pieces)


_BESIDE_RESUME = {"resume", "minutes", "checkpoint_every", "live", "as_json", "data"}


def _check_alone(context: typer.Context, resume: Path) -> None:
    """A resumed run has the settings that it began with."""
    stated = [
        name for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        and name not in _BESIDE_RESUME
    ]  # fmt: skip
    if stated:
        raise ConfigurationError(
            f"--resume {resume} goes on with the settings of that run; leave out "
            f"--{stated[0].replace('_', '-')}"
        )


def _simulate(
    own: Sequence[Settings], keeping: given.KeepOptions, engines: EngineCache | None = None, *,
    pieces: given.PieceOptions = given.PieceOptions(), resumed: Path | None = None,
) -> None:  # fmt: skip
    settings = own[0]
    name = f"simulate-{slug(str(settings.method))}"
    with kept_run(keeping.runs, name, live=keeping.live, resumed=resumed) as folder:
        piece = None
        if folder is not None and (pieces.are_asked or resumed is not None):
            piece = pieces.pieces()(folder.path)
        summary = _run_seeds(own, folder, engines, piece)
        for notice in summary["notices"]:
            say(f"notice: {notice}")
        _show(summary, settings)
        if keeping.as_json:
            print_json(summary)
    if summary["ended"] != "finished":
        raise RunFailed(summary["ended"])


def _run_seeds(
    settings: Sequence[Settings], folder: RunFolder | None, engines: EngineCache | None,
    piece: RunPiece | None = None,
) -> Row:  # fmt: skip
    """Run every seed; several seeds have their own folders inside the command's."""
    is_one, first = len(settings) == 1, settings[0]
    if folder is not None and not is_one:
        seeds = [own.seed for own in settings]
        folder.write_config({**first.as_dict(), "seeds": seeds, "command_line": command_line()})
        folder.defer_failures()

    def jobs() -> Iterator[SimulationJob]:
        for own in settings:
            place = folder if folder is None or is_one else folder.child(f"seed-{own.seed}")
            yield SimulationJob(f"seed {own.seed}", own, place, trace=True, piece=piece)

    def at(_job: SimulationJob, row: Row) -> None:
        share = row["epochs"] / first.epochs if first.epochs else 0.0
        reporter.at(progress_line(str(first.method), row), share)

    def done(job: SimulationJob, result: Result) -> None:
        reporter.finished(progress_line(job.label, result.summary))

    with Reporter(len(settings), str(first.method)) as reporter:
        found = run_jobs(jobs(), JobWatch(at, done), engines=engines)
        summaries = [result.summary for result in found]
    if is_one:
        return summaries[0]
    merged = over_seeds(summaries)
    if folder is not None:
        folder.write_summary(merged)
    return merged


_GIVEN = ("seed", "workers", "learning_rate")


def over_seeds(summaries: list[Row]) -> dict[str, Any]:
    """Merge the summaries of several seeds: the means of figures, and their 95 % intervals."""
    first = summaries[0]
    numbers = [
        key for key, value in first.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _GIVEN
    ]  # fmt: skip
    merged: dict[str, Any] = dict(first)
    bounds: dict[str, list[float]] = {}
    for key in numbers:
        values = [float(summary[key]) for summary in summaries if summary.get(key) is not None]
        found = interval(values)
        merged[key] = found.mean
        bounds[key] = [found.low, found.high]
    merged["seeds"] = [summary["seed"] for summary in summaries]
    merged["digests"] = [summary["digest"] for summary in summaries]
    merged["interval"] = bounds
    merged["ended"] = max((one["ended"] for one in summaries), key=lambda how: how != "finished")
    merged["diverged"] = any(summary["diverged"] for summary in summaries)
    merged["notices"] = list(dict.fromkeys(n for one in summaries for n in one["notices"]))
    return merged


def _show(summary: Row, settings: Settings) -> None:
    scores, costs = shared_figures(summary)
    show_figures(
        f"{settings.method} on {counted(settings.cluster.workers, 'worker')} "
        f"(cluster {settings.cluster.name})",
        summary,
        [
            *scores,
            ("virtual time", "virtual_seconds", "{:.3f} s".format),
            ("wall time", "wall_seconds", "{:.2f} s".format),
            ("epochs", "epochs", "{:.2f}".format),
            ("steps", "steps", "{:.0f}".format),
            *costs,
            ("bytes per step", "bytes_per_step", show_bytes),
            ("exchanges per step", "exchanges_per_step", "{:.2f}".format),
            ("digest", "digest", str),
        ],
    )
