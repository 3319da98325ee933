"""How coroutines run on real workers: without an event loop, and without a thread per task.

    training thread            main coroutine ── await ──▶ blocks until the operation has ended
                                     │ start
                                     ▼
                               side task (a side loop, a server) runs here until it waits
                                     ┊
    thread of the transport    a message arrives, the operation ends ──▶ the side task runs on, here

    thread of its own          only for a side task that never waits (nobody else would run it on),
                               and for an operation that needs a thread to finish it (`settle`)

A side task continues in whichever thread ends what it waits for: on shared memory that is the
training thread itself, elsewhere the thread that receives. So an exchange needs no change of
threads, which would take 15 to 30 microseconds: a tenth of a small model's step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from gossamer.errors import PeerLost, RunFailed, RunOver
from gossamer.mailbox import Receive
from gossamer.observe.observer import SECOND, Span
from gossamer.pending import Pending, check_awaited
from gossamer.real.transports.transport import Stopped, StopToken

T = TypeVar("T")
_IN_A_ROW = 64
"""After so many operations in a row that ended at once, a loop counts as one that never waits."""
_PAUSE_S = 1e-4


class Turns(Protocol):
    """Says when a thread of a worker may go on; a record numbers these turns."""

    def enter(self, kind: str, source: int = -1) -> None: ...

    def leave(self) -> None: ...


class Free:
    """Without a record every thread goes on at once."""

    def enter(self, kind: str, source: int = -1) -> None:
        pass

    def leave(self) -> None:
        pass


class Waiting:
    """What each task waits for, from whom and since when. A signal asks for it."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Pending[Any], float]] = {}

    def begin(self, task: str, pending: Pending[Any], now: float) -> None:
        self._open[task] = (pending, now)

    def end(self, task: str) -> None:
        self._open.pop(task, None)

    @contextmanager
    def shown(self, what: str) -> Generator[None]:
        """Show a wait that is not an operation of the method."""
        self.begin("main", Pending(what), time.monotonic())
        try:
            yield
        finally:
            self.end("main")

    def explain(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {"task": task, "waits_for": pending.label, "peer": pending.peer,
             "since_seconds": round(now - since, 3)}
            for task, (pending, since) in list(self._open.items())
        ]  # fmt: skip


def _next_of(coroutine: Coroutine[Any, Any, Any]) -> Pending[Any]:
    """Run a coroutine up to what it awaits next."""
    found = coroutine.send(None)
    check_awaited(found, "it")
    return found


class Driver:
    """Runs the coroutines of one process."""

    def __init__(self, stop: StopToken) -> None:
        self.stop = stop
        self.waiting = Waiting()
        self.on_wait: Callable[[str, int | None, Span], None] = lambda what, peer, span: None
        """Called with what the main coroutine waited for, from whom, from when and until when."""
        self.turns: Turns = Free()
        self.is_replayed = False
        """In a replay the record says when a free loop goes on."""
        self._free: list[_SideTask] = []
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """A side task has failed: whoever waits next raises the error."""
        if self._failure is None:
            self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise RunFailed(f"a side task failed: {self._failure}") from self._failure
        if self.stop.is_set or self.stop.failure is not None:
            self.stop.check()

    def drive(self, coroutine: Coroutine[Any, Any, T], task: str, at_end: Callable[[], None]) -> T:
        """Run a coroutine to its end in this thread; `at_end` belongs to its last turn."""
        self.turns.enter("run")
        try:
            while True:
                pending = _next_of(coroutine)
                if not pending.done:
                    self._wait_a_turn(pending, task)
        except StopIteration as end:
            at_end()
            return end.value
        finally:
            self.turns.leave()
            coroutine.close()

    def end(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """No gradient is computed any more: let the coroutine do what it can do without one."""
        try:
            pending = coroutine.throw(RunOver())
            while True:
                self.wait(pending)
                pending = _next_of(coroutine)
        except (RunOver, StopIteration):
            return

    def _wait_a_turn(self, pending: Pending[Any], task: str) -> None:
        """Wait, and let others have their turns meanwhile."""
        self.turns.leave()
        try:
            self.wait(pending, task)
        finally:
            self.turns.enter("run")

    def wait(
        self, pending: Pending[Any], task: str = "main", *, is_booked: bool = True
    ) -> None:  # fmt: skip
        """Wait until the operation has ended, whatever its result.

        A wait for a part of another operation is not booked, because the whole operation is.
        """
        if pending.done:
            return
        began_ns = time.monotonic_ns()
        self.waiting.begin(task, pending, began_ns / SECOND)
        try:
            if pending.settle is not None:
                pending.settle()
            if not pending.done:
                self.block(pending)
        finally:
            self.waiting.end(task)
            # A gradient is computed by the thread that awaits it, which is no wait.
            if is_booked and pending.label != "gradient":
                self.on_wait(pending.label, pending.peer, (began_ns, time.monotonic_ns()))

    def block(self, pending: Pending[Any]) -> None:
        """Wait for what other threads or processes bring."""
        gate = threading.Lock()
        gate.acquire()
        pending.when_done(gate.release)
        while not gate.acquire(timeout=StopToken.patience):
            self.check()

    def begin(self, task: Coroutine[Any, Any, None], result: Pending[Any]) -> None:
        """Run a task that makes this result up to its first wait; the thread that awaits the result
        runs the rest. What the task waits for is not booked, as it is a part of the result."""
        try:
            awaited = _next_of(task)
        except StopIteration:
            return

        def finish() -> None:
            nonlocal awaited
            try:
                while True:
                    self.wait(awaited, "group", is_booked=False)
                    awaited = _next_of(task)
            except StopIteration:
                return

        result.settle = finish

    # ------------------------------------------------------------------ side tasks

    def start(self, coroutine: Coroutine[Any, Any, T], task: str) -> Pending[T]:
        """Run a side task here until it waits; whichever thread ends that wait continues it."""
        finished: Pending[T] = Pending(task)
        _SideTask(self, coroutine, task, finished).advance()
        return finished

    def set_free(self, loop: _SideTask) -> None:
        """Give a loop that never waits a thread of its own, because the thread that woke it has
        other things to do."""
        if loop not in self._free:
            self._free.append(loop)
        if not self.is_replayed:
            number = self._free.index(loop)
            run, name = partial(self._run_freely, number), f"gossamer free loop {number}"
            threading.Thread(target=run, name=name, daemon=True).start()

    def _run_freely(self, number: int) -> None:
        try:
            while not self.go_on_freely(number):
                # Without a pause the loop would lock what it shares again before the others wake.
                time.sleep(_PAUSE_S)
        except Stopped:
            pass

    def go_on_freely(self, number: int) -> bool:
        """Make one operation of that free loop. Returns whether the loop waits now or has ended."""
        self.turns.enter("free", number)
        try:
            return self._free[number].advance_by(1)
        finally:
            self.turns.leave()

    @staticmethod
    def settle_elsewhere(
        pending: Pending[Any], task: str, then: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Finish the operation in a thread of its own, because the caller must not wait for it."""
        settle = pending.settle
        assert settle is not None

        def run() -> None:
            try:
                settle()
            except Stopped:
                return
            except Exception as error:
                pending.fail(error)
            then()

        threading.Thread(target=run, name=f"gossamer {task}", daemon=True).start()


class _SideTask:
    """A coroutine that continues in whichever thread has ended its wait."""

    def __init__(
        self, driver: Driver, coroutine: Coroutine[Any, Any, Any], name: str,
        finished: Pending[Any],
    ) -> None:  # fmt: skip
        self._driver = driver
        self._coroutine = coroutine
        self._name = name
        self._finished = finished

    def advance(self) -> None:
        """Run the task until it ends or waits for something that others bring; a loop that does
        neither gets a thread of its own."""
        if not self.advance_by(_IN_A_ROW):
            self._driver.set_free(self)

    def advance_by(self, most: int) -> bool:
        """Run the task through at most so many operations in a row that ended at once. Returns
        whether it waits or has ended. A message counts as waited for even if it was there."""
        driver, left = self._driver, most
        try:
            while not driver.stop.is_set:
                pending = _next_of(self._coroutine)
                if pending.done:
                    left = most if type(pending) is Receive else left - 1
                    if not left:
                        return False
                    continue
                if pending.settle is not None:
                    # Finishing may take long, or need frames that only this thread can receive.
                    driver.settle_elsewhere(pending, self._name, self.advance)
                    return True
                driver.waiting.begin(self._name, pending, time.monotonic())
                pending.when_done(self._resume)
                return True
        except StopIteration as end:
            self._finished.resolve(end.value)
        except Stopped:
            pass
        except Exception as error:
            self._finished.fail(error)
            if not isinstance(error, PeerLost):
                driver.fail(error)
        return True

    def _resume(self) -> None:
        self._driver.waiting.end(self._name)
        self.advance()
