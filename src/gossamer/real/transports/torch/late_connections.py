"""Processes that come to a run that goes on, over Gloo: who connects to whom, and when.

A newcomer writes its line into the log of departures and then connects to everybody who lives by
the lines before it. The others read the log a few times a second, and connect to whom a new line
names. So each pair is connected once, by two processes that know the same two lives. Nobody waits
for it: a thread of its own makes each connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gossamer.membership import MemberState
from gossamer.real.transports.store import OwnStore
from gossamer.real.transports.torch.departures import Departure, DepartureLog
from gossamer.real.transports.torch.rendezvous import Lanes, Meeting, lanes_of_two, leave_store

_LOOK_S = 0.1


class LateConnections:
    """The connections of one process that are made during the run."""

    def __init__(
        self, meeting: Meeting, log: DepartureLog, connected: Callable[[int, int, Lanes], None]
    ) -> None:
        """`connected` is called with a peer, its life and the connections, by any thread."""
        self._meeting = meeting
        self._log = log
        self._connected = connected
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._making: dict[int, tuple[int, OwnStore]] = {}
        """By peer: the life to which a connection is being made, and the store it is made by."""
        self._thread = threading.Thread(
            target=self._watch, name="gossamer looks for newcomers", daemon=True
        )

    def start(self) -> None:
        rank, life = self._meeting.rank, self._meeting.beginning.life
        if life:
            self._log.comes(rank, life)
            members = self._log.members
            for peer in sorted(members.live - {rank}):
                if members.state_of(peer) < MemberState.CLOSED:
                    self._connect(peer, members.life_of(peer))
        self._thread.start()

    def learn(self, line: Departure) -> None:
        """A line of the log, in the order of all lines."""
        if line.is_arrival:
            if self._thread.is_alive():  # otherwise it is older than this process
                self._connect(line.process, line.life)
        elif line.is_dead:
            self._give_up(line.process)

    def stop(self) -> None:
        self._is_over.set()
        with self._lock:
            making = list(self._making)
        for peer in making:
            self._give_up(peer)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LOOK_S)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._log.catch_up()

    def _connect(self, peer: int, life: int) -> None:
        threading.Thread(
            target=self._make, args=(peer, life), name=f"gossamer connects to {peer}", daemon=True
        ).start()

    def _make(self, peer: int, life: int) -> None:
        meeting = self._meeting
        try:
            store = meeting.connect_again()
            assert isinstance(store, OwnStore)
            with self._lock:
                self._making[peer] = (life, store)
            lives = {meeting.rank: meeting.beginning.life, peer: life}
            lanes = lanes_of_two(meeting, store, lives)
        except RuntimeError:
            return  # one of the two is gone, or a stranger came in its place
        with self._lock:
            if self._making.get(peer) != (life, store) or self._is_over.is_set():
                return
            del self._making[peer]
        self._connected(peer, life, lanes)

    def _give_up(self, peer: int) -> None:
        with self._lock:
            _, store = self._making.pop(peer, (0, None))
        if store is not None:
            leave_store(store)
