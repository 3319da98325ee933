"""Virtual time: one heap, integer nanoseconds, ties shuffled by the seed.

At every await, even of an operation that has finished, another task may run first. This is how
races are found.
"""

from __future__ import annotations

import hashlib
import random
import signal
import threading
from array import array
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from heapq import heappop, heappush
from types import FrameType
from typing import Any

import torch

from gossamer.errors import Error, ProtocolError, RunFailed, RunOver, Stalled
from gossamer.pending import Pending, check_awaited

SECOND = 1_000_000_000
_MOST_NS = (1 << 63) - 1


class Digest:
    """A fingerprint of the sequence of events: same seed, same digest; integers only, so cheap."""

    __slots__ = ("_buffer", "_codes", "_hash")

    _FLUSH = 8192

    def __init__(self) -> None:
        self._buffer = array("q")
        self._codes: dict[str, int] = {}
        self._hash = hashlib.blake2b(digest_size=16)

    def event(self, now_ns: int, worker: int, label: str) -> None:
        code = self._codes.setdefault(label, len(self._codes))
        buffer = self._buffer
        # A clock beyond 292 years wraps around, so that the run does not fail.
        buffer.append(now_ns & _MOST_NS)
        buffer.append(worker << 20 | code)
        if len(buffer) >= self._FLUSH:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._buffer.tobytes())
        del self._buffer[:]

    def hexdigest(self) -> str:
        self._flush()
        whole = self._hash.copy()
        # The names are hashed, too, because a code only says when its name first appeared.
        whole.update("\n".join(self._codes).encode())
        return whole.hexdigest()


class Timer:
    """A future event. A cancelled one stays on the heap and is skipped."""

    __slots__ = ("arguments", "callback")

    def __init__(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.callback: Callable[..., None] | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        self.callback = None


class SimulatedTask:
    """One coroutine of one worker."""

    __slots__ = (
        "coroutine", "finished", "gradient", "is_main", "parked", "parked_since", "wake", "worker",
    )  # fmt: skip

    def __init__(self, coroutine: Coroutine[Any, Any, Any], worker: int, is_main: bool) -> None:
        self.coroutine = coroutine
        self.worker = worker
        self.is_main = is_main
        """Main tasks must end; side tasks and servers are ended with the run."""
        self.finished: Pending[Any] = Pending("task", worker)
        self.parked: Pending[Any] | None = None
        self.parked_since = 0
        self.gradient: Pending[Any] | None = None
        """The gradient this task has started and not yet awaited."""
        self.wake: Callable[[], None] = lambda: None


class Kernel:
    """The clock, the heap and the tasks."""

    def __init__(self, seed: int) -> None:
        self.now = 0
        self.events = 0
        self.digest = Digest()
        self._tasks: dict[int, list[SimulatedTask]] = {}
        self.current: SimulatedTask | None = None
        self.is_interrupted = False
        self.raised_outside: Exception | None = None
        """The error of an observer that a worker's step has called. The worker has not failed."""
        self._heap: list[tuple[int, float, int, Timer]] = []
        self._sequence = 0
        self._tie = random.Random(f"{seed}/ties").random
        self.on_park: Callable[[SimulatedTask], None] | None = None
        self.on_resume: Callable[[SimulatedTask], None] | None = None
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called between two events, before `KeyboardInterrupt` is raised there."""
        self.resume_at: Callable[[int], int] = lambda worker: 0
        """Until when a worker is paused, as set by the world; 0 when it is not."""

    def at(self, delay_ns: int, callback: Callable[..., None], *arguments: Any) -> Timer:
        """Call back after a delay; equal times are shuffled by the seed."""
        self._sequence += 1
        timer = Timer(callback, arguments)
        heappush(self._heap, (self.now + delay_ns, self._tie(), self._sequence, timer))
        return timer

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], worker: int, *, is_main: bool
    ) -> SimulatedTask:
        task = SimulatedTask(coroutine, worker, is_main)
        task.wake = lambda: self._wake(task)
        own = self._tasks.setdefault(worker, [])
        if len(own) > 16:
            own[:] = [other for other in own if not other.finished.done]
        own.append(task)
        self.at(0, self._step, task)
        return task

    def _wake(self, task: SimulatedTask) -> None:
        self.at(0, self._step, task)

    def _step(self, task: SimulatedTask) -> None:
        """Advance one task to its next await."""
        if task.finished.done:
            return
        paused_until = self.resume_at(task.worker)
        if paused_until > self.now:
            self.at(paused_until - self.now, self._step, task)
            return
        if task.parked is not None:
            if self.on_resume is not None:
                self.on_resume(task)
            task.parked = None
        self.current = task
        try:
            pending = task.coroutine.send(None)
        except StopIteration as stop:
            task.finished.resolve(stop.value)
            self.digest.event(self.now, task.worker, "end")
            return
        except Exception as error:
            self._failed(task, error)
            return
        finally:
            self.current = None
        self._park(task, pending)

    def _park(self, task: SimulatedTask, pending: Pending[Any]) -> None:
        check_awaited(pending, f"worker {task.worker}")
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            raise ProtocolError("torch.no_grad() spans an await and would leak into other workers")
        outstanding = task.gradient
        if outstanding is not None and outstanding is not pending and not outstanding.done:
            if pending.label != "bucket":
                raise ProtocolError(
                    f"worker {task.worker} awaits {pending.label!r} while its gradient is "
                    "outstanding: await the gradient first, in a user's loop the loop is the "
                    "gradient"
                )
        elif pending is outstanding:
            task.gradient = None
        task.parked, task.parked_since = pending, self.now
        self.digest.event(self.now, task.worker, pending.label)
        if self.on_park is not None:
            self.on_park(task)
        pending.when_done(task.wake)

    def _failed(self, task: SimulatedTask, error: Exception) -> None:
        task.finished.fail(error)
        if isinstance(error, RunOver) and not task.is_main:
            return
        if isinstance(error, Error) or error is self.raised_outside:
            raise error
        raise RunFailed(
            f"worker {task.worker} failed at {self.now / SECOND:.6f} s: "
            f"{type(error).__name__}: {error}"
        ) from error

    def end_tasks(self, worker: int) -> None:
        """Close the tasks of a worker that has died."""
        for task in self._tasks.get(worker, ()):
            if not task.finished.done:
                task.coroutine.close()
                task.finished.cancel()

    def interrupt_main(self, worker: int, error: Error) -> None:
        """Raise this in a worker's main task, where it waits for anything but a gradient."""
        for task in self._tasks.get(worker, ()):
            parked = task.parked
            if task.is_main and parked is not None and parked.label != "gradient":
                parked.fail(error)

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` before the next event; a signal handler may call this."""
        self.is_interrupted = True
        heappush(self._heap, (self.now, -1.0, 0, Timer(self._interrupted, ())))

    def _interrupted(self) -> None:
        self.events -= 1  # it is no event of the run
        self.on_interrupt()
        raise KeyboardInterrupt

    def run(self, between: Callable[[], None] = lambda: None, stride: int = 1 << 62) -> None:
        """Run until no event is left; raise `Stalled` if a main task still waits.

        `between` is called after every `stride` events.
        """
        try:
            while self.advance(self.events + stride):
                between()
            waiting = [task for task in self._unfinished() if task.is_main]
            if waiting:
                raise Stalled(self.explain(waiting))
        finally:
            # Python warns of coroutines that are collected before they ran.
            for task in self._unfinished():
                task.coroutine.close()

    def advance(self, until: int) -> bool:
        """Make events until there have been so many; whether any is left."""
        heap = self._heap
        while heap and self.events < until:
            time, _, _, timer = heappop(heap)
            callback = timer.callback
            if callback is not None:
                self.now = time
                self.events += 1
                callback(*timer.arguments)
        return bool(heap)

    def put_in_order(self) -> None:
        """Let the heap be a sorted list, whatever the order in which it was filled."""
        self._heap.sort()

    def _unfinished(self) -> list[SimulatedTask]:
        return [task for own in self._tasks.values() for task in own if not task.finished.done]

    def explain(self, waiting: list[SimulatedTask]) -> str:
        """Say which worker waits, for what, for whom and since when."""
        lines = [f"nobody can go on at {self.now / SECOND:.6f} s:"]
        for task in sorted(waiting, key=lambda task: task.worker)[:16]:
            parked = task.parked
            what = "nothing" if parked is None else parked.label
            whom = "" if parked is None or parked.peer is None else f" of worker {parked.peer}"
            since = task.parked_since / SECOND
            lines.append(f"  worker {task.worker} waits for {what}{whom} since {since:.6f} s")
        if len(waiting) > 16:
            lines.append(f"  and {len(waiting) - 16} more")
        return "\n".join(lines)


@contextmanager
def interrupted_between_events(kernel: Kernel) -> Generator[None]:
    """The first Ctrl-C waits until the present event is over, a second one does not.

    Nothing changes for a program that handles the signal itself or runs this in a thread.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        if kernel.is_interrupted:
            raise KeyboardInterrupt
        kernel.interrupt()

    signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if kernel.is_interrupted:  # after the last event
        raise KeyboardInterrupt
