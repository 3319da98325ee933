"""Deaths that the launchers know of and the connections do not.

A host that vanishes closes no connection, and a worker that fails early never opened any. The
launchers see both, and write them into the store that they share with the workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gossamer.errors import PeerLost
from gossamer.real.transports.checked_values import number_from
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.transport import StopToken

DEATHS = "deaths"
"""A counter, so that looking for news is one question."""
_FIRST = "deaths/first"
_LOOK_S = 0.5


def tell_dead(store: TcpStore, rank: int, how: str) -> None:
    """A launcher's word that one of the workers is dead."""
    store.agree(f"dead/{rank}", how)
    store.agree(_FIRST, str(rank))
    store.add(DEATHS, 1)


class Attendance:
    """Whether those who are waited for at the beginning can still come."""

    def __init__(self, stop: StopToken, store: TcpStore | None) -> None:
        """`store`: where the launchers write, if they are ours."""
        self._stop = stop
        self._store = store
        self._looked = time.monotonic()

    def check(self) -> None:
        """Raises once this process is to stop, or one of the others has died."""
        self._stop.check()
        if self._store is None or time.monotonic() - self._looked < StopToken.patience:
            return
        self._looked = time.monotonic()
        # The first, as the others may have died of that.
        if (rank := self._store.get(_FIRST)) is not None:
            how = self._store.get(f"dead/{rank}")
            raise PeerLost(number_from(_FIRST, rank), f"{how}, before all workers had met")


class Notices:
    """A thread that reads what the launchers write about the others."""

    def __init__(
        self, connect: Callable[[], TcpStore], peers: Iterable[int], died: Callable[[int], None]
    ) -> None:
        """`connect`: to a connection of its own, for an answer may never come."""
        self._connect = connect
        self._peers = set(peers)
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
            # Inside the store's code when the interpreter ends, it would abort the process.
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
        for peer in sorted(self._peers):
            if store.get(f"dead/{peer}") is not None:
                self._peers.discard(peer)
                if not self._is_over.is_set():
                    self._died(peer)
