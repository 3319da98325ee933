"""What one worker of a user's loop tells its callbacks, whichever thread it happens in."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gossamer.callbacks import Callback
from gossamer.errors import PeerLost, ProtocolError
from gossamer.pending import Pending
from gossamer.real.books import Books
from gossamer.real.driver import Driver
from gossamer.real.router import Addresses, Router
from gossamer.real.transports.transport import Transport

Event = Callable[[Callback], None]


class Telling:
    """Calls the callbacks of one process, never two at a time.

    Steps and the end are told in the loop's own thread, which waits for its turn. Whatever else
    happens is left to the thread that is speaking, if one is: a thread that receives must not
    wait, because the callback under way may wait for what only that thread can receive.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._untold: deque[Event] = deque()
        self._speaking = threading.RLock()
        self._began = time.monotonic()
        self._is_over = False
        self.steps = 0
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told of an error in a callback that no call of the loop can raise."""

    def begin(self) -> None:
        """The seconds count from here."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    # ------------------------------------------------------------------ in the loop's thread

    def stepped(self, rank: int) -> None:
        self.steps += 1
        step, seconds = self.steps, self.seconds
        self._now(lambda callback: callback.on_step(rank, step, seconds, None))

    def ended(self, summary: dict[str, Any]) -> None:
        self._now(lambda callback: callback.on_end(summary))
        self.close()

    def close(self) -> None:
        """Nothing is told any more."""
        self._is_over = True

    # ------------------------------------------------------------------ in any thread

    def exchanged(self, worker: int, peer: int) -> None:
        seconds = self.seconds
        self._soon(lambda callback: callback.on_exchange(worker, peer, seconds, None))

    def exchanged_once_done(self, pending: Pending[Any], *pairs: tuple[int, int]) -> None:
        """Who has got whose model, once it is there."""

        def done() -> None:
            try:
                pending.result()
            except (PeerLost, ProtocolError):
                return  # the peer died first
            for worker, peer in pairs:
                self.exchanged(worker, peer)

        pending.when_done(done)

    def stale(self, end: int, staleness: int) -> None:
        seconds = self.seconds
        self._soon(lambda callback: callback.on_staleness(end, staleness, seconds))

    def dropped(self, end: int) -> None:
        seconds = self.seconds
        self._soon(lambda callback: callback.on_drop(end, seconds))

    def lost(self, worker: int) -> None:
        seconds = self.seconds
        self._soon(lambda callback: callback.on_membership(worker, False, seconds))

    # ------------------------------------------------------------------ one at a time

    def _now(self, event: Event) -> None:
        with self._speaking:
            self._catch_up()
            self._call(event)
        self._try_to_catch_up()

    def _soon(self, event: Event) -> None:
        self._untold.append(event)
        try:
            self._try_to_catch_up()
        except Exception as error:
            # Raised here it would end a thread that must live, or the method's coroutine.
            if self.on_failure is None:
                raise
            self.on_failure(error)

    def _try_to_catch_up(self) -> None:
        """Asked again after each turn: what came at its very end was left to the one speaking."""
        while self._untold and self._speaking.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._speaking.release()

    def _catch_up(self) -> None:
        while self._untold:
            self._call(self._untold.popleft())

    def _call(self, event: Event) -> None:
        if self._is_over:
            return
        for callback in self._callbacks:
            event(callback)


def stale_of(books: Books, telling: Telling | None, end: int) -> Callable[[int], None]:
    """What to do with the staleness of a gradient that this end applies."""
    if telling is None:
        return books.stale

    def stale(updates: int) -> None:
        books.stale(updates)
        telling.stale(end, updates)

    return stale


class TellingRouter(Router):
    """A hub whose process tells of deaths."""

    def __init__(
        self, transport: Transport, plan: Addresses, driver: Driver, telling: Telling
    ) -> None:  # fmt: skip
        super().__init__(transport, plan, driver)
        self._telling = telling

    def lost(self, process: int) -> None:
        # Whoever goes after all have read everything leaves a run that is over.
        is_news = process in self.live and not self.drained.is_over
        super().lost(process)
        if is_news:
            self._telling.lost(process)
