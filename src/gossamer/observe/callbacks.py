"""Callbacks: what a run tells a user's program while it runs.

    class Printer(gossamer.Callback):
        def on_evaluation(self, row):
            print(row["epochs"], row["loss"])

    gossamer.simulate("digits-mlp", "ad_psgd", callbacks=[Printer()])

Override the functions of interest. An error raised in a callback ends the run. Times are seconds
since the beginning of the run: virtual ones in a simulation, real ones elsewhere.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gossamer.observe.observer import SECOND, Observer, Row, Span


class Callback:
    """Ignores all events; a subclass overrides those that it needs."""

    def on_step(self, worker: int, step: int, seconds: float, loss: float | None) -> None:
        """A worker has computed a gradient, its `step`-th counted from 1."""

    def on_exchange(self, worker: int, peer: int, seconds: float, age: int | None) -> None:
        """A worker has got a peer's model. `age` counts the steps that the peer has made since; it
        is None if it is not known."""

    def on_staleness(self, end: int, staleness: int, seconds: float) -> None:
        """A gradient was applied to the replica of this end (a worker, or a server numbered after
        the workers). It missed `staleness` updates of that replica."""

    def on_drop(self, end: int, seconds: float) -> None:
        """An end has dropped a gradient that came too late."""

    def on_membership(self, worker: int, is_alive: bool, seconds: float) -> None:
        """The others have learnt that a worker is gone, or that one has come or is back."""

    def on_evaluation(self, row: dict[str, Any]) -> None:
        """The output model was evaluated; the row is the line in metrics.jsonl."""

    def on_checkpoint(self, place: str, seconds: float) -> None:
        """A checkpoint is complete."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run has ended by itself; the summary is that of summary.json."""


Event = Callable[[Callback], None]


class Callbacks(Observer):
    """Calls the callbacks of one process, never two at a time.

    Steps and the end are reported in the thread of the loop, which waits for its turn. If a thread
    already calls a callback, every other event is left to that thread: a receiving thread must not
    wait, because the callback may itself wait for what only the receiving thread can receive.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._queue: deque[Event] = deque()
        self._calling = threading.RLock()
        self._began_ns = 0
        self._is_over = False
        self.is_muted = False
        """Whether what happens is made again and has been told before."""
        self.steps: Counter[int] = Counter()
        """How many steps each worker has made."""
        self.on_failure: Callable[[Exception], None] | None = None
        """Called with an error of a callback that no call of the loop can raise."""

    def begin(self, now_ns: int) -> None:
        """The seconds are counted from this moment of the clock."""
        self._began_ns = now_ns

    def close(self) -> None:
        """No callback is called any more."""
        self._is_over = True

    def seconds(self, at_ns: int) -> float:
        return (at_ns - self._began_ns) / SECOND

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        self.steps[worker] += 1
        if self.is_muted:
            return
        step, seconds = self.steps[worker], self.seconds(span[1])
        shown = None if loss is None else float(loss)
        self._now(lambda callback: callback.on_step(worker, step, seconds, shown))

    def exchanged(
        self, worker: int, peer: int | None, at_ns: int, *, share: float = 1.0,
        age: int | None = None,
    ) -> None:  # fmt: skip
        seconds = self.seconds(at_ns)
        if peer is not None:
            self._soon(lambda callback: callback.on_exchange(worker, peer, seconds, age))

    def stale(self, end: int, missed: int, at_ns: int, missed_of_all: int | None = None) -> None:
        seconds = self.seconds(at_ns)
        self._soon(lambda callback: callback.on_staleness(end, missed, seconds))

    def observed(self, end: int, what: str, value: float, at_ns: int) -> None:
        seconds = self.seconds(at_ns)
        if what == "dropped":
            self._soon(lambda callback: callback.on_drop(end, seconds))

    def lost(self, worker: int, at_ns: int) -> None:
        seconds = self.seconds(at_ns)
        self._soon(lambda callback: callback.on_membership(worker, False, seconds))

    def joined(self, worker: int, at_ns: int) -> None:
        seconds = self.seconds(at_ns)
        self._soon(lambda callback: callback.on_membership(worker, True, seconds))

    def evaluated(self, row: Row) -> None:
        self._now(lambda callback: callback.on_evaluation(row))

    def ended(self, summary: Row) -> None:
        self._now(lambda callback: callback.on_end(summary))
        self.close()

    def _now(self, event: Event) -> None:
        with self._calling:
            self._catch_up()
            self._call(event)
        self._try_to_catch_up()

    def _soon(self, event: Event) -> None:
        self._queue.append(event)
        try:
            self._try_to_catch_up()
        except Exception as error:
            # If it were raised here, it would end a receiving thread or the method's coroutine.
            if self.on_failure is None:
                raise
            self.on_failure(error)

    def _try_to_catch_up(self) -> None:
        """This is repeated after each turn, because an event that came at its end was left to this
        thread."""
        while self._queue and self._calling.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._calling.release()

    def _catch_up(self) -> None:
        while self._queue:
            self._call(self._queue.popleft())

    def _call(self, event: Event) -> None:
        if not (self._is_over or self.is_muted):
            for callback in self._callbacks:
                event(callback)
