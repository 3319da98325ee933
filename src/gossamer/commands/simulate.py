"""`gossamer simulate`: one method on one cluster, in virtual time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import options as given
from gossamer.commands.console import Reporter, out, print_json, show_bytes, show_share
from gossamer.commands.execute import Engines, execute
from gossamer.report.folder import RunFolder
from gossamer.report.statistics import interval
from gossamer.settings import Settings, make_settings
from gossamer.sim.simulation import Result, Row


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
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.")] = None,
    optimiser: given.OptimiserOption = None,
    schedule: given.ScheduleOption = "constant",
    clip: given.ClipOption = None,
    split: given.SplitOption = "shuffled",
    engine: given.EngineOption = "vector",
    device: given.DeviceOption = "cpu",
    threads: given.ThreadsOption = 1,
    compiled: given.CompileOption = None,
    buffers: given.BuffersOption = "averaged",
    evaluations: Annotated[int, typer.Option("--evaluations", help="Measured on the way.")] = 20,
    model_bytes: given.ModelBytesOption = None,
    data: given.DataOption = None,
    runs: given.RunsOption = Path("runs"),
    as_json: given.JsonOption = False,
) -> None:
    """Train with one method in virtual time, with true gradients, on a simulated cluster."""
    given.check_seeds(seeds)
    faults = given.Faults(
        {"slow": slow, "slow-link": slow_link, "kill": kill, "pause": pause, "drop": drop,
         "delay": delay, "partition": partition}
    )  # fmt: skip
    loaded = given.load_task(task, data)
    settings = make_settings(
        loaded, method, faults.cluster(cluster, workers),
        seed=seed, epochs=given.epochs_from(epochs, samples, loaded), batch=batch,
        learning_rate=lr, optimiser=optimiser, schedule=schedule, clip=clip, split=split,
        engine=engine, device=device, threads=threads, compiled=compiled, buffers=buffers,
        evaluations=evaluations, model_bytes=model_bytes,
    )  # fmt: skip
    results, folder = _run_seeds(settings, seeds, runs)
    summary = results[0].summary if seeds == 1 else over_seeds([r.summary for r in results])
    if folder is not None and seeds > 1:
        folder.write_summary(summary)
    for notice in results[0].summary["notices"]:
        out.print(f"notice: {notice}", markup=False)
    _show(summary, settings)
    if folder is not None:
        out.print(f"kept in {folder.path}", markup=False)
    if as_json:
        print_json(summary)


def _run_seeds(settings: Settings, seeds: int, runs: Path) -> tuple[list[Result], RunFolder | None]:
    folder = None
    if given.keeps_folder(runs):
        folder = RunFolder.create(runs, f"simulate-{given.slug(str(settings.method))}")
    engines = Engines()
    results: list[Result] = []
    total = settings.epochs or 1.0
    with Reporter(seeds, str(settings.method)) as reporter:
        for number in range(seeds):
            own = dataclasses.replace(settings, seed=settings.seed + number)
            place = folder
            if folder is not None and seeds > 1:
                place = folder.child(f"seed-{own.seed}")

            def watch(row: Row) -> None:
                reporter.at(progress_line(str(settings.method), row), row["epochs"] / total)

            results.append(execute(own, folder=place, on_row=watch, engines=engines, trace=True))
            reporter.finished(progress_line(f"seed {own.seed}", results[-1].summary))
    return results, folder


def progress_line(what: str, row: Row) -> str:
    """Where a run is, in a few words."""
    parts = [what, f"epoch {row['epochs']:.1f}", f"{row['virtual_seconds']:.2f} virtual s"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.3f}")
    if row.get("accuracy") is not None:
        parts.append(f"accuracy {show_share(row['accuracy'])}")
    return "  ".join(parts)


def over_seeds(summaries: list[Row]) -> dict[str, Any]:
    """Means over the seeds, with 95 % intervals beside them."""
    first = summaries[0]
    numbers = [
        key for key, value in first.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "seed"
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
    return merged


def _show(summary: Row, settings: Settings) -> None:
    table = Table(
        title=f"{settings.method} on {settings.cluster.name} ({settings.cluster.workers} workers)",
        title_justify="left", show_header=False, box=None,
    )  # fmt: skip
    bounds = summary.get("interval", {})

    def add(label: str, key: str, shown: str) -> None:
        low_high = bounds.get(key)
        between = f"({low_high[0]:.4g} to {low_high[1]:.4g})" if low_high else ""
        table.add_row(label, shown, between)

    if summary.get("loss") is not None:
        add(f"loss of the {summary['output']}", "loss", f"{summary['loss']:.4f}")
    if summary.get("accuracy") is not None:
        add(f"accuracy of the {summary['output']}", "accuracy", show_share(summary["accuracy"]))
        add("accuracy of a worker", "worker_accuracy", show_share(summary["worker_accuracy"]))
    add("virtual time", "virtual_seconds", f"{summary['virtual_seconds']:.3f} s")
    add("wall time", "wall_seconds", f"{summary['wall_seconds']:.2f} s")
    add("epochs, steps", "epochs", f"{summary['epochs']:.2f}, {summary['steps']:.0f}")
    add("waiting", "waiting_fraction", show_share(summary["waiting_fraction"]))
    add("mean staleness", "mean_staleness", f"{summary['mean_staleness']:.2f}")
    if summary.get("consensus_distance") is not None:
        add("consensus distance", "consensus_distance", f"{summary['consensus_distance']:.4f}")
    add("bytes per step", "bytes_per_step", show_bytes(summary["bytes_per_step"]))
    add("exchanges per step", "exchanges_per_step", f"{summary['exchanges_per_step']:.2f}")
    table.add_row("digest", str(summary["digest"]), "")
    out.print(table)
