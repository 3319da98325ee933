"""`gossamer simulate`: one method on one cluster, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
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
from gossamer.commands.execute import Engines, execute, recorded
from gossamer.commands.live import LiveOption, live_page
from gossamer.commands.report import keep_report
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import RunFailed
from gossamer.quantities import counted
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row
from gossamer.runs.statistics import interval


def simulate(
    method: Annotated[
        str, typer.Option("--method", help="NAME or NAME:KEY=VALUE,...; `gossamer methods`.")
    ] = "ad_psgd",
    task: given.TaskOption = "digits-mlp",
    cluster: given.ClusterOption = "equal-8",
    workers: given.WorkersOption = None,
    slow: given.SlowOption = None,
    slow_link: given.SlowLinkOption = None,
    kill: given.KillOption = None,
    pause: given.PauseOption = None,
    drop: given.DropOption = None,
    delay: given.DelayOption = None,
    partition: given.PartitionOption = None,
    seed: given.SeedOption = 0,
    seeds: given.SeedsOption = 1,
    epochs: given.EpochsOption = None,
    samples: given.SamplesOption = None,
    batch: given.BatchOption = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Learning rate; default: the task's.")
    ] = None,
    optimiser: given.OptimiserOption = None,
    schedule: given.ScheduleOption = "constant",
    clip: given.ClipOption = None,
    split: given.SplitOption = "shuffled",
    engine: given.EngineOption = "vector",
    device: given.DeviceOption = "cpu",
    threads: given.ThreadsOption = 1,
    compiled: given.CompileOption = None,
    buffers: given.BuffersOption = "recomputed",
    evaluations: Annotated[
        int, typer.Option("--evaluations", help="Number of evaluations on the way.")
    ] = 20,
    model_bytes: given.ModelBytesOption = None,
    data: given.DataOption = None,
    runs: given.RunsOption = Path("runs"),
    live: LiveOption = None,
    as_json: given.JsonOption = False,
) -> None:
    """Train with one method on a simulated cluster, in virtual time.

    The gradients are true ones; time and network are simulated.
    """
    given.check_seeds(seeds)
    faults = given.Faults(
        slow=slow, slow_link=slow_link, kill=kill, pause=pause, drop=drop, delay=delay,
        partition=partition,
    )  # fmt: skip
    loaded = given.load_task(task, data)
    settings = make_settings(
        loaded, method, faults.cluster(cluster, workers),
        seed=seed, epochs=given.epochs_from(epochs, samples, loaded), batch=batch,
        learning_rate=lr, optimiser=optimiser, schedule=schedule, clip=clip, split=split,
        engine=engine, device=device, threads=threads, compiled=compiled, buffers=buffers,
        evaluations=evaluations, model_bytes=model_bytes,
    )  # fmt: skip
    own = [dataclasses.replace(settings, seed=seed + number) for number in range(seeds)]
    folder = None
    with live_page(live, keeps_folder=given.keeps_folder(runs)) as page:
        if given.keeps_folder(runs):
            folder = RunFolder.create(runs, f"simulate-{given.slug(str(settings.method))}")
            if page is not None:
                page.show(folder)
        with recorded(folder):
            summary = _run_seeds(own, folder)
    _conclude(summary, settings, folder, as_json=as_json)


def _conclude(summary: Row, settings: Settings, folder: RunFolder | None, *, as_json: bool) -> None:
    for notice in summary["notices"]:
        say(f"notice: {notice}")
    _show(summary, settings)
    if as_json:
        print_json(summary)
    if folder is not None:
        out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
        keep_report(folder)
    if summary["ended"] != "finished":
        raise RunFailed(summary["ended"])


def _run_seeds(settings: Sequence[Settings], folder: RunFolder | None) -> Row:
    """One run for each seed; several have folders of their own inside the command's."""
    engines = Engines()
    summaries: list[Row] = []
    is_one, first = len(settings) == 1, settings[0]
    if folder is not None and not is_one:
        seeds = [own.seed for own in settings]
        folder.write_config({**first.as_dict(), "seeds": seeds, "command_line": command_line()})
        folder.defer_failures()

    def watch(row: Row) -> None:
        reporter.at(progress_line(str(first.method), row), row["epochs"] / (first.epochs or 1.0))

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
