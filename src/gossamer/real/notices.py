"""Deaths that the launchers know of and the connections do not.

A host that vanishes closes no connection, and a worker that fails says good-bye like any other. The
launchers see both, and write them into the store that they share with the workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from gossamer.real.store import TcpStore

DEATHS = "deaths"
"""A counter, so that looking for news is one question."""
_LOOK_S = 0.5


def tell_dead(store: TcpStore, rank: int, how: str) -> None:
    """A launcher's word that one of the workers is dead."""
    store.agree(f"dead/{rank}", how)
    store.add(DEATHS, 1)


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
