"""The first moments of one worker's run: when it computed, exchanged, and waited for whom.

On a real network nobody can tell a message's time on the wire from waiting for whoever sends it:
both are spent in one blocking wait. What the worker's own thread does for an exchange outside of
such a wait (copying, adding, handing over) is told apart, and so is all its other work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gossamer.pending import Pending
from gossamer.real.books import Books

Segment = tuple[float, float, str, str]
"""From when to when in seconds, what it did, and with or for whom."""
_MOST = 250
_SHORTEST_S = 20e-6
"""Of other work: what is shorter cannot be seen beside a step."""


class Moments:
    """Few enough to be written down with the books; afterwards it costs a comparison."""

    def __init__(self, workers: int, books: Books) -> None:
        self._workers = workers
        self._books = books
        self._began = 0.0
        self._thread = 0
        self._is_exchanging = False
        self._segments: list[Segment] = []

    def begin(self, now: float) -> None:
        """In the thread whose moments these are."""
        self._began = now
        self._thread = threading.get_ident()

    def computed(self, start: float, end: float) -> None:
        self._add(start, end, "computing", "")

    def waited(self, pending: Pending[object], start: float, end: float) -> None:
        self._books.waited(pending, start, end)
        if pending.label != "gradient":
            self._add(start, end, "waiting", f"{pending.label}{self._whom('from', pending.peer)}")

    def exchanging(self, what: str, way: str, whom: int | None) -> AbstractContextManager[None]:
        """Around a call that hands over or fetches; one inside another is a part of it."""
        # Other threads do so too, for side loops and servers, while this one computes or waits.
        is_own = threading.get_ident() == self._thread
        if self._is_exchanging or not is_own or len(self._segments) >= _MOST:
            return nullcontext()
        return self._exchange(f"{what}{self._whom(way, whom)}")

    @contextmanager
    def _exchange(self, detail: str) -> Generator[None]:
        self._is_exchanging, start = True, time.monotonic()
        try:
            yield
        finally:
            self._is_exchanging = False
            self._add(start, time.monotonic(), "communicating", detail)

    def _whom(self, way: str, end: int | None) -> str:
        if end is None:
            return ""
        is_worker = end < self._workers
        return f" {way} worker {end}" if is_worker else f" {way} server {end - self._workers}"

    def _add(self, start: float, end: float, kind: str, detail: str) -> None:
        if len(self._segments) >= _MOST:
            return
        start, end = round(start - self._began, 6), round(end - self._began, 6)
        inside: list[Segment] = []
        while self._segments and self._segments[-1][0] >= start:
            inside.insert(0, self._segments.pop())
        # A wait in which a side loop exchanged something is cut in two by it.
        for one in inside:
            self._put(start, one[0], kind, detail)
            self._segments.append(one)
            start = one[1]
        self._put(start, end, kind, detail)

    def _put(self, start: float, end: float, kind: str, detail: str) -> None:
        if end > start:
            self._segments.append((start, end, kind, detail))

    @property
    def segments(self) -> list[Segment]:
        """What lies between two of them is other work: its step, averaging, being a server."""
        found: list[Segment] = []
        at = 0.0
        for one in self._segments:
            if one[0] - at >= _SHORTEST_S:
                found.append((at, one[0], "other", "its own work"))
            found.append(one)
            at = one[1]
        return found
