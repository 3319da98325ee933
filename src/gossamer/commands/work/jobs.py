"""The one place that runs a batch of independent simulations, one after another or in processes.

A job describes one run. `run_jobs` takes jobs and yields their answers in the order of the jobs; a
`JobWatch` hears of every evaluation and of every job that ends, and can stop the batch.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any, Generic, Protocol, TypeVar, cast

from gossamer.commands.work.simulations import EngineCache, execute
from gossamer.config.settings import Settings
from gossamer.errors import Error, RunFailed
from gossamer.runs.folder import RunFolder
from gossamer.runs.result import Row

_END_SECONDS = 5.0
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
OnRow = Callable[[Row], None]


class OutOfMinutes(Error):
    """The time of a batch is over: the job that is running ends here, without an answer."""


class Job(Protocol[Answer_co]):
    """One run of a batch. A job that runs in another process must be plain data."""

    @property
    def label(self) -> str:
        """The name of the job, which no other job of the batch has."""
        ...

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Answer_co:
        """Do the work. `on_row` hears of evaluations; `is_over` says whether to end early."""
        ...


@dataclass(frozen=True)
class SimulationJob:
    """One simulated run. An error that is tolerated is an answer about the run."""

    label: str
    settings: Settings
    folder: RunFolder | None = None
    trace: bool = False
    tolerated: tuple[type[Error], ...] = ()

    def run(self, engines: EngineCache, on_row: OnRow, is_over: Callable[[], bool]) -> Any:
        """Run the simulation and return its `Result`, or the error that was tolerated."""

        def watch(row: Row) -> None:
            on_row(row)
            # After the last evaluation no time is left to save.
            if row["samples"] < self.settings.samples and is_over():
                raise OutOfMinutes

        try:
            return execute(
                self.settings, folder=self.folder, on_row=watch, engines=engines, trace=self.trace
            )
        except self.tolerated as error:
            return error


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

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def run_jobs(
    jobs: Iterable[Job[Answer]], watch: JobWatch[Answer] | None = None, *, processes: int = 1,
    engines: EngineCache | None = None,
) -> Iterator[Answer]:  # fmt: skip
    """Run jobs and yield their answers in order; after the deadline the rest is left out. Jobs that
    run one after another share the given engines."""
    watch = watch or JobWatch()
    if processes == 1:
        return _run_here(jobs, watch, engines or EngineCache())
    return _run_beside(list(jobs), watch, processes)


def _run_here(
    jobs: Iterable[Job[Answer]], watch: JobWatch[Answer], engines: EngineCache
) -> Iterator[Answer]:
    for job in jobs:
        if watch.is_over():
            return
        try:
            answer = job.run(engines, lambda row, job=job: watch.on_row(job, row), watch.is_over)
        except OutOfMinutes:
            return
        watch.on_done(job, answer)
        yield answer


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _JobProcess:
    place: int
    job: Job[Any]
    process: SpawnProcess
    reports: Connection

    def end(self) -> None:
        """End the process at once. What it has reported already is kept."""
        self.process.terminate()
        self.process.join(_END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.reports.close()

    def hear(self, watch: JobWatch[Any], answers: dict[int, Any]) -> bool:
        """Take one report of the process; return whether it was the last."""
        label = self.job.label
        try:
            kind, said = self.reports.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            raise RunFailed(f"{label}: its process ended with exit code {code}") from None
        if kind == "row":
            watch.on_row(self.job, cast(Row, said))
            return False
        if kind == "failed":
            raise RunFailed(f"{label}: {said}")
        if kind == "done":
            answers[self.place] = said
            watch.on_done(self.job, said)
        return True


def _run_beside(
    jobs: list[Job[Answer]], watch: JobWatch[Answer], processes: int
) -> Iterator[Answer]:
    """Run several jobs at a time, each in its own process. No process outlives this function."""
    is_over = multiprocessing.get_context("spawn").Event()
    waiting, running = list(enumerate(jobs)), list[_JobProcess]()
    answers: dict[int, Answer] = {}
    following = 0
    try:
        while waiting or running:
            if watch.is_over():
                is_over.set()
                waiting.clear()
            while waiting and len(running) < processes:
                running.append(_start(*waiting.pop(0), is_over))
            left = watch.deadline - time.monotonic()
            # Without a deadline, or after it, nothing but a report ends the wait.
            ready = wait([one.reports for one in running], left if 0 < left < 1e9 else None)
            for one in [one for one in running if one.reports in ready]:
                if one.hear(watch, answers):
                    running.remove(one)
                    one.process.join()
                    one.reports.close()
            while following in answers:
                yield answers.pop(following)
                following += 1
    finally:
        for one in running:
            one.end()


def _start(place: int, job: Job[Any], is_over: Event) -> _JobProcess:
    context = multiprocessing.get_context("spawn")
    reports, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_there, args=(job, is_over, sender), daemon=True)
    # The process never sees Ctrl-C: its parent does, and ends it.
    with handling_interrupts(signal.SIG_IGN):
        process.start()
    # Only the process holds this end now, so that its death ends the pipe.
    sender.close()
    return _JobProcess(place, job, process, reports)


def _run_there(job: Job[Any], is_over: Event, sender: Connection) -> None:
    """In the process of a job: report every evaluation, then the answer or why there is none."""

    def on_row(row: Row) -> None:
        try:
            sender.send(("row", row))
        except OSError:
            raise OutOfMinutes from None  # the parent was killed, and nobody listens any more

    try:
        last = ("done", job.run(EngineCache(), on_row, is_over.is_set))
    except OutOfMinutes:
        last = ("stopped", None)
    except Exception as error:
        # The error is sent as text, because not every error can be rebuilt in another process.
        last = ("failed", f"{type(error).__name__}: {error}")
    try:
        sender.send(last)
    except OSError:
        pass  # the parent was killed


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
