"""The one place that runs a batch of independent simulations, one after another or in processes.

A job describes one run. A `JobPool` takes jobs and yields their answers in the order of the jobs; a
`JobWatch` hears of every evaluation and of every job that ends, and can stop the batch. The answers
are the same for every number of processes: a job computes the same in any of them, and whoever
decides by answers gets them in order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from gossamer.commands.work.parcel import pack, pack_task, unpack
from gossamer.commands.work.simulations import EngineCache, Job, OutOfMinutes
from gossamer.errors import RunFailed
from gossamer.observe.progress import warn
from gossamer.runs.result import Row
from gossamer.script.fork_server import ForkServer
from gossamer.specs import check_range
from gossamer.tasks import Task

_END_SECONDS = 2.0
_ASK_SECONDS = 0.2
POOL_PROCESS = "gossamer.commands.work.pool_process"
# An interrupt during the imports ends the process without a word.
_PROGRAM = """\
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
sys.path[:] = json.loads(sys.argv[2])
from gossamer.commands.work.pool_process import serve
serve(int(sys.argv[1]))
"""
Answer = TypeVar("Answer")


def default_jobs() -> int:
    """The number of processes that uses this machine: all cores up to two, else one fewer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(min(cores or 1, 2), (cores or 1) - 1)


def number_of_jobs(asked: int | None) -> int:
    """The number of processes that a user asked for; without a wish what suits the machine."""
    if asked is None:
        return default_jobs()
    check_range("jobs", asked, 1)
    return asked


def pool_for(task: Task, asked: int | None) -> JobPool:
    """A pool of so many processes, or one of this process alone where the task cannot travel."""
    pool = JobPool(number_of_jobs(asked))
    why = "" if pool.limit == 1 else pool.obstacle(task)
    if not why:
        return pool
    warn(
        f"one job at a time: {task.name} has functions that other processes cannot import ({why}); "
        "give it as 'my.py:NAME' to use all cores"
    )
    return JobPool()


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class JobWatch(Generic[Answer]):
    """Who hears what the jobs of a batch report, and when the batch must end."""

    on_row: Callable[[Any, Row], None] = _ignore
    on_done: Callable[[Any, Answer], None] = _ignore
    """Hears of a job as soon as it ends, also when an earlier job is still running."""
    deadline: float = float("inf")
    """A moment of the monotonic clock."""
    is_stopped: Callable[[], bool] | None = None
    """Whether somebody wants the batch to end early; jobs end as they do after the deadline."""

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline or self.wants_end()

    def wants_end(self) -> bool:
        return self.is_stopped is not None and self.is_stopped()


def run_jobs(
    jobs: Iterable[Job[Answer] | None], watch: JobWatch[Answer] | None = None, *,
    processes: int = 1, engines: EngineCache | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """Run one batch in a pool of its own."""
    with JobPool(processes, engines=engines) as pool:
        yield from pool.run(jobs, watch)


class JobPool:
    """Runs batches of jobs; its processes are started when they are needed, and end with it."""

    server: ClassVar[ForkServer | None] = None
    """One that was started before; a pool leaves it as it is."""

    def __init__(self, processes: int = 1, *, engines: EngineCache | None = None) -> None:
        """Jobs that run in this process share the given engines."""
        self.limit = processes
        self._engines = engines or EngineCache()
        self._processes: list[_PoolProcess] = []
        self._server: ForkServer | None = None
        self._tasks: dict[int, Task] = {}

    def __enter__(self) -> JobPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(self._processes)
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that are alive."""
        return [one.process.pid for one in self._processes]

    def obstacle(self, task: Task) -> str:
        """Why jobs with this task cannot run in other processes; empty where they can."""
        try:
            pack_task(task)
        except Exception as error:  # pickle raises whatever the task's own objects raise
            return re.sub(" at 0x[0-9a-f]+", "", str(error)) or type(error).__name__
        return ""

    def run(
        self, jobs: Iterable[Job[Answer] | None], watch: JobWatch[Answer] | None = None
    ) -> Iterator[Answer]:
        """Run jobs and yield their answers in order; after the deadline the rest is left out.

        A job is taken from `jobs` when it can start, and not before all answers that are known in
        order were yielded. None in its place says that the next job depends on one that is running:
        `jobs` is asked again when another has ended.
        """
        watch = watch or JobWatch()
        return self._run_here(jobs, watch) if self.limit == 1 else self._run_beside(jobs, watch)

    def _run_here(
        self, jobs: Iterable[Job[Answer] | None], watch: JobWatch[Answer]
    ) -> Iterator[Answer]:
        for job in jobs:
            if watch.is_over():
                return
            assert job is not None, "nothing is running that this job could depend on"

            def on_row(row: Row, job: Job[Answer] = job) -> None:
                watch.on_row(job, row)

            try:
                answer = job.run(self._engines, on_row, watch.is_over)
            except OutOfMinutes:
                return
            watch.on_done(job, answer)
            yield answer

    # ------------------------------------------------------------------ processes

    def _run_beside(
        self, jobs: Iterable[Job[Answer] | None], watch: JobWatch[Answer]
    ) -> Iterator[Answer]:
        waiting, place = iter(jobs), 0
        answers: dict[int, Answer | _Failure] = {}
        following = 0
        try:
            while True:
                while following in answers:
                    answer = answers.pop(following)
                    if isinstance(answer, _Failure):
                        raise answer.error
                    yield answer
                    following += 1
                # After a failure nothing starts: only answers before it still count.
                has_failed = any(isinstance(one, _Failure) for one in answers.values())
                while not has_failed and not watch.is_over() and self._has_room():
                    if (job := next(waiting, None)) is None:
                        break
                    self._start(place, job, watch.deadline)
                    place += 1
                if not self._busy():
                    return
                for one in self._heard(watch):
                    self._hear(one, watch, answers)
        finally:
            self._end(self._busy())

    def _busy(self) -> list[_PoolProcess]:
        return [one for one in self._processes if one.job is not None]

    def _has_room(self) -> bool:
        return len(self._busy()) < self.limit

    def _heard(self, watch: JobWatch[Any]) -> list[_PoolProcess]:
        """Wait for the next reports; empty where something else is to be looked at before."""
        busy = self._busy()
        # Without a deadline, or after it, nothing but a report ends the wait.
        left = watch.deadline - time.monotonic()
        longest = left if 0 < left < 1e9 else None
        if watch.is_stopped is not None:
            longest = min(_ASK_SECONDS, longest or _ASK_SECONDS)
            if watch.wants_end():
                for one in busy:
                    one.stop()
        ready = wait([one.connection for one in busy], longest)
        return [one for one in busy if one.connection in ready]

    def _started(self) -> _PoolProcess:
        """A new process: a fork where the system is known to bear it."""
        if sys.platform != "linux":
            return _PoolProcess.fresh()
        server = JobPool.server or self._server
        if server is None:
            server = self._server = ForkServer(POOL_PROCESS)
        return _PoolProcess.fork(server)

    def _start(self, place: int, job: Job[Any], deadline: float) -> None:
        idle = [one for one in self._processes if one.job is None]
        process = idle[0] if idle else self._started()
        if not idle:
            self._processes.append(process)
        needed: list[int] = []

        def number_of(task: Task) -> int:
            known = [number for number, one in self._tasks.items() if one is task]
            number = known[0] if known else len(self._tasks)
            self._tasks[number] = task
            needed.append(number)
            return number

        data = pack((job, deadline), number_of)
        for number in sorted({*needed} - process.known):
            process.known.add(number)
            told = pack_task(self._tasks[number])
            process.connection.send(("task", number, told))
        process.connection.send(("job", 0, data))
        process.place, process.job, process.is_told = place, job, False

    def _hear(self, process: _PoolProcess, watch: JobWatch[Any], answers: dict[int, Any]) -> None:
        """Take one report of a process."""
        job, place = process.job, process.place
        assert job is not None
        try:
            kind, *said = unpack(process.connection.recv_bytes(), self._tasks)
        except (EOFError, OSError):
            code = process.end()
            self._processes.remove(process)
            answers[place] = _Failure(
                RunFailed(
                    f"{job.label}: its process ended with exit code {code}; --jobs 1 runs "
                    "everything in one process"
                )
            )
            return
        if kind == "row":
            watch.on_row(job, said[0])
            return
        process.job = None
        if kind == "failed":
            answers[place] = _Failure(said[0])
        elif kind == "done":
            answer, failures = said
            if job.folder is not None:
                job.folder.add_failures(failures)
            answers[place] = answer
            watch.on_done(job, answer)

    def _end(self, processes: list[_PoolProcess]) -> None:
        """Let these processes end at once. What they have written already is kept."""
        with handling_interrupts(signal.SIG_IGN):
            for one in processes:
                # A process that is interrupted says in its run folder how the run ended.
                one.process.send_signal(signal.SIGKILL if one.job is None else signal.SIGINT)
            for one in processes:
                one.end()
        self._processes = [one for one in self._processes if one not in processes]


@dataclass(frozen=True)
class _Failure:
    error: Exception


class _Handle(Protocol):
    """What `subprocess.Popen` has, of a process that another process has started."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class _Fork:
    pid: int
    server: ForkServer

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        while (status := self.server.wait_for(self.pid, timeout or _END_SECONDS)) is None:
            if timeout is not None:
                raise subprocess.TimeoutExpired(POOL_PROCESS, timeout)
        return status


@dataclass(eq=False)
class _PoolProcess:
    process: _Handle
    connection: Connection
    known: set[int] = field(default_factory=set[int])
    """The numbers of the tasks that this process has."""
    job: Job[Any] | None = None
    place: int = 0
    is_told: bool = False
    """Whether it has been told that its job shall end early."""

    @staticmethod
    def fork(server: ForkServer) -> _PoolProcess:
        """Let the server fork: the imports, which take seconds, were made once."""
        ours, theirs = Pipe()
        with theirs:
            pid = server.start((), os.environ, 1, theirs, 1, 2)
        return _PoolProcess._greeted(_Fork(pid, server), ours)

    @staticmethod
    def fresh() -> _PoolProcess:
        """Start a fresh interpreter, which does not run the user's program a second time."""
        ours, theirs = Pipe()
        words = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process = subprocess.Popen(
                # In a process group of its own it does not see the Ctrl-C of the terminal.
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Only the process holds this end now, so that its death ends the connection.
        theirs.close()
        return _PoolProcess._greeted(process, ours)

    @staticmethod
    def _greeted(process: _Handle, ours: Connection) -> _PoolProcess:
        ours.send((sys.argv, sys.path, torch.get_num_threads()))
        return _PoolProcess(process, ours)

    def stop(self) -> None:
        """Let the job end early, once."""
        if not self.is_told:
            self.is_told = True
            with suppress(OSError):
                self.connection.send(("stop", 0, b""))

    def end(self) -> int:
        """Wait until the process has ended, which was asked to; return its exit code."""
        try:
            # The first interrupt waits until an event of the simulation is over, a second does not.
            for harder in (signal.SIGINT, signal.SIGKILL):
                try:
                    return self.process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    self.process.send_signal(harder)
            return self.process.wait()
        finally:
            self.connection.close()


@contextmanager
def handling_interrupts(handler: Any) -> Generator[None]:
    """Let this handler have Ctrl-C inside the context."""
    try:
        before = signal.signal(signal.SIGINT, handler)
    except ValueError:
        # Only the main thread may set a handler; elsewhere nobody presses Ctrl-C.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
