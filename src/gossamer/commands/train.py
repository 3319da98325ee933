"""`gossamer train`: one method on real processes of this machine."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.commands import options as given
from gossamer.commands.console import print_json, say_line, shared_figures, show_bytes, show_figures
from gossamer.commands.kept_run import keep_report, keeps_folder
from gossamer.commands.view.live import live_page
from gossamer.commands.view.train_view import TrainView
from gossamer.commands.work.simulations import command_line, ended_by, slug
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

EvaluationsOption = Annotated[int, given.shown("Number of evaluations on the way, by worker 0.")]
RecordOption = Annotated[
    bool, given.shown("Keep the order of events, for `gossamer replay`.", "--record")
]
CheckpointOption = Annotated[
    str | None,
    given.shown(
        "Keep checkpoints in the run folder, the two newest; left out: none.",
        metavar="30s|100steps",
    ),
]
ResumeOption = Annotated[
    Path | None,
    given.shown(
        "Go on with the run of this folder from its newest checkpoint; its settings are kept, "
        "--epochs or --samples may grow.",
        metavar="RUN",
    ),
]


_LEFT_OUT = ("engine", "device", "precision", "compiled", "model_bytes")


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
        # Only worker 0 reads the folder, because the other hosts may not see it.
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
    """Give the folder of the run, which `--live` shows meanwhile."""
    place = request.folder
    with ExitStack() as stack:
        with refuse_everywhere(request.transport):
            page = stack.enter_context(live_page(live, keeps_folder=place is not None))
            folder = None if place is None else RunFolder(place)
            if place is not None and not request.is_resumed:
                method = str(request.settings.method)
                folder = RunFolder.create(place, f"train-{slug(method)}")
                folder.write_config(config)  # a resumed run keeps the old file until its end
        if page is not None and folder is not None:
            page.show(folder)
        yield folder


def _follow(request: TrainRequest, folder: RunFolder | None, config: Row, *, as_json: bool) -> int:
    """Show and keep the run while it goes on; return its exit code."""
    settings = request.settings
    view = TrainView(str(settings.method), settings.cluster.workers, settings.epochs or 1.0)
    summary: Row = {"ended": "interrupted", "method": str(settings.method)}
    result = None
    if folder is not None:
        folder.defer_failures()
    try:
        with view:

            def on_row(row: Row) -> None:
                view.row(row)
                if folder is not None:
                    folder.add_row(row)

            result = launch(
                dataclasses.replace(request, folder=None if folder is None else folder.path),
                RunListener(on_row, view.worker, on_start=view.start),
            )
        summary = {"ended": _how(result.status), "failure": result.failure, **result.summary}
    except ConfigurationError:
        # No worker was started: a new folder is removed, and the folder of a resumed run stays.
        if folder is not None:
            folder.close()
            if not request.is_resumed:
                shutil.rmtree(folder.path)
        folder = None
        raise
    except KeyboardInterrupt:
        pass  # no worker was started yet, or this is one worker of another launcher's job
    except BaseException as error:
        summary["ended"] = ended_by(error)
        raise
    finally:
        if folder is not None:
            folder.write_config(config)  # a resumed run may have grown
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
    """What decides a real run apart from its settings."""
    plan = request.faults
    return {
        "command": "train", "transport": request.transport,
        "faults": [str(fault) for fault in plan.faults],
        "bandwidth": None if math.isinf(plan.bandwidth) else plan.bandwidth,
        "latency": plan.latency,
        "command_line": _typed(request.folder if request.is_resumed else None),
    }  # fmt: skip


def _typed(resume: Path | None) -> str:
    """The command line; a resumed run has the lines of both commands, because both decide it."""
    if resume is None:
        return command_line()
    try:
        before = json.loads((resume / "config.json").read_text(encoding="utf-8"))["command_line"]
    except (OSError, ValueError, KeyError, TypeError):
        # The file is damaged or of another version; a resumed run needs only the checkpoint.
        return command_line()
    return f"{before}\n{command_line()}"


def _saved(context: typer.Context, resume: Path) -> dict[str, Any]:
    """The settings of the run that is resumed, without those that the command line states."""
    stated = {
        name for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }  # fmt: skip
    if "samples" in stated:
        stated.add("epochs")
    return {name: value for name, value in saved_options(resume).items() if name not in stated}


def _how(status: int) -> str:
    # A scheduler that wants its machine back sends SIGTERM, a terminal that is closed SIGHUP.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    asked = {128 + number: "interrupted" for number in signals}
    return {0: "finished", 3: "deadline", **asked}.get(status, "failed")


def _show(result: Result) -> None:
    summary = dict(result.summary)
    if result.status == 0 and summary["living"] < summary["workers"]:
        summary["survivors"] = f"{summary['living']} of {summary['workers']}"
    scores, costs = shared_figures(summary)
    show_figures(
        f"{summary['method']} on {summary['workers']} real workers",
        summary,
        [
            *scores,
            ("wall time", "wall_seconds", "{:.2f} s".format),
            ("steps", "steps", "{:.0f}".format),
            ("steps by worker", "steps_by_worker", _by_worker),
            *costs,
            ("bytes sent per step", "bytes_per_step", show_bytes),
            ("exchanges per step", "exchanges_per_step", "{:.2f}".format),
            ("lived to the end", "survivors", str),
        ],
    )


def _by_worker(steps: Row) -> str:
    return ", ".join(f"{rank}: {count}" for rank, count in steps.items())
