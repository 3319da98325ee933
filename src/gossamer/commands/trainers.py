"""Train the cells of a table: one after another here, or several at a time in processes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import cast

from gossamer.commands.execute import Engines, execute
from gossamer.errors import Error, RunFailed
from gossamer.runs.result import Row
from gossamer.studies.reproductions.trainings import CellTraining, Problem, Trained
from gossamer.tasks import Task

_END_SECONDS = 5.0


class Stopped(Error):
    """Time is over: a training that is under way ends at this evaluation, without a result."""


@dataclass(frozen=True)
class Site:
    """Where trainings run."""

    problem: Problem
    data: Path | None
    device: str
    threads: int


@dataclass(frozen=True)
class Watch:
    """What trainings tell while they run, and until when they may."""

    on_row: Callable[[CellTraining, Row], None]
    on_done: Callable[[CellTraining, Trained], None]
    deadline: float = float("inf")
    """On the monotonic clock."""

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline


def train_here(work: Sequence[CellTraining], task: Task, site: Site, watch: Watch) -> None:
    """One after another in this process, until done or out of time."""
    engines = Engines()
    for training in work:
        if watch.is_over():
            return
        try:
            trained = _train(training, task, site, engines, watch.on_row, watch.is_over)
        except Stopped:
            return
        watch.on_done(training, trained)


def _train(
    training: CellTraining,
    task: Task,
    site: Site,
    engines: Engines,
    on_row: Callable[[CellTraining, Row], None],
    is_over: Callable[[], bool],
) -> Trained:
    settings = training.settings(task, site.device, site.threads)

    def told(row: Row) -> None:
        on_row(training, row)
        # After the last evaluation nothing is left to save time on.
        if row["samples"] < settings.samples and is_over():
            raise Stopped

    return Trained.of(training, execute(settings, folder=None, on_row=told, engines=engines))


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True)
class _Child:
    training: CellTraining
    process: SpawnProcess
    told: Connection

    def end(self) -> None:
        """At once; what it has told already is kept."""
        self.process.terminate()
        self.process.join(_END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.told.close()


def train_side_by_side(work: Sequence[CellTraining], jobs: int, site: Site, watch: Watch) -> None:
    """Up to `jobs` at a time, each in a process of its own; all of them end with this one."""
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    waiting, running = list(work), list[_Child]()
    try:
        while waiting or running:
            if watch.is_over():
                is_over.set()
                waiting.clear()
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), site, is_over))
            ready = wait([child.told for child in running], _seconds_left(watch))
            for child in [child for child in running if child.told in ready]:
                if _hear(child, watch):
                    running.remove(child)
                    child.process.join()
                    child.told.close()
    finally:
        for child in running:
            child.end()


def _seconds_left(watch: Watch) -> float | None:
    """Until the children must be told to stop; None: that will not be, or they have been told."""
    left = watch.deadline - time.monotonic()
    return left if 0.0 < left < float("inf") else None


def _hear(child: _Child, watch: Watch) -> bool:
    """One message of a child; True when it was the last."""
    label = child.training.label
    try:
        said = child.told.recv()
    except EOFError:
        child.process.join()
        code = child.process.exitcode
        raise RunFailed(f"{label}: its process ended with exit code {code}") from None
    if isinstance(said, Trained):
        watch.on_done(child.training, said)
        return True
    if isinstance(said, BaseException):
        if isinstance(said, Stopped):
            return True
        raise RunFailed(f"{label}: {said}") from said
    watch.on_row(child.training, cast(Row, said))
    return False


def _start(training: CellTraining, site: Site, is_over: Event) -> _Child:
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(
        target=_train_there, args=(training, site, is_over, telling), daemon=True
    )
    with _uninterruptible():
        process.start()
    # Only the child holds this end now, so that its death is heard as the end of the pipe.
    telling.close()
    return _Child(training, process, told)


@contextmanager
def _uninterruptible() -> Generator[None]:
    """A process that is started here never sees Ctrl-C: its parent does, and ends it."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        # Only the main thread may do this; elsewhere nobody presses Ctrl-C.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train_there(training: CellTraining, site: Site, is_over: Event, telling: Connection) -> None:
    """In a child: every evaluation and the result, or the reason why there is none, is told."""

    def on_row(_training: CellTraining, row: Row) -> None:
        try:
            telling.send(row)
        except OSError:
            # Nobody listens any more: the parent was killed.
            raise Stopped from None

    try:
        task = site.problem.load(site.data)
        last = _train(training, task, site, Engines(), on_row, is_over.is_set)
    except Stopped as stopped:
        last = stopped
    except Exception as error:
        # As text: not every error can be rebuilt in another process.
        last = RunFailed(f"{type(error).__name__}: {error}")
    try:
        telling.send(last)
    except OSError:
        # As above, and now there is nothing left to do.
        pass
