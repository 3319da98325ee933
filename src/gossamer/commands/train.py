"""`gossamer train`: one method on real processes of this machine."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gossamer.commands import launching
from gossamer.commands import options as given
from gossamer.commands.console import (
    command_line,
    out,
    print_json,
    show_bytes,
    show_share,
)
from gossamer.commands.execute import ended_by
from gossamer.commands.live import LiveOption, live_page
from gossamer.commands.report import keep_report
from gossamer.commands.training_view import View
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.quantities import counted
from gossamer.real.train.other_launcher import is_told, refusing_for_all, work_as_told
from gossamer.real.train.progress import TrainingResult
from gossamer.real.train.resume import kept_choices
from gossamer.real.train.train import (
    check,
    check_checkpoints,
    cluster_here,
    launch,
    number_of_workers,
)
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row

_INTERRUPTED = 130
MethodOption = Annotated[
    str, typer.Option("--method", help="NAME or NAME:KEY=VALUE,...; `gossamer methods`.")
]
RateOption = Annotated[
    float | None, typer.Option("--lr", help="Learning rate; default: the task's.")
]
EvaluationsOption = Annotated[
    int, typer.Option("--evaluations", help="Number of evaluations on the way, by worker 0.")
]
RecordOption = Annotated[
    bool, typer.Option("--record", help="Keep the order of events, for `gossamer replay`.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-every",
        metavar="30s|100steps",
        help="Keep checkpoints in the run folder, the two newest; left out: none.",
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with the run of this folder from its newest checkpoint; its settings are kept, "
        "--epochs or --samples may grow.",
    ),
]


@launching.with_faults
def train(
    context: typer.Context,
    method: MethodOption = "ad_psgd",
    task: given.TaskOption = "digits-mlp",
    workers: launching.ProcessesOption = None,
    transport: launching.AnyTransportOption = None,
    faults: launching.RealFaults = launching.RealFaults(),  # noqa: B008
    seed: given.SeedOption = 0,
    epochs: given.EpochsOption = None,
    samples: given.SamplesOption = None,
    batch: given.BatchOption = None,
    lr: RateOption = None,
    optimiser: given.OptimiserOption = None,
    schedule: given.ScheduleOption = "constant",
    clip: given.ClipOption = None,
    split: given.SplitOption = "shuffled",
    threads: given.ThreadsOption = 1,
    buffers: given.BuffersOption = "recomputed",
    evaluations: EvaluationsOption = 5,
    deadline: launching.DeadlineOption = None,
    record: RecordOption = False,
    checkpoint_every: CheckpointOption = None,
    resume: ResumeOption = None,
    data: given.DataOption = None,
    runs: given.RunsOption = Path("runs"),
    live: LiveOption = None,
    as_json: given.JsonOption = False,
) -> int:
    """Train with one method on real processes of this machine.

    \b
    gossamer train --method ad_psgd --workers 4 --task digits-mlp
    gossamer train --method ssp:bound=4 --workers 4 --slow 0=4

    The method's text is the one that `gossamer simulate` runs in virtual time. A worker that dies
    does not end the others. Under torchrun, mpirun, srun or `gossamer run` every process is one of
    the workers:

    \b
    torchrun --nproc-per-node 4 -m gossamer train --method ad_psgd
    mpirun -n 4 gossamer train --method ad_psgd
    """
    injection = faults.injection
    if resume is not None and is_told():
        # What the folder says is worker 0's to read: it may be that not every host sees it.
        return work_as_told(transport, injection, data)
    with refusing_for_all(transport) if resume is not None else nullcontext():
        chosen: dict[str, Any] = {
            "method": method, "task": task, "workers": workers, "data": data, "epochs": epochs,
            "samples": samples, "lr": lr, "seed": seed, "batch": batch, "optimiser": optimiser,
            "schedule": schedule, "clip": clip, "split": split, "threads": threads,
            "buffers": buffers, "evaluations": evaluations, "checkpoint_every": checkpoint_every,
        }  # fmt: skip
        chosen |= {} if resume is None else _kept(context, resume)
        data, checkpoint_every = chosen.pop("data"), chosen.pop("checkpoint_every")
        settings = _settings(data=data, **chosen)
        check(settings, injection, transport=transport, deadline=deadline, record=record)
        place = resume or (runs if given.keeps_folder(runs) else None)
        groups = settings.method.groups
        check_checkpoints(checkpoint_every, resume, place, record=record, groups=groups)
    if is_told():
        return work_as_told(transport, injection, data)
    start = functools.partial(
        launch, settings, data=data, injection=injection, transport=transport, deadline=deadline,
        record=record, checkpoint_every=checkpoint_every, is_resumed=resume is not None,
    )  # fmt: skip
    config = settings.as_dict() | _start(transport, resume, faults)
    with _folder(settings, config, place, live, transport, is_new=resume is None) as folder:
        return _follow(start, settings, folder, config, as_json=as_json, is_new=resume is None)


@contextmanager
def _folder(
    settings: Settings, config: Row, place: Path | None, live: int | None,
    transport: str | None, *, is_new: bool,
) -> Generator[RunFolder | None]:  # fmt: skip
    """Where the run is kept, which `--live` shows meanwhile."""
    with ExitStack() as stack:
        with refusing_for_all(transport):
            page = stack.enter_context(live_page(live, keeps_folder=place is not None))
            folder = None if place is None else RunFolder(place)
            if place is not None and is_new:
                folder = RunFolder.create(place, f"train-{given.slug(str(settings.method))}")
                folder.write_config(config)  # of a resumed run the old one stands until its end
        if page is not None and folder is not None:
            page.show(folder)
        yield folder


def _follow(
    start: Callable[..., TrainingResult], settings: Settings, folder: RunFolder | None,
    config: Row, *, as_json: bool, is_new: bool,
) -> int:  # fmt: skip
    """Show the run as it goes, keep what it tells, and end with its exit code."""
    view = View(str(settings.method), settings.cluster.workers, settings.epochs or 1.0)
    summary: Row = {"ended": "interrupted", "method": str(settings.method)}
    result = None
    if folder is not None:
        folder.defer_failures()
    try:
        with view:
            result = start(
                folder=None if folder is None else folder.path,
                on_row=view.row if folder is None else _both(view.row, folder.add_row),
                on_progress=view.worker,
                on_start=view.start,
            )
        summary = {"ended": _how(result.status), "failure": result.failure, **result.summary}
    except ConfigurationError:
        # Nothing was started: no folder is left, and a run that is not resumed stays as it was.
        if folder is not None:
            folder.close()
            if is_new:
                shutil.rmtree(folder.path)
        folder = None
        raise
    except KeyboardInterrupt:
        pass  # before the workers were started, or as one worker of another launcher's job
    except BaseException as error:
        summary["ended"] = ended_by(error)
        raise
    finally:
        if folder is not None:
            folder.write_config(config)  # of a resumed run, which may have grown
            folder.write_summary(summary)
            if result is not None and result.strip is not None:
                folder.write_strip(result.strip)
            folder.close()
            if result is None:
                keep_report(folder, has_failed=True)
    if result is not None:
        for notice in result.summary["notices"]:
            out.print(f"notice: {notice}", markup=False, soft_wrap=True)
        _show(result)
    if as_json:
        print_json(summary)
    if folder is not None:
        out.print(f"kept in {folder.path}", markup=False, soft_wrap=True)
        if result is not None:
            keep_report(folder, has_failed=result.status == 1)
    if result is not None and result.status == 1 and result.failure is not None:
        raise RunFailed(result.failure)
    return _INTERRUPTED if result is None else result.status


def _settings(
    *, method: str, task: str, workers: int | None, data: Path | None, epochs: float | None,
    samples: int | None, lr: float | None, **choices: Any,
) -> Settings:  # fmt: skip
    count = number_of_workers(workers)
    loaded = given.load_task(task, data)
    return make_settings(
        loaded, method, cluster_here(count, counted(count, "process", "processes")),
        epochs=given.epochs_from(epochs, samples, loaded), learning_rate=lr, **choices,
    )  # fmt: skip


def _start(transport: str | None, resume: Path | None, faults: launching.RealFaults) -> Row:
    """What decided a real run beside its settings."""
    links = faults.injection.links
    return {
        "command": "train", "transport": transport, "faults": list(faults.lines),
        "bandwidth": None if math.isinf(links.bandwidth) else links.bandwidth,
        "latency": links.latency, "command_line": _typed(resume),
    }  # fmt: skip


def _typed(resume: Path | None) -> str:
    """Of a run that goes on, also what began it: both are needed to get there again."""
    if resume is None:
        return command_line()
    try:
        before = json.loads((resume / "config.json").read_text(encoding="utf-8"))["command_line"]
    except (OSError, ValueError, KeyError, TypeError):
        # Of another version, or damaged; the checkpoint is what a resumed run needs.
        return command_line()
    return f"{before}\n{command_line()}"


def _kept(context: typer.Context, resume: Path) -> dict[str, Any]:
    """The settings of a run that goes on, but for what the command line says."""
    stated = {
        name for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }  # fmt: skip
    if "samples" in stated:
        stated.add("epochs")
    return {name: value for name, value in kept_choices(resume).items() if name not in stated}


def _both(first: Callable[[Row], None], second: Callable[[Row], None]) -> Callable[[Row], None]:
    def call(row: Row) -> None:
        first(row)
        second(row)

    return call


def _how(status: int) -> str:
    # A scheduler that wants its machine back sends SIGTERM, a terminal that is closed SIGHUP.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    asked = {128 + number: "interrupted" for number in signals}
    return {0: "finished", 3: "deadline", **asked}.get(status, "failed")


def _show(result: TrainingResult) -> None:
    summary = result.summary
    table = Table(
        title=f"{summary['method']} on {summary['workers']} real workers",
        title_justify="left", show_header=False, box=None,
    )  # fmt: skip

    def add(label: str, key: str, show: Callable[[float], str]) -> None:
        if summary.get(key) is not None:
            table.add_row(label, show(summary[key]))

    output = summary.get("output", "model")
    add(f"loss of the {output}", "loss", "{:.4f}".format)
    add(f"accuracy of the {output}", "accuracy", show_share)
    add("accuracy of a worker", "worker_accuracy", show_share)
    add("wall time", "wall_seconds", "{:.2f} s".format)
    add("steps", "steps", "{:.0f}".format)
    by_worker = ", ".join(f"{rank}: {n}" for rank, n in summary["steps_by_worker"].items())
    table.add_row("steps by worker", by_worker)
    add("waiting", "waiting_fraction", show_share)
    add("mean staleness", "mean_staleness", "{:.2f}".format)
    add("consensus distance", "consensus_distance", "{:.4f}".format)
    add("bytes sent per step", "bytes_per_step", show_bytes)
    add("exchanges per step", "exchanges_per_step", "{:.2f}".format)
    if result.status == 0 and summary["living"] < summary["workers"]:
        table.add_row("lived to the end", f"{summary['living']} of {summary['workers']}")
    out.print(table)
