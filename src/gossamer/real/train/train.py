"""The second door on real workers: `train` runs a method on processes of this machine.

In a process that torchrun, mpirun, srun or `gossamer run` has started, it is one of the workers of
that job.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gossamer.config.cluster import Cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.errors import ConfigurationError, RunFailed
from gossamer.methods import MethodSpec, parse_method
from gossamer.observe.callbacks import Callback
from gossamer.real.faults.injection import Injection
from gossamer.real.launch.environment import LAUNCHERS
from gossamer.real.launch.launcher import Launch, Launcher
from gossamer.real.train.checkpoint import Every
from gossamer.real.train.job import Diary, FileEntries, Job, StoreEntries
from gossamer.real.train.other_launcher import meet, outer_job
from gossamer.real.train.progress import Follower, TrainingResult, Watch
from gossamer.real.train.resume import resumption
from gossamer.real.train.starting import program_of
from gossamer.real.train.worker import work
from gossamer.runs.result import Row

_DEFAULT_WORKERS = 2
_PROGRAM = program_of("gossamer.real.train.program")
_LOOK_S = 0.5
"""How often worker 0 looks in the store for what the others wrote."""


def train(
    task: str,
    method: str | MethodSpec,
    workers: int | None = None,
    *,
    data: Path | str | None = None,
    injection: Injection | None = None,
    transport: str | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Watch | None = None,
    deadline: float | None = None,
    record: bool = False,
    checkpoint_every: str | None = None,
    resume: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    **choices: Any,
) -> TrainingResult:
    """Train on that many processes of this machine (2); `choices` as for `simulate`.

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
    if resume is not None:
        folder = Path(resume)
    count = number_of_workers(workers)
    settings = make_settings(task, method, cluster_here(count), data=data, **choices)
    check(settings, injection, transport=transport, deadline=deadline, record=record)
    groups = settings.method.groups
    check_checkpoints(checkpoint_every, resume, folder, record=record, groups=groups)
    result = launch(
        settings, data=data, injection=injection, transport=transport, folder=folder,
        on_row=on_row, on_progress=on_progress, deadline=deadline, record=record,
        checkpoint_every=checkpoint_every, is_resumed=resume is not None, callbacks=callbacks,
    )  # fmt: skip
    if result.status == 130:
        raise KeyboardInterrupt
    if result.status != 0:
        raise RunFailed(result.failure or f"its workers ended with exit code {result.status}")
    return result


def number_of_workers(asked: int | None) -> int:
    """As asked, as many as the launcher around this process has started, or two."""
    here = outer_job()
    if here is None:
        if asked is not None and asked < 1:
            raise ConfigurationError(f"-n must be at least 1, got {asked}")
        return _DEFAULT_WORKERS if asked is None else asked
    if asked not in (None, here.size):
        raise ConfigurationError(
            f"{LAUNCHERS[here.kind]} has started {here.size} workers, got -n {asked}; leave it out"
        )
    return here.size


def cluster_here(workers: int, name: str = "custom") -> Cluster:
    """So many processes: of this machine, or as many on each as the launcher has started here."""
    here = outer_job()
    on_one = workers if here is None else here.local_size
    return Cluster(workers=workers, workers_per_machine=on_one, name=name)


def check(
    settings: Settings, injection: Injection | None, *, transport: str | None,
    deadline: float | None, record: bool,
) -> None:  # fmt: skip
    """Refuse what could not be started or replayed, before anything is written."""
    workers, faults, here = settings.cluster.workers, injection or Injection(), outer_job()
    if record:
        _check_recordable(settings, transport, faults)
    if here is None:
        if transport == "mpi":
            raise ConfigurationError(
                "the mpi transport needs workers started by MPI; run "
                f"`mpirun -n {workers} gossamer train ...`"
            )
        Launch(_PROGRAM, workers, transport=transport, injection=faults, deadline_s=deadline)
        return
    faults.check(workers)
    if faults.kills or faults.pauses or deadline is not None:
        instead = "give them to it" if here.kind == "gossamer" else "leave them out"
        raise ConfigurationError(
            f"--kill, --pause and --deadline need workers that gossamer train starts itself, but "
            f"{LAUNCHERS[here.kind]} has started these; {instead}"
        )
    if here.method is not None and parse_method(here.method) != settings.method:
        raise ConfigurationError(
            f"the workers were started for {here.method}, got --method {settings.method}; give "
            "gossamer train the method and its launcher none"
        )


def _check_recordable(settings: Settings, transport: str | None, injection: Injection) -> None:
    reason = None
    if settings.method.method.name == "hogwild":
        reason = "hogwild updates land in pieces without any order; use another method"
    elif settings.method.groups:
        reason = "a group computes its gradients outside of the recorded order; leave out groups="
    elif transport not in (None, "shm"):
        reason = (
            f"the order of events is kept on shared memory only; leave out --transport {transport}"
        )
    elif outer_job() is not None:
        reason = "its workers must share memory; use `gossamer train` without another launcher"
    elif injection.kills:
        reason = "a death leaves memory in a state that no record knows; leave out --kill"
    elif injection.links.is_shaped:
        reason = (
            "what slow links keep back is not in the record; leave out --bandwidth, --latency, "
            "--slow-link and --delay"
        )
    if reason is not None:
        raise ConfigurationError(f"this run cannot be recorded: {reason}")


def check_checkpoints(
    every: str | None, resume: Path | str | None, folder: Path | None, *, record: bool,
    groups: int | str = 0,
) -> None:  # fmt: skip
    """Refuse what could not be kept or gone on from, before anything is written."""
    if record and folder is None:
        raise ConfigurationError("a record needs a run folder; leave out --runs none")
    if every is None and resume is None:
        return
    if every is not None:
        Every.parse(every)
    reason = None
    if folder is None:
        reason = "they need a run folder; leave out --runs none"
    elif record:
        reason = "a recorded run is replayed from its beginning; leave out --record"
    elif groups:
        reason = "the members of a group have no steps of their own to cut at; leave out groups="
    if reason is not None:
        raise ConfigurationError(f"checkpoints cannot be kept: {reason}")


def job_of(
    settings: Settings,
    task: str,
    data: Path | str | None,
    folder: Path,
    *,
    record: bool = False,
    checkpoint_every: str | None = None,
) -> Job:
    """The settings as the workers get them."""
    assert settings.batch
    assert settings.learning_rate
    assert settings.optimiser
    assert settings.epochs
    return Job(
        task=task, data=None if data is None else str(Path(data).resolve()),
        method=str(settings.method), seed=settings.seed, samples=settings.samples,
        batch=settings.batch, learning_rate=settings.learning_rate, optimiser=settings.optimiser,
        schedule=settings.schedule, epochs=settings.epochs, clip=settings.clip,
        split=settings.split, buffers=settings.buffers, threads=settings.threads,
        evaluations=settings.evaluations, folder=str(folder.resolve()), is_recorded=record,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip


def launch(
    settings: Settings,
    *,
    data: Path | str | None = None,
    injection: Injection | None = None,
    transport: str | None = None,
    folder: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
    on_progress: Watch | None = None,
    deadline: float | None = None,
    record: bool = False,
    checkpoint_every: str | None = None,
    is_resumed: bool = False,
    callbacks: Sequence[Callback] = (),
    on_start: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Start the workers, follow what they write, and put it together.

    `on_start` is called once nothing can be refused any more.
    """
    result = _launched(
        settings, data=data, injection=injection or Injection(), transport=transport,
        folder=folder, on_row=on_row, on_progress=on_progress, deadline=deadline, record=record,
        checkpoint_every=checkpoint_every, is_resumed=is_resumed, callbacks=callbacks,
        on_start=on_start,
    )  # fmt: skip
    here = outer_job()
    if result.status == 0 and (here is None or here.rank == 0):
        for callback in callbacks:
            callback.on_end(result.summary)
    return result


def _launched(
    settings: Settings, *, data: Path | str | None, injection: Injection, transport: str | None,
    folder: Path | None, on_row: Callable[[Row], None] | None, on_progress: Watch | None,
    deadline: float | None, record: bool, checkpoint_every: str | None, is_resumed: bool,
    callbacks: Sequence[Callback], on_start: Callable[[], None],
) -> TrainingResult:  # fmt: skip
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-")))
        prepare = functools.partial(
            _prepared, settings, data=data, record=record, checkpoint_every=checkpoint_every,
            is_resumed=is_resumed,
        )  # fmt: skip
        if outer_job() is not None:
            return _take_part(
                settings, prepare, injection=injection, transport=transport, data=data,
                folder=folder, on_row=on_row, on_progress=on_progress, callbacks=callbacks,
                on_start=on_start,
            )  # fmt: skip
        job, history = prepare(folder)
        plan = Launch(
            _PROGRAM, settings.cluster.workers,
            transport=transport, method=job.method, seed=job.seed, folder=folder,
            injection=injection, tolerates_deaths=True, deadline_s=deadline,
            environment=_variables(job),
        )  # fmt: skip
        diaries = [FileEntries(folder, rank) for rank in range(settings.cluster.workers)]
        on_start()
        launcher = Launcher(plan)
        follower = Follower(
            folder, diaries, on_row, on_progress, callbacks=callbacks, deaths=launcher.deaths,
            on_failure=launcher.end,
        )  # fmt: skip
        follower.rows = history
        stack.enter_context(follower)
        status = launcher.run()
        follower.catch_up()
        return follower.result(settings, status)


def _prepared(
    settings: Settings, folder: Path, *, data: Path | str | None, record: bool,
    checkpoint_every: str | None, is_resumed: bool,
) -> tuple[Job, list[Row]]:  # fmt: skip
    """What the workers are to do, kept in the folder, and the rows of a run that goes on."""
    job = job_of(
        settings, settings.task.name, data, folder, record=record,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    history: list[Row] = []
    if is_resumed:
        resumed = resumption(folder, job, settings.cluster.workers)
        job, history = resumed.job, resumed.history
    # Beside and renamed: a run that is killed here must stay one that can be resumed.
    part = folder / ".job.json"
    part.write_text(job.to_json() + "\n", encoding="utf-8")
    part.replace(folder / "job.json")
    return job, history


def _variables(job: Job) -> dict[str, str]:
    return {"GOSSAMER_JOB": job.to_json(), "OMP_NUM_THREADS": str(job.threads)}


def _take_part(
    settings: Settings, prepare: Callable[[Path], tuple[Job, list[Row]]], *,
    injection: Injection, transport: str | None, data: Path | str | None, folder: Path,
    on_row: Callable[[Row], None] | None, on_progress: Watch | None,
    callbacks: Sequence[Callback], on_start: Callable[[], None],
) -> TrainingResult:  # fmt: skip
    """Be one worker of a job; what all of them write goes through the store."""
    company, connection = meet(transport, injection)
    rank, history = company.rank, list[Row]()

    def decided() -> Job:
        job, rows = prepare(folder)
        history.extend(rows)
        return job

    job = company.decide(decided) if rank == 0 else company.be_told(folder, data)
    place = Path(job.folder)
    diary = Diary(job.folder, rank, company.store)
    diaries = [
        FileEntries(place, rank) if other == rank else StoreEntries(company.store, other)
        for other in range(connection.size)
    ]
    with ExitStack() as stack:
        if rank != 0:
            # These stay silent and look once, at the end.
            follower = Follower(place, diaries)
        else:
            follower = Follower(place, diaries, on_row, on_progress, _LOOK_S, callbacks)
            follower.rows = history
            stack.enter_context(follower)
            on_start()
        status = work(job, connection, diary)
        follower.catch_up()
        if status == 0:
            company.leave(len(follower.books))
        return follower.result(settings, status)
