"""Deaths that the launchers notice and the connections of the workers do not.

A host that vanishes closes no connection, and a worker that fails early never opened one. The
launchers notice both, and write them into the store that they share with the workers.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable

from gossamer.errors import PeerLost
from gossamer.real.transports.checked_values import number_from, numbers_from
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.transport import StopToken

DEATHS = "deaths"
"""The key of a counter of deaths, so that one request tells whether there are new ones."""
_FIRST = "deaths/first"
_LOOK_S = 0.5


def tell_dead(store: TcpStore, rank: int, how: str, life: int = 0) -> None:
    """A launcher says that this life of one of the workers has ended."""
    if life == 0:
        store.agree(f"dead/{rank}", how)
        store.agree(_FIRST, str(rank))
    number, mine = 0, f"{rank} {life} {secrets.randbits(40)}"
    while store.agree(f"deaths/{number}", mine) != mine:
        number += 1
    store.add(DEATHS, 1)


class StartupCheck:
    """Checks, while all workers connect, that nobody waits for a dead one."""

    def __init__(self, stop: StopToken, store: TcpStore | None) -> None:
        """`store` is where the launchers write deaths, if they are Gossamer's own."""
        self._stop = stop
        self._store = store
        self._looked = time.monotonic()

    def check(self) -> None:
        """Raise if this process is to stop, or if another one has died."""
        self._stop.check()
        if self._store is None or time.monotonic() - self._looked < StopToken.patience:
            return
        self._looked = time.monotonic()
        # The first death is named, because it may have caused the others.
        if (rank := self._store.get(_FIRST)) is not None:
            how = self._store.get(f"dead/{rank}")
            raise PeerLost(number_from(_FIRST, rank), f"{how}, before all workers had met")


class DeathWatch:
    """A thread that reads which deaths the launchers have written into the store."""

    def __init__(
        self, connect: Callable[[], TcpStore], peers: Iterable[int],
        died: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """`connect` makes a connection of the thread's own, because an answer may never come."""
        self._connect = connect
        self._peers = frozenset(peers)
        self._told: set[tuple[int, int]] = set()
        """The ranks and lives that have been reported."""
        self._next = 0
        self._died = died
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._watch, name="gossamer reads notices", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A thread inside the store's code aborts the process when the interpreter ends.
            self._thread.join(_LOOK_S)

    def _watch(self) -> None:
        seen = 0
        try:
            store = self._connect()
            while not self._is_over.wait(_LOOK_S):
                count = store.add(DEATHS, 0)
                if count != seen:
                    seen = count
                    self._read(store)
        except RuntimeError:
            return  # the store died with its host

    def _read(self, store: TcpStore) -> None:
        while (line := store.get(key := f"deaths/{self._next}")) is not None:
            self._next += 1
            rank, life, *_ = numbers_from(key, line, " ")
            if rank in self._peers and (rank, life) not in self._told:
                self._told.add((rank, life))
                if not self._is_over.is_set():
                    self._died(rank, life)
