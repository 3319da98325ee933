"""`gossamer simulate`: one method on one cluster, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

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
from gossamer.errors import RunFailed
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.runs.statistics import interval
from gossamer.sim.script.script_settings import Script
from gossamer.tasks import make_task

_DEFAULT_METHOD = "ad_psgd"


@given.with_groups
def simulate(
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
) -> None:
    """Train with one method on a simulated cluster.

    The gradients are true ones; time and network are simulated. A SCRIPT that couples its loop by
    `gossamer.join` is trained instead of a task, as it is:

    \b
    gossamer simulate train.py --cluster one-slow-of-16 -- --epochs 3
    """
    given.check_seeds(seeds)
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
    _simulate([dataclasses.replace(settings, seed=seed + n) for n in range(seeds)], keeping)


def _simulate(
    own: Sequence[Settings], keeping: given.KeepOptions, engines: EngineCache | None = None
) -> None:
    settings = own[0]
    name = f"simulate-{slug(str(settings.method))}"
    with kept_run(keeping.runs, name, live=keeping.live) as folder:
        summary = _run_seeds(own, folder, engines)
        for notice in summary["notices"]:
            say(f"notice: {notice}")
        _show(summary, settings)
        if keeping.as_json:
            print_json(summary)
    if summary["ended"] != "finished":
        raise RunFailed(summary["ended"])


def _run_seeds(
    settings: Sequence[Settings], folder: RunFolder | None, engines: EngineCache | None
) -> Row:
    """Run every seed; several seeds have their own folders inside the command's."""
    is_one, first = len(settings) == 1, settings[0]
    if folder is not None and not is_one:
        seeds = [own.seed for own in settings]
        folder.write_config({**first.as_dict(), "seeds": seeds, "command_line": command_line()})
        folder.defer_failures()

    def jobs() -> Iterator[SimulationJob]:
        for own in settings:
            place = folder if folder is None or is_one else folder.child(f"seed-{own.seed}")
            yield SimulationJob(f"seed {own.seed}", own, place, trace=True)

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
