"""`gossamer simulate`: one method on one cluster, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import (
    Reporter,
    command_line,
    out,
    print_json,
    say,
    show_bytes,
    show_share,
)
from gossamer.commands.kept_run import EngineCache, execute, kept_run, slug
from gossamer.commands.script_run import ScriptRuns, check_script_options
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
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
    evaluations: Annotated[
        int, typer.Option("--evaluations", help="Number of evaluations on the way.")
    ] = 20,
    compute: given.ComputeOption = "cluster",
    keeping: given.KeepOptions = given.KeepOptions(),
) -> None:
    """Train with one method on a simulated cluster, in virtual time.

    The gradients are true ones; time and network are simulated. With a SCRIPT that couples its loop
    by `gossamer.join`, that one is trained instead of a task, as it is:

    \b
    gossamer simulate train.py --workers 16 --cluster one-slow-of-16 --method ad_psgd -- --epochs 3
    """
    given.check_seeds(seeds)
    if script is not None:
        check_script_options(script, task, length, lr, running, evaluations)
        with ScriptRuns(Script(script, tuple(arguments or ())), shows_output=True) as runs:
            (first,) = runs.settings(
                [method], where.described(), seed=seed, compute=compute, threads=running.threads,
                model_bytes=running.model_bytes,
            )  # fmt: skip
            _simulate([first.seeded(seed + number) for number in range(seeds)], keeping, runs)
        return
    if compute != "cluster":
        raise ConfigurationError("--compute is for scripts; a task's compute time is the cluster's")
    loaded = make_task(task, data=running.data)
    settings = make_settings(
        loaded, method or _DEFAULT_METHOD, where.described(), seed=seed,
        epochs=length.epochs_of(loaded), batch=length.batch, learning_rate=lr,
        evaluations=evaluations, **running.settings(),
    )  # fmt: skip
    own = [dataclasses.replace(settings, seed=seed + number) for number in range(seeds)]
    _simulate(own, keeping, EngineCache())


def _simulate(own: Sequence[Settings], keeping: given.KeepOptions, engines: EngineCache) -> None:
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


def _run_seeds(settings: Sequence[Settings], folder: RunFolder | None, engines: EngineCache) -> Row:
    """One run for each seed; several have folders of their own inside the command's."""
    summaries: list[Row] = []
    is_one, first = len(settings) == 1, settings[0]
    if folder is not None and not is_one:
        seeds = [own.seed for own in settings]
        folder.write_config({**first.as_dict(), "seeds": seeds, "command_line": command_line()})
        folder.defer_failures()

    def watch(row: Row) -> None:
        share = row["epochs"] / first.epochs if first.epochs else 0.0
        reporter.at(progress_line(str(first.method), row), share)

    with Reporter(len(settings), str(first.method)) as reporter:
        for own in settings:
            place = folder if folder is None or is_one else folder.child(f"seed-{own.seed}")
            result = execute(own, folder=place, on_row=watch, engines=engines, trace=True)
            summaries.append(result.summary)
            reporter.finished(progress_line(f"seed {own.seed}", result.summary))
    if is_one:
        return summaries[0]
    merged = over_seeds(summaries)
    if folder is not None:
        folder.write_summary(merged)
    return merged


def progress_line(what: str, row: Row) -> str:
    """Where a run is, in a few words."""
    parts = [what, f"epoch {row['epochs']:.1f}", f"{row['virtual_seconds']:.2f} virtual s"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.3f}")
    if row.get("accuracy") is not None:
        parts.append(f"accuracy {show_share(row['accuracy'])}")
    return "  ".join(parts)


_GIVEN = ("seed", "workers", "learning_rate")


def over_seeds(summaries: list[Row]) -> dict[str, Any]:
    """Means over the seeds, with 95 % intervals beside them."""
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
    table = Table(
        title=f"{settings.method} on {counted(settings.cluster.workers, 'worker')} "
        f"(cluster {settings.cluster.name})",
        title_justify="left", show_header=False, box=None,
    )  # fmt: skip
    bounds = summary.get("interval", {})

    def add(label: str, key: str, show: Callable[[float], str]) -> None:
        if summary.get(key) is not None:
            between = "" if key not in bounds else " to ".join(map(show, bounds[key]))
            table.add_row(label, show(summary[key]), between)

    add(f"loss of the {summary['output']}", "loss", "{:.4f}".format)
    add(f"accuracy of the {summary['output']}", "accuracy", show_share)
    add("accuracy of a worker", "worker_accuracy", show_share)
    add("virtual time", "virtual_seconds", "{:.3f} s".format)
    add("wall time", "wall_seconds", "{:.2f} s".format)
    add("epochs", "epochs", "{:.2f}".format)
    add("steps", "steps", "{:.0f}".format)
    add("waiting", "waiting_fraction", show_share)
    add("mean staleness", "mean_staleness", "{:.2f}".format)
    add("mean global staleness", "mean_global_staleness", "{:.2f}".format)
    add("consensus distance", "consensus_distance", "{:.4f}".format)
    add("bytes per step", "bytes_per_step", show_bytes)
    add("exchanges per step", "exchanges_per_step", "{:.2f}".format)
    table.add_row("digest", str(summary["digest"]), "")
    out.print(table)
