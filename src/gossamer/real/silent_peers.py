"""Peers that do not answer at present. A method that waits for nobody must not wait for them.

A process may be stopped, or its host be busy with something else, without being dead. An exchange
with it that takes much longer than usual is left out for that step, and the peer is not drawn again
until it speaks. What was asked of it stays asked: an average that it makes later is made at both
ends, so nothing is lost or counted twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.transport import StopToken

T = TypeVar("T")
_TIMES = 10.0
"""An exchange may take so many times as long as usual, because others use the machine, too."""
_LEAST_S = 0.25
_FIRST_S = 0.1
"""What counts as usual before the first exchange."""
_WEIGHT = 0.125
"""The weight of the last exchange in the mean of how long exchanges take."""


@dataclass(eq=False, slots=True)
class _Exchange:
    """An exchange that has been begun, as its method sees it."""

    peer: int
    began: float
    shown: Pending[Any]


class Silence:
    """The silent peers of one worker; `answering` leaves them out."""

    def __init__(self, stop: StopToken, now: Callable[[], float] = time.monotonic) -> None:
        self._stop = stop
        self._now = now
        self._lock = threading.Lock()
        self._open: set[_Exchange] = set()
        self._missed: dict[int, int] = {}
        """How many exchanges with a peer were left out and have not ended yet."""
        self._usual: dict[int, float] = {}
        self.silent: frozenset[int] = frozenset()
        """It is replaced only when it changes, so that callers may compare it by identity."""
        self._thread: threading.Thread | None = None

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        silent = self.silent
        return [peer for peer in peers if peer not in silent] if silent else peers

    def limit(self, peer: int) -> float:
        """How long an exchange with this peer may take."""
        return max(_LEAST_S, _TIMES * self._usual.get(peer, _FIRST_S))

    def bounded(self, peer: int, started: Pending[T]) -> Pending[T]:
        """The same exchange as its method sees it: it fails with `PeerLost` if it takes too long.

        Some exchanges are finished by the thread that awaits them (`Pending.settle`); for these the
        transport has a deadline of its own.
        """
        if started.done or started.settle is not None:
            return started
        shown: Pending[T] = Pending(started.label, started.peer)
        exchange = _Exchange(peer, self._now(), shown)
        with self._lock:
            self._open.add(exchange)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="gossamer hears silence", daemon=True
                )
                self._thread.start()
        started.when_done(partial(self._ended, exchange, started))
        return shown

    def look(self) -> None:
        """Leave out the exchanges that take too long."""
        now = self._now()
        with self._lock:
            late = [one for one in self._open if now - one.began > self.limit(one.peer)]
            for one in late:
                self._open.discard(one)
                self._learn(one.peer, self.limit(one.peer))
                self._missed[one.peer] = self._missed.get(one.peer, 0) + 1
            self._tell()
        for one in late:
            one.shown.fail(PeerLost(one.peer, "it does not answer at present"))

    def _watch(self) -> None:
        while not self._stop.is_set:
            time.sleep(StopToken.patience)
            self.look()

    def _ended(self, exchange: _Exchange, started: Pending[Any]) -> None:
        peer = exchange.peer
        with self._lock:
            is_in_time = exchange in self._open
            if is_in_time:
                self._open.discard(exchange)
                self._learn(peer, self._now() - exchange.began)
            else:
                self._missed[peer] -= 1
                if not self._missed[peer]:
                    del self._missed[peer]
                self._tell()
        if not is_in_time:
            return
        try:
            exchange.shown.resolve(started.result())
        except Exception as error:
            exchange.shown.fail(error)

    def _learn(self, peer: int, seconds: float) -> None:
        usual = self._usual.get(peer)
        self._usual[peer] = seconds if usual is None else usual + _WEIGHT * (seconds - usual)

    def _tell(self) -> None:
        if self.silent != self._missed.keys():
            self.silent = frozenset(self._missed)
