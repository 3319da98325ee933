"""A transport with links that are as slow as a plan says, on top of any other transport.

A frame goes to the transport below at once. A label after it says how long its first byte and all
of its bytes would have been on their way, and the receiver keeps the frame for that time. So clocks
need not agree, no sender waits, and the last frames of a process that leaves still arrive. An
operation on the window of another process moves no frame above the transport. So an empty frame,
whose label has the size of the operation, goes before it and uses the cards like any other frame.

The bytes of several messages pass a card one message after the other, in order of arrival.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.transports.transport import (
    Listener,
    Parts,
    Stopped,
    StopToken,
    Store,
    Transport,
    Window,
)

T = TypeVar("T")
_DATA, _PRETENCE, _BACK, _DONE = range(4)
_REQUEST_BYTES = 32
_SMALL_BYTES = 256
"""Requests and acknowledgements take no time on a card, as in the simulator."""
_FAREWELL_S = 2.0


class TimerThread(threading.Thread):
    """A thread that calls each action at its time; at equal times the first entry comes first."""

    def __init__(self, stop: StopToken) -> None:
        super().__init__(name="gossamer links", daemon=True)
        self._stop_token = stop
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._numbers = count()
        self._is_closed = False

    def at(self, due: float, action: Callable[[], None]) -> None:
        """Call an action at a time of the monotonic clock. Any thread may call this."""
        with self._changed:
            heappush(self._entries, (due, next(self._numbers), action))
            self._changed.notify()

    def run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Stopped:
                return

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not (self._is_closed or self._stop_token.is_set):
                left = (
                    self._entries[0][0] - time.monotonic() if self._entries else StopToken.patience
                )
                if left <= 0:
                    return heappop(self._entries)[2]
                self._changed.wait(min(left, StopToken.patience))
        return None

    def close(self) -> None:
        """Call nothing more, and end the thread before the program ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(_FAREWELL_S)


@dataclass(frozen=True)
class _Label:
    """The bytes after every frame."""

    kind: int
    number: int = 0
    """The number of the operation that waits for it, at the process of the operation."""
    size: int = 0
    """The bytes that the frame represents."""
    back: int = 0
    """How many bytes the receiver has to send back."""
    wait_s: float = 0.0
    """Seconds until the first byte arrives."""
    lasts_s: float = 0.0
    """Seconds from the first byte to the last, at the rate of the sender's card."""

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.kind, self.number, self.size, self.back, self.wait_s, self.lasts_s
        )  # fmt: skip

    @staticmethod
    def of(data: memoryview) -> _Label:
        return _Label(*_LAYOUT.unpack_from(data, len(data) - _LAYOUT.size))


_LAYOUT = struct.Struct("<QQQQdd")
"""The label follows the frame, so that the content of the frame stays aligned."""


class _Card:
    """This worker's network card: what it sends, what it receives, and the operations that wait for
    bytes on their way. It is the listener of the transport below."""

    def __init__(
        self, inner: Transport, plan: FaultPlan, timer: TimerThread, listener: Listener
    ) -> None:
        self.began = time.monotonic()
        """When all workers were connected; the times of the plan count from here."""
        self._inner = inner
        self._rank = inner.rank
        self._plan = plan
        self._timer = timer
        self._listener = listener
        self._lock = threading.Lock()
        self._draw = random.Random(f"drops/{inner.rank}/{inner.life}")
        self._sent = 0.0
        """When the card has sent all that it was given."""
        self._behind: dict[int, float] = defaultdict(float)
        """By process: when the last byte for it arrives. Later frames do not arrive earlier."""
        self._received = 0.0
        """When the card has received all that has begun to arrive."""
        self._first: dict[int, float] = defaultdict(float)
        """By process: when its latest frame began to arrive, as no frame overtakes another."""
        self._last: dict[int, float] = defaultdict(float)
        self._lost: set[int] = set()
        self._numbers = count(1)
        self._operations: dict[int, tuple[int, Callable[[], None]]] = {}
        """By number: the process that an operation waits for, and how it continues."""

    # ------------------------------------------------------------------ sending

    def send(
        self, to: int, kind: int, size: int, *, number: int = 0, back: int = 0, parts: Parts = ()
    ) -> None:
        now = time.monotonic()
        is_small = size <= _SMALL_BYTES
        lasts = 0.0 if is_small else size / self._plan.rate(self._rank, now - self.began)
        with self._lock:
            begins = now if is_small else max(now, self._sent)
            if not is_small:
                self._sent = begins + lasts
            at = now - self.began
            late = self._plan.latency_at(at) + self._plan.retransmissions(at, self._draw)
            healed = self._plan.heals_at((self._rank, to), at) - at
            there = max(begins + late, now + healed + late, self._behind[to])
            self._behind[to] = there + lasts
        self.send_at_once(to, _Label(kind, number, size, back, there - now, lasts), parts)

    def send_at_once(self, to: int, label: _Label, parts: Parts = ()) -> None:
        self._inner.send(to, [*parts, label.pack()])

    def carry(self, process: int, there: int, back: int, then: Callable[[], None]) -> None:
        """Send so many bytes, then receive so many, then call `then` in the timer thread."""
        number = next(self._numbers)
        self._operations[number] = (process, then)
        try:
            self.send(process, _PRETENCE, there, number=number, back=back)
        except PeerLost:
            self._continue_soon(number)
        if process in self._inner.lost:  # the process may have died in the meantime
            self._continue_soon(number)

    # ------------------------------------------------------------------ receiving

    def frame(self, source: int, data: memoryview) -> None:
        now, label = time.monotonic(), _Label.of(data)
        if label.kind == _DONE:
            self._continue_soon(label.number)
            return
        due = self._first[source] = max(now + label.wait_s, self._first[source])
        content = data[: len(data) - _LAYOUT.size]
        self._timer.at(due, lambda: self._begin(due, source, label, content))

    def lost(self, process: int) -> None:
        self._lost.add(process)
        self._listener.lost(process)
        for number, operation in list(self._operations.items()):
            if operation[0] == process:
                self._continue_soon(number)  # the transport below decides how it ends

    def joined(self, process: int) -> None:
        self._lost.discard(process)
        self._listener.joined(process)

    def closed(self, process: int) -> None:
        # What it sent before may still be on its way.
        self._timer.at(
            max(time.monotonic(), self._last[process]), lambda: self._listener.closed(process)
        )

    def _begin(self, now: float, source: int, label: _Label, content: memoryview) -> None:
        """The first byte has arrived. The card takes the bytes of a frame after those before it."""
        ends = now + label.lasts_s
        if label.size > _SMALL_BYTES and source != self._rank:
            rate = self._plan.rate(self._rank, now - self.began)
            self._received = max(now, self._received) + label.size / rate
            ends = max(ends, self._received)
        ends = self._last[source] = max(ends, self._last[source])
        self._timer.at(ends, lambda: self._arrive(source, label, content))

    def _arrive(self, source: int, label: _Label, content: memoryview) -> None:
        if source in self._lost:
            return  # the last frames of a dying worker are lost, as in the simulator
        if label.kind == _DATA:
            self._listener.frame(source, content)
        elif label.kind == _BACK:
            self._continue(label.number)
        else:
            with suppress(PeerLost):  # then nobody waits for it any more
                if label.back:
                    self.send(source, _BACK, label.back, number=label.number)
                else:
                    self._answer_when_healed(source, label.number)

    def _answer_when_healed(self, source: int, number: int) -> None:
        now = time.monotonic()
        healed = self.began + self._plan.heals_at((self._rank, source), now - self.began)
        if healed <= now:
            self.send_at_once(source, _Label(_DONE, number))
            return

        def answer() -> None:
            with suppress(PeerLost):
                self.send_at_once(source, _Label(_DONE, number))

        self._timer.at(healed, answer)

    def _continue_soon(self, number: int) -> None:
        """Continue an operation in the timer thread."""
        self._timer.at(0.0, lambda: self._continue(number))

    def _continue(self, number: int) -> None:
        """Continue an operation; further calls with the same number do nothing."""
        if (operation := self._operations.pop(number, None)) is not None:
            operation[1]()


class ShapedTransport:
    """A transport whose links take at least the time that the plan says."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self.absent, self.life = inner.absent, inner.life
        self._inner = inner
        self._plan = plan
        self._timer: TimerThread | None = None
        self._lock = threading.Lock()
        self._sums_free = 0.0
        """When the last all-reduce ends. All-reduces do not delay messages, as in the simulator."""

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
        self._timer = TimerThread(stop)
        self._card = _Card(self._inner, self._plan, self._timer, listener)
        self._timer.start()
        self._inner.open(windows, initial, self._card, stop)
        self._card.began = time.monotonic()
        # Who comes during the run counts from the beginning of the others.
        mine = time.time()
        first = self.store.agree("links/began", repr(mine))
        if self.life:
            self._card.began -= max(0.0, mine - float(first))

    def leave_sums(self) -> None:
        self._inner.leave_sums()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._inner.close()

    def window(self, end: int) -> Tensor:
        return self._inner.window(end)

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._inner.guard(end)

    def send(self, to: int, parts: Parts) -> None:
        if to == self.rank:
            self._card.send_at_once(to, _Label(_DATA), parts)
        else:
            self._card.send(to, _DATA, sum(map(len, parts)), parts=parts)

    # ------------------------------------------------------------------ one-sided

    def read(self, end: int) -> Pending[Tensor]:
        found = self._inner.read(end)
        window = self._windows[end]
        if window.process == self.rank:
            return found
        if found.done and self._is_alive(window.process):
            # A value from a network is old when it arrives; a view of shared memory would not be.
            found = Pending.resolved(found.label, found.result().clone(), found.peer)
        pending: Pending[Tensor] = Pending(found.label, found.peer)

        def there() -> None:
            if self._is_alive(window.process):
                _follow(pending, lambda: found)
            else:
                pending.fail(PeerLost(window.process))

        size = window.numel * window.dtype.itemsize
        self._card.carry(window.process, _REQUEST_BYTES, size, there)
        return pending

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        process = self._windows[end].process
        if process == self.rank:
            return self._inner.accumulate(end, delta, start)
        pending: Pending[None] = Pending("accumulate", end)
        own = delta.detach().clone()

        def there() -> None:
            _follow(pending, lambda: self._inner.accumulate(end, own, start))

        self._card.carry(process, own.nbytes, 0, there)
        return pending

    def average(self, own: int, peer: int) -> Pending[None]:
        window = self._windows[peer]
        if window.process == self.rank:
            return self._inner.average(own, peer)
        pending: Pending[None] = Pending("average", peer)
        size = window.numel * window.dtype.itemsize

        def there() -> None:
            _follow(pending, lambda: self._inner.average(own, peer))

        self._card.carry(window.process, size, size, there)
        return pending

    def _is_alive(self, process: int) -> bool:
        return process not in self._inner.lost

    # ------------------------------------------------------------------ sums

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        """All-reduces take the time of a ring, one after the other, from this member's call on.

        The time does not count from the last member's call: an early member is at most one ring
        ahead, and waits longer for the next all-reduce.
        """
        assert self._timer is not None
        timer, now = self._timer, time.monotonic()
        size = sum(tensor.nbytes for tensor in tensors)
        seconds = self._plan.all_reduce_seconds(members, size, now - self._card.began)
        with self._lock:
            due = self._sums_free = max(now, self._sums_free) + seconds
        found = self._inner.all_reduce(tensors, members)
        pending: Pending[None] = Pending(found.label, found.peer)
        pending.on_cancel = found.cancel
        if found.settle is None:
            found.when_done(lambda: timer.at(due, lambda: _follow(pending, lambda: found)))
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
    """Let an operation end as the operation below does."""
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
