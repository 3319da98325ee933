"""One process of a pool: it runs job after job, and tells its parent of every evaluation."""

from __future__ import annotations

import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from gossamer.commands.work.parcel import pack, unpack, unpack_task
from gossamer.commands.work.simulations import EngineCache, Job, OutOfMinutes
from gossamer.errors import Error, RunFailed
from gossamer.runs.result import Row
from gossamer.tasks import Task


def serve(descriptor: int) -> None:
    """Answer the parent until it closes the connection or interrupts this process."""
    try:
        PoolProcess(Connection(descriptor)).serve()
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the parent is gone, or wants this process to be


class PoolProcess:
    """The tasks and the engines of a process live as long as it does."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._tasks: dict[int, Task] = {}
        self._engines = EngineCache()

    def serve(self) -> None:
        # Ctrl-C reaches this process only through its parent.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv, sys.path[:], threads = self._parent.recv()
        torch.set_num_threads(threads)
        while True:
            kind, number, data = self._parent.recv()
            if kind == "task":
                self._tasks[number] = unpack_task(data)
            elif kind == "job":
                self._answer(*unpack(data, self._tasks))
            # Else the parent said "stop" when the job was at its end already.

    def _answer(self, job: Job[object], deadline: float) -> None:
        def on_row(row: Row) -> None:
            try:
                self._send("row", row)
            except OSError:
                raise OutOfMinutes from None  # the parent was killed, and nobody listens any more

        try:
            # The monotonic clock is the same in all processes of a machine. During a job the parent
            # says one thing at most, "stop".
            answer = job.run(
                self._engines, on_row, lambda: time.monotonic() > deadline or self._parent.poll()
            )
            self._send("done", answer, job.folder and job.folder.failures)
        except OutOfMinutes:
            self._send("stopped")
        except Error as error:
            self._send("failed", error)
        except Exception as error:
            self._send("failed", RunFailed(f"{job.label}: {type(error).__name__}: {error}"))

    def _send(self, *said: object) -> None:
        self._parent.send_bytes(pack(said, self._number_of))

    def _number_of(self, task: Task) -> int:
        return next(number for number, one in self._tasks.items() if one is task)
