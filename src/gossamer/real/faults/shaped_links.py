"""Links as slow as a test wants them, over any transport.

A frame is handed to the transport below at once, with a few bytes behind it that say how long its
first byte and all of them would have been on the way; its receiver keeps it until then. So no
clocks have to agree, nobody's sending waits, and what is left when a process leaves still arrives.
What is done to another process's window moves no frames above the transport, so empty ones that
pretend to have its size go ahead of it: cards are shared with those as with all others.

Bytes of several messages pass a card one message after the other, in order of their arrival there.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.faults.links import SMALL_BYTES, Links
from gossamer.real.faults.timer_thread import Agenda
from gossamer.real.transports.transport import (
    Listener,
    Parts,
    StopToken,
    Store,
    Transport,
    Window,
)

T = TypeVar("T")
_DATA, _PRETENCE, _BACK, _DONE = range(4)
_REQUEST_BYTES = 32


@dataclass(frozen=True)
class _Label:
    """What stands behind every frame."""

    kind: int
    number: int = 0
    """Of the errand that it belongs to, at the process that has it."""
    size: int = 0
    """The bytes that it stands for."""
    back: int = 0
    """How many are to come back for a pretence."""
    wait_s: float = 0.0
    """Until its first byte is there."""
    lasts_s: float = 0.0
    """From its first byte to its last, as fast as the sender's card gives them out."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.kind, self.number, self.size, self.back, self.wait_s, self.lasts_s
        )  # fmt: skip

    @staticmethod
    def of(data: memoryview) -> _Label:
        return _Label(*_LAYOUT.unpack_from(data, len(data) - _LAYOUT.size))


_LAYOUT = struct.Struct("<QQQQdd")
"""Behind the frame and not before it, so that what is in it stays aligned."""


class _Clock:
    """The time since the workers met."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def since(self, moment: float) -> float:
        return moment - self.began


class _Departures:
    """The outgoing half of this worker's card."""

    def __init__(self, inner: Transport, links: Links, clock: _Clock) -> None:
        self._inner = inner
        self._links = links
        self._clock = clock
        self._lock = threading.Lock()
        self._free = 0.0
        """When the card has given out all that it was given."""
        self._behind: dict[int, float] = defaultdict(float)
        """When the last byte for each process will be there: what follows is not earlier."""

    def send(
        self, to: int, kind: int, size: int, *, number: int = 0, back: int = 0, parts: Parts = ()
    ) -> None:
        now = time.monotonic()
        time_s = self._clock.since(now)
        is_small = size <= SMALL_BYTES
        lasts = 0.0 if is_small else size / self._links.rate(self._inner.rank, time_s)
        with self._lock:
            begins = now if is_small else max(now, self._free)
            if not is_small:
                self._free = begins + lasts
            there = max(begins + self._links.latency_at(time_s), self._behind[to])
            self._behind[to] = there + lasts
        label = _Label(kind, number, size, back, there - now, lasts)
        self._inner.send(to, [*parts, label.pack()])

    def send_at_once(self, to: int, label: _Label, parts: Parts = ()) -> None:
        self._inner.send(to, [*parts, label.pack()])


class _Errands:
    """What waits for bytes that are on their way."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._open: dict[int, tuple[int, Callable[[], None]]] = {}

    def begin(self, process: int, then: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._open[number] = (process, then)
        return number

    def end(self, number: int) -> None:
        """Once, whoever says it how often."""
        if (errand := self._open.pop(number, None)) is not None:
            errand[1]()

    def with_process(self, process: int) -> list[int]:
        return [number for number, errand in list(self._open.items()) if errand[0] == process]


class _Arrivals:
    """The incoming half of this worker's card, and the listener of the transport below."""

    def __init__(
        self, rank: int, links: Links, clock: _Clock, departures: _Departures, errands: _Errands,
        agenda: Agenda, listener: Listener,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._links = links
        self._clock = clock
        self._departures = departures
        self._errands = errands
        self._agenda = agenda
        self._listener = listener
        self._free = 0.0
        self._first: dict[int, float] = defaultdict(float)
        """When the latest frame of each process has begun to arrive: none overtakes another."""
        self._last: dict[int, float] = defaultdict(float)
        self._lost: set[int] = set()

    def frame(self, source: int, data: memoryview) -> None:
        now, label = time.monotonic(), _Label.of(data)
        if label.kind == _DONE:
            self._agenda.at(now, lambda: self._errands.end(label.number))
            return
        due = self._first[source] = max(now + label.wait_s, self._first[source])
        content = data[: len(data) - _LAYOUT.size]
        self._agenda.at(due, lambda: self._begin(due, source, label, content))

    def _begin(self, now: float, source: int, label: _Label, content: memoryview) -> None:
        """Its first byte is there; the card takes its bytes when those before it are through."""
        ends = now + label.lasts_s
        if label.size > SMALL_BYTES and source != self._rank:
            rate = self._links.rate(self._rank, self._clock.since(now))
            self._free = max(now, self._free) + label.size / rate
            ends = max(ends, self._free)
        ends = self._last[source] = max(ends, self._last[source])
        self._agenda.at(ends, lambda: self._arrive(source, label, content))

    def _arrive(self, source: int, label: _Label, content: memoryview) -> None:
        if source in self._lost:
            return  # what a dying worker had on the way is lost, as in the simulator
        if label.kind == _DATA:
            self._listener.frame(source, content)
        elif label.kind == _BACK:
            self._errands.end(label.number)
        else:
            with suppress(PeerLost):  # nobody waits for it any more
                if label.back:
                    self._departures.send(source, _BACK, label.back, number=label.number)
                else:
                    self._departures.send_at_once(source, _Label(_DONE, label.number))

    def lost(self, process: int) -> None:
        self._lost.add(process)
        self._listener.lost(process)
        for number in self._errands.with_process(process):
            # The transport below says what becomes of it.
            self._agenda.at(0.0, lambda number=number: self._errands.end(number))


class ShapedTransport:
    """A transport whose links take at least the time that `links` says."""

    def __init__(self, inner: Transport, links: Links) -> None:
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self._inner = inner
        self._links = links
        self._clock = _Clock()
        self._departures = _Departures(inner, links, self._clock)
        self._errands = _Errands()
        self._agenda: Agenda | None = None
        self._lock = threading.Lock()
        self._sums_free = 0.0
        """When the sum before has gone round; like the simulator's, they delay no messages."""

    @property
    def store(self) -> Store:
        return self._inner.store

    @property
    def reduces_meanwhile(self) -> bool:
        return self._inner.reduces_meanwhile

    @property
    def lost(self) -> frozenset[int]:
        return self._inner.lost

    @property
    def torn_updates(self) -> int:
        return self._inner.torn_updates

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._windows = dict(windows)
        self._stop = stop
        self._agenda = Agenda(stop)
        arrivals = _Arrivals(
            self.rank, self._links, self._clock, self._departures, self._errands, self._agenda,
            listener,
        )  # fmt: skip
        self._agenda.start()
        self._inner.open(windows, initial, arrivals, stop)
        self._clock.began = time.monotonic()

    def leave_sums(self) -> None:
        self._inner.leave_sums()

    def close(self) -> None:
        if self._agenda is not None:
            self._agenda.close()
        self._inner.close()

    def window(self, end: int) -> Tensor:
        return self._inner.window(end)

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._inner.guard(end)

    def send(self, to: int, parts: Parts) -> None:
        if to == self.rank:
            self._departures.send_at_once(to, _Label(_DATA), parts)
        else:
            self._departures.send(to, _DATA, sum(map(len, parts)), parts=parts)

    # ------------------------------------------------------------------ one-sided

    def read(self, end: int) -> Pending[Tensor]:
        found = self._inner.read(end)
        window = self._windows[end]
        if window.process == self.rank:
            return found
        if found.done and self._is_alive(window.process):
            # What a network brings is as old as its way is long; lent memory would be as of now.
            found = Pending.resolved(found.label, found.result().clone(), found.peer)
        pending: Pending[Tensor] = Pending(found.label, found.peer)

        def there() -> None:
            if self._is_alive(window.process):
                _follow(pending, lambda: found)
            else:
                pending.fail(PeerLost(window.process))

        size = window.numel * window.dtype.itemsize
        self._carry(window.process, _REQUEST_BYTES, size, there)
        return pending

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        process = self._windows[end].process
        if process == self.rank:
            return self._inner.accumulate(end, delta, start)
        pending: Pending[None] = Pending("accumulate", end)
        own = delta.detach().clone()

        def there() -> None:
            _follow(pending, lambda: self._inner.accumulate(end, own, start))

        self._carry(process, own.nbytes, 0, there)
        return pending

    def average(self, own: int, peer: int) -> Pending[None]:
        window = self._windows[peer]
        if window.process == self.rank:
            return self._inner.average(own, peer)
        pending: Pending[None] = Pending("average", peer)
        size = window.numel * window.dtype.itemsize

        def there() -> None:
            _follow(pending, lambda: self._inner.average(own, peer))

        self._carry(window.process, size, size, there)
        return pending

    def _is_alive(self, process: int) -> bool:
        return process not in self._inner.lost

    def _carry(self, process: int, there: int, back: int, then: Callable[[], None]) -> None:
        """So many bytes there, then so many back; then go on, in the thread of the agenda."""
        assert self._agenda is not None
        number = self._errands.begin(process, then)
        try:
            self._departures.send(process, _PRETENCE, there, number=number, back=back)
        except PeerLost:
            self._agenda.at(0.0, lambda: self._errands.end(number))
        if not self._is_alive(process):  # it may have gone between asking and sending
            self._agenda.at(0.0, lambda: self._errands.end(number))

    # ------------------------------------------------------------------ sums

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        """From this member's call on it takes the time of a ring, one after the other.

        Not from the last member's: who comes early is at most one ring ahead, and waits the longer
        for the next.
        """
        assert self._agenda is not None
        agenda, now = self._agenda, time.monotonic()
        size = sum(tensor.nbytes for tensor in tensors)
        seconds = self._links.all_reduce_seconds(members, size, self._clock.since(now))
        with self._lock:
            due = self._sums_free = max(now, self._sums_free) + seconds
        found = self._inner.all_reduce(tensors, members)
        pending: Pending[None] = Pending(found.label, found.peer)
        pending.on_cancel = found.cancel
        if found.settle is None:
            found.when_done(lambda: agenda.at(due, lambda: _follow(pending, lambda: found)))
            return pending

        def settle() -> None:
            if found.settle is not None and not found.done:
                found.settle()
            while (left := due - time.monotonic()) > 0:
                self._stop.check()
                time.sleep(min(left, StopToken.patience))
            _follow(pending, lambda: found)

        pending.settle = settle
        return pending


def _follow(pending: Pending[T], start: Callable[[], Pending[T]]) -> None:
    """End as the operation below does."""
    try:
        found = start()
        if found.settle is not None and not found.done:
            found.settle()
    except Exception as error:
        pending.fail(error)
        return

    def pass_on() -> None:
        try:
            pending.resolve(found.result())
        except Exception as error:
            pending.fail(error)

    found.when_done(pass_on)
