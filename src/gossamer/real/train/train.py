"""The second door on real workers: `train` runs a method on processes of this machine.

In a process that torchrun, mpirun, srun or `gossamer run` has started, it is one of the workers of
that job.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.files import replace_text
from gossamer.methods import MethodSpec, parse_method
from gossamer.observe.callbacks import Callback
from gossamer.own_code import absolute, check_main_guard
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.launch.environment import LAUNCHERS, number_of_workers
from gossamer.real.launch.launch import Launch
from gossamer.real.launch.launcher import Launcher
from gossamer.real.train.checkpoint import Every
from gossamer.real.train.other_launcher import launcher_job, meet
from gossamer.real.train.progress import RunListener, TrainingProgress
from gossamer.real.train.request import TrainRequest
from gossamer.real.train.resume import resume as resume_from
from gossamer.real.train.worker_log import FileEntries, StoreEntries, WorkerLog
from gossamer.real.train.worker_main import (
    INTERRUPTED,
    JOB_VARIABLE,
    REFUSED,
    program_of,
    run_worker,
)
from gossamer.runs.result import Result, Row
from gossamer.tasks import Task

_PROGRAM = program_of("gossamer.real.train.worker_main")
_LOOK_S = 0.5
"""How often worker 0 reads from the store what the others have written."""


def train(
    task: str | Task,
    method: str | MethodSpec,
    workers: int | None = None,
    *,
    data: Path | str | None = None,
    faults: FaultPlan | None = None,
    transport: str | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Callable[[int, Row], None] | None = None,
    deadline: float | None = None,
    record: bool = False,
    checkpoint_every: str | None = None,
    resume: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **choices: Any,
) -> Result:
    """Train on that many processes of this machine (2); `choices` as for `simulate`.

    The workers make the task themselves, from its name. A `Task` of your own must therefore be a
    global name of a file, and the call below `if __name__ == "__main__":`; nothing is pickled.

    The method's text is the one that `simulate` runs in virtual time. Under torchrun, mpirun, srun
    or `gossamer run` every process calls this, and all get a summary; worker 0 has the parameters.

    `checkpoint_every`, such as "60s" or "100steps", writes checkpoints into `folder`; `resume` is
    such a folder, whose run goes on from the newest one with the same choices. Under another
    launcher the folder is worker 0's, and all hosts must see it.

    `callbacks` are called in this process, from what the workers write down: every evaluation, a
    step now and then, deaths, checkpoints; all of these in a thread of their own, one at a time.
    The end is told in the thread that called. Under another launcher worker 0 calls them, and of
    deaths nobody tells it.
    """
    check_main_guard("train")
    if isinstance(task, Task):
        task = task.importable()
    count = number_of_workers(workers, launcher_job())
    request = TrainRequest(
        make_settings(task, method, cluster_here(count), data=data, **choices),
        folder if resume is None else Path(resume), is_recorded=record,
        checkpoint_every=checkpoint_every, is_resumed=resume is not None, transport=transport,
        faults=faults or FaultPlan(), deadline=deadline,
    )  # fmt: skip
    check(request)
    result = launch(request, RunListener(on_row, on_progress, callbacks))
    if result.status == INTERRUPTED:
        raise KeyboardInterrupt
    if result.status == REFUSED and result.failure is not None:
        raise ConfigurationError(result.failure)
    if result.status != 0:
        raise RunFailed(result.failure or f"its workers ended with exit code {result.status}")
    return result


def cluster_here(workers: int, name: str = "custom") -> Cluster:
    """A cluster of so many processes: on this machine, or as many on each as a launcher started
    here."""
    here = launcher_job()
    on_one = workers if here is None else here.local_size
    return Cluster(workers=workers, workers_per_machine=on_one, name=name)


def check(request: TrainRequest) -> None:
    """Refuse a run that could not be started, replayed or kept, before anything is written."""
    if request.is_recorded:
        _check_recordable(request)
    _check_stages(request.settings)
    here = launcher_job()
    if here is None:
        _launch_of(request)
    else:
        request.faults.check(here.size)
        if request.faults.of("kill", "pause") or request.deadline is not None:
            instead = "give them to it" if here.kind == "gossamer" else "leave them out"
            raise ConfigurationError(
                "--kill, --pause and --deadline need workers that gossamer train starts itself, "
                f"but {LAUNCHERS[here.kind]} has started these; {instead}"
            )
        if here.method is not None and parse_method(here.method) != request.settings.method:
            raise ConfigurationError(
                f"the workers were started for {here.method}, got --method "
                f"{request.settings.method}; give gossamer train the method and its launcher none"
            )
    _check_checkpoints(request)


def _check_recordable(request: TrainRequest) -> None:
    reason, method = None, request.settings.method
    if method.method.name == "hogwild":
        reason = "hogwild updates land in pieces without any order; use another method"
    elif method.balance:
        reason = "its batches follow the times of the day; leave out balance="
    elif method.shape.machines > 1:
        reason = "the passes of a pipeline have no recorded order; leave out stages="
    elif method.groups:
        reason = "a group computes its gradients outside of the recorded order; leave out groups="
    elif request.transport not in (None, "shm"):
        reason = (
            "the order of events is kept on shared memory only; leave out --transport "
            f"{request.transport}"
        )
    elif launcher_job() is not None:
        reason = "its workers must share memory; use `gossamer train` without another launcher"
    elif request.faults.of("kill"):
        reason = "a death leaves memory in a state that no record knows; leave out --kill"
    elif request.faults.shapes_links:
        reason = (
            "what slow links keep back is not in the record; leave out --bandwidth, --latency, "
            "--slow-link and --delay"
        )
    if reason is not None:
        raise ConfigurationError(f"this run cannot be recorded: {reason}")


def _check_stages(settings: Settings) -> None:
    """Refuse what replicas of several real processes cannot do, before anything starts."""
    shape, task = settings.method.shape, settings.task
    if shape.machines == 1:
        return
    microbatches = shape.microbatches_of(settings.batch or 1)
    reason = None
    if shape.tensor > 1:
        reason = (
            "tensor= is played in virtual time; on real workers split the layers by PyTorch's own "
            "plans and give the mesh to gossamer.join"
        )
    elif shape.pipeline == "1f1b" and microbatches < shape.stages:
        reason = (
            f"1f1b needs at least as many micro-batches as the {shape.stages} stages, got "
            f"{microbatches}; choose microbatches or a batch that give more, or pipeline=gpipe"
        )
    elif settings.clip is not None:
        reason = "no stage knows the norm of the whole gradient; leave out --clip"
    elif task.train.labels_as or not isinstance(task.train.targets, Tensor):
        reason = (
            f"a pipeline hands one tensor to the model of {task.name} and one to its loss, and "
            "this task has more; leave out stages="
        )
    elif settings.method.method.has_server and settings.method.servers % shape.stages:
        reason = (
            "every stage has servers of its own, so their number must be a multiple of the "
            f"{shape.stages} stages, got servers={settings.method.servers}; choose "
            f"servers={shape.stages}"
        )
    if reason is not None:
        raise ConfigurationError(f"{settings.method} cannot run on real workers: {reason}")


def _check_checkpoints(request: TrainRequest) -> None:
    every, standby = request.checkpoint_every, request.settings.method.standby
    if request.is_recorded and standby:
        raise ConfigurationError(
            "a replay has one process and no standby that could take over; leave out --record, or "
            "standby="
        )
    if request.is_recorded and request.folder is None:
        raise ConfigurationError("a record needs a run folder; leave out --runs none")
    if every is None and not request.is_resumed:
        return
    if every is not None:
        Every.parse(every)
    reason = None
    if request.folder is None:
        reason = "they need a run folder; leave out --runs none"
    elif request.is_recorded:
        reason = "a recorded run is replayed from its beginning; leave out --record"
    elif standby:
        reason = "a server and its standby are not cut at the same message; leave out standby="
    elif request.settings.method.groups:
        reason = "the members of a group have no steps of their own to cut at; leave out groups="
    elif request.settings.method.shape.is_asynchronous:
        reason = (
            "a pipeline that is never emptied has batches under way between any two steps; choose "
            "pipeline=1f1b, or leave out --checkpoint-every"
        )
    elif request.settings.method.shape.machines > 1 and not _is_synchronous(request.settings):
        reason = (
            "the stages of a replica must be cut at the same step, which only a synchronous method "
            "says; leave out --checkpoint-every, or choose such a method"
        )
    if reason is not None:
        raise ConfigurationError(f"checkpoints cannot be kept: {reason}")


def _is_synchronous(settings: Settings) -> bool:
    return settings.method.method.is_synchronous(settings.method_options())


def launch(request: TrainRequest, listener: RunListener | None = None) -> Result:
    """Start the workers, follow what they write, and put it together."""
    heard = listener or RunListener()
    here = launcher_job()
    with ExitStack() as stack:
        if request.folder is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-"))
            request = dataclasses.replace(request, folder=Path(own))
        result = (_start_workers if here is None else _take_part)(request, heard)
    if result.status == 0 and (here is None or here.rank == 0):
        for callback in heard.callbacks:
            callback.on_end(result.summary)
    return result


def _launch_of(request: TrainRequest) -> Launch:
    """The launch of a run; making it checks what a launcher cannot do."""
    settings = request.settings
    return Launch(
        _PROGRAM, settings.cluster.workers, transport=request.transport,
        method=absolute(str(settings.method)), seed=settings.seed, folder=request.folder,
        faults=request.faults, tolerates_deaths=True, deadline_s=request.deadline,
        under_mpirun="gossamer train ...",
    )  # fmt: skip


def _start_workers(request: TrainRequest, listener: RunListener) -> Result:
    request, history = _prepared(request)
    settings, folder = request.settings, request.place
    variables = {JOB_VARIABLE: request.to_json(), "OMP_NUM_THREADS": str(settings.threads)}
    plan = dataclasses.replace(_launch_of(request), environment=variables)
    logs = [FileEntries(folder, rank) for rank in range(settings.cluster.workers)]
    listener.on_start()
    launcher = Launcher(plan)
    progress = TrainingProgress(
        folder, logs, listener, history=history, deaths=launcher.deaths, on_failure=launcher.end
    )
    with progress:
        status = launcher.run()
        progress.catch_up()
        return progress.result(settings, status)


def _prepared(request: TrainRequest) -> tuple[TrainRequest, list[Row]]:
    """Write the workers' request into the folder. Returns it, and the rows of a resumed run."""
    history: list[Row] = []
    if request.is_resumed:
        resumed = resume_from(request)
        request, history = resumed.request, resumed.history
    # The file is replaced whole, so that a run killed here can still be resumed.
    replace_text(request.place / "job.json", request.to_json() + "\n")
    return request, history


def _take_part(request: TrainRequest, listener: RunListener) -> Result:
    """Be one worker of another launcher's job; the logs of all go through the store."""
    peers, transport = meet(request.transport, request.faults)
    rank, history = peers.rank, list[Row]()

    def prepare() -> TrainRequest:
        prepared, rows = _prepared(request)
        history.extend(rows)
        return prepared

    if rank == 0:
        agreed = peers.send_job(prepare)
    else:
        agreed = peers.receive_job(request.place, request.settings.task.data)
    folder = agreed.place
    log = WorkerLog(folder, rank, peers.store)
    logs = [
        FileEntries(folder, rank) if other == rank else StoreEntries(peers.store, other)
        for other in range(transport.size)
    ]
    with ExitStack() as stack:
        if rank != 0:
            # The other workers stay silent and read once, at the end.
            progress = TrainingProgress(folder, logs)
        else:
            progress = TrainingProgress(folder, logs, listener, look_s=_LOOK_S, history=history)
            stack.enter_context(progress)
            listener.on_start()
        status = run_worker(agreed, transport, log)
        progress.catch_up()
        if status == 0:
            peers.leave(len(progress.books))
        return progress.result(request.settings, status)
