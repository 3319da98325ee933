"""A clock for tests of what lives on one: it runs the events in order and counts them."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush


class Event:
    def __init__(self, clock: HeapClock, callback: Callable[..., None], arguments: tuple) -> None:
        self.clock = clock
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.clock.cancelled += 1


class HeapClock:
    """A clock that counts; events of one instant come in order, or shuffled by a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self.now = 0
        self.scheduled = 0
        self.cancelled = 0
        self._heap: list[tuple[int, float, int, Event]] = []
        self._tie = (lambda: 0.0) if seed is None else random.Random(seed).random

    def at(self, delay_ns: int, callback: Callable[..., None], *arguments: object) -> Event:
        assert isinstance(delay_ns, int)
        assert delay_ns >= 0
        self.scheduled += 1
        event = Event(self, callback, arguments)
        heappush(self._heap, (self.now + delay_ns, self._tie(), self.scheduled, event))
        return event

    def run(self, until_ns: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_ns:
            self.now, _, _, event = heappop(self._heap)
            if not event.is_cancelled:
                event.callback(*event.arguments)
