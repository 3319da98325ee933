"""`gossamer train`: one method on real processes of this machine."""

from __future__ import annotations

import dataclasses
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

from gossamer.commands import options as given
from gossamer.commands.console import (
    command_line,
    out,
    print_json,
    say_line,
    show_bytes,
    show_share,
)
from gossamer.commands.kept_run import ended_by, keep_report, keeps_folder, slug
from gossamer.commands.view.live import live_page
from gossamer.commands.view.train_view import TrainView
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.quantities import counted
from gossamer.real.launch.environment import number_of_workers
from gossamer.real.train.other_launcher import (
    is_follower,
    launcher_job,
    refuse_everywhere,
    run_as_follower,
)
from gossamer.real.train.progress import RunListener
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.resume import saved_options
from gossamer.real.train.train import check, cluster_here, launch
from gossamer.real.train.worker_main import INTERRUPTED, REFUSED
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Result, Row
from gossamer.tasks import make_task

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


_LEFT_OUT = ("engine", "device", "compiled", "model_bytes")


@given.with_groups
def train(
    context: typer.Context,
    method: given.MethodOption = "ad_psgd",
    task: given.TaskOption = "digits-mlp",
    workers: given.ProcessesOption = None,
    transport: given.AnyTransportOption = None,
    faults: given.RealFaultOptions = given.RealFaultOptions(),
    seed: given.SeedOption = 0,
    length: given.LengthOptions = given.LengthOptions(),
    lr: given.RateOption = None,
    running: Annotated[given.RunOptions, given.Without(_LEFT_OUT)] = given.RunOptions(),
    evaluations: EvaluationsOption = 5,
    deadline: given.DeadlineOption = None,
    record: RecordOption = False,
    checkpoint_every: CheckpointOption = None,
    resume: ResumeOption = None,
    keeping: given.KeepOptions = given.KeepOptions(),
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
    plan = faults.plan()
    if resume is not None and is_follower():
        # What the folder says is worker 0's to read: it may be that not every host sees it.
        return run_as_follower(transport, plan, running.data)
    with refuse_everywhere(transport) if resume is not None else nullcontext():
        chosen: dict[str, Any] = {
            "method": method, "task": task, "workers": workers, "lr": lr, "seed": seed,
            "evaluations": evaluations, "checkpoint_every": checkpoint_every, **vars(length),
            **{name: value for name, value in vars(running).items() if name not in _LEFT_OUT},
        }  # fmt: skip
        chosen |= {} if resume is None else _saved(context, resume)
        every = chosen.pop("checkpoint_every")
        request = TrainRequest(
            _settings(**chosen),
            resume or (keeping.runs if keeps_folder(keeping.runs) else None),
            is_recorded=record, checkpoint_every=every, is_resumed=resume is not None,
            transport=transport, faults=plan, deadline=deadline,
        )  # fmt: skip
        check(request)
    if is_follower():
        return run_as_follower(transport, plan, request.settings.task.data)
    config = request.settings.as_dict() | _beside(request)
    with _folder(request, config, keeping.live) as folder:
        return _follow(request, folder, config, as_json=keeping.as_json)


@contextmanager
def _folder(request: TrainRequest, config: Row, live: int | None) -> Generator[RunFolder | None]:
    """Where the run is kept, which `--live` shows meanwhile."""
    place = request.folder
    with ExitStack() as stack:
        with refuse_everywhere(request.transport):
            page = stack.enter_context(live_page(live, keeps_folder=place is not None))
            folder = None if place is None else RunFolder(place)
            if place is not None and not request.is_resumed:
                method = str(request.settings.method)
                folder = RunFolder.create(place, f"train-{slug(method)}")
                folder.write_config(config)  # of a resumed run the old one stands until its end
        if page is not None and folder is not None:
            page.show(folder)
        yield folder


def _follow(request: TrainRequest, folder: RunFolder | None, config: Row, *, as_json: bool) -> int:
    """Show the run as it goes, keep what it tells, and end with its exit code."""
    settings = request.settings
    view = TrainView(str(settings.method), settings.cluster.workers, settings.epochs or 1.0)
    summary: Row = {"ended": "interrupted", "method": str(settings.method)}
    result = None
    if folder is not None:
        folder.defer_failures()
    try:
        with view:
            on_row = view.row if folder is None else _both(view.row, folder.add_row)
            result = launch(
                dataclasses.replace(request, folder=None if folder is None else folder.path),
                RunListener(on_row, view.worker, on_start=view.start),
            )
        summary = {"ended": _how(result.status), "failure": result.failure, **result.summary}
    except ConfigurationError:
        # Nothing was started: no folder is left, and a run that is not resumed stays as it was.
        if folder is not None:
            folder.close()
            if not request.is_resumed:
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
            say_line(f"notice: {notice}")
        _show(result)
    if as_json:
        print_json(summary)
    if folder is not None:
        say_line(f"kept in {folder.path}")
        if result is not None:
            keep_report(folder, has_failed=result.status == 1)
    if result is not None and result.failure is not None:
        if result.status == REFUSED:
            raise ConfigurationError(result.failure)
        if result.status == 1:
            raise RunFailed(result.failure)
    return INTERRUPTED if result is None else result.status


def _settings(
    *, method: str, task: str, workers: int | None, data: Path | None, epochs: float | None,
    samples: int | None, lr: float | None, **choices: Any,
) -> Settings:  # fmt: skip
    count = number_of_workers(workers, launcher_job())
    loaded = make_task(task, data=data)
    length = given.LengthOptions(epochs, samples)
    return make_settings(
        loaded, method, cluster_here(count, counted(count, "process", "processes")),
        epochs=length.epochs_of(loaded), learning_rate=lr, **choices,
    )  # fmt: skip


def _beside(request: TrainRequest) -> Row:
    """What decided a real run beside its settings."""
    plan = request.faults
    return {
        "command": "train", "transport": request.transport,
        "faults": [str(fault) for fault in plan.faults],
        "bandwidth": None if math.isinf(plan.bandwidth) else plan.bandwidth,
        "latency": plan.latency,
        "command_line": _typed(request.folder if request.is_resumed else None),
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


def _saved(context: typer.Context, resume: Path) -> dict[str, Any]:
    """The settings of a run that goes on, but for what the command line says."""
    stated = {
        name for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }  # fmt: skip
    if "samples" in stated:
        stated.add("epochs")
    return {name: value for name, value in saved_options(resume).items() if name not in stated}


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


def _show(result: Result) -> None:
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
    if (own := summary.get("score")) is not None:
        add(f"{own} of the {output}", own, "{:.4g}".format)
        add(f"{own} of a worker", f"worker_{own}", "{:.4g}".format)
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
