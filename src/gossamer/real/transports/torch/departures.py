"""Which processes have died or left: one log in the store, which all read in the same order.

A process that notices a death appends it. The length of the log is an epoch. Processes that know
the same epoch know the same departures, so they decide alike what follows from them. A process that
leaves in good order appends itself, and says how many means of each group it has finished. A
process that leaves only the sums does the same; it goes on answering, and may depart again later.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.errors import Error
from gossamer.membership import Membership, MemberState
from gossamer.real.transports.checked_values import broken_value
from gossamer.real.transports.transport import StopToken, Store


@dataclass(frozen=True)
class Departure:
    """One line of the log."""

    process: int
    is_dead: bool
    is_clean: bool = False
    """Whether it left with no mean open, so that no process can have a result that others lack."""
    finished: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many means of each group it had finished when it left."""
    is_from_sums: bool = False
    """Whether it has left only the sums; another line may follow when it departs."""

    def encode(self) -> str:
        finished = dict(self.finished)
        return json.dumps([self.process, self.is_dead, self.is_clean, finished, self.is_from_sums])

    @staticmethod
    def decode(text: str, key: str, size: int) -> Departure:
        """Read a line of the log of `size` processes, which was found under that key."""
        expected = f"one of {size} workers that died or left"
        try:
            process, is_dead, is_clean, finished, is_from_sums = json.loads(text)
            counts = [process, *finished.values()]
        except (ValueError, TypeError, AttributeError):
            raise broken_value(key, text, expected) from None
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        are_known = type(is_dead) is type(is_clean) is type(is_from_sums) is bool
        if not are_counts or not are_known or process >= size:
            raise broken_value(key, text, expected)
        return Departure(process, is_dead, is_clean, finished, is_from_sums)

    @property
    def state(self) -> MemberState:
        """The state of the process after this departure."""
        if self.is_dead:
            return MemberState.DEAD
        return MemberState.ANSWERING if self.is_from_sums else MemberState.CLOSED


class DepartureLog:
    """This process's copy of the log. It calls `apply` once for each line, in order."""

    def __init__(
        self, store: Store, apply: Callable[[int, Departure], None], size: int, stop: StopToken
    ) -> None:
        """`stop` gets the error of a line that none of the `size` processes can have written."""
        self._store = store
        self._apply = apply
        self._size = size
        self._stop = stop
        self._lock = threading.RLock()
        self.known: list[Departure] = []
        self.members = Membership(size)
        """The states of the processes after the lines so far."""

    @property
    def epoch(self) -> int:
        return len(self.known)

    def died(self, process: int) -> int:
        """Append that a process is dead, unless the log says already that it is gone; return the
        epoch by which that is known."""
        return self._append(Departure(process, is_dead=True))

    def noticed(self, process: int) -> bool:
        """A launcher says that a process is dead. Return whether that is new. By the log the
        process may have left in good order."""
        with self._lock:
            self.died(process)
            return self.members.died(process)

    def leaves(self, process: int, is_clean: bool, finished: Mapping[str, int]) -> int:
        """Append that this process leaves; return the epoch of that line."""
        return self._append(Departure(process, False, is_clean, finished))

    def leaves_sums(self, process: int, is_clean: bool, finished: Mapping[str, int]) -> int:
        """Append that this process leaves the sums; return the epoch of that line."""
        return self._append(Departure(process, False, is_clean, finished, is_from_sums=True))

    def left(self, process: int, epoch: int) -> None:
        """A process says that it leaves; its own line in the log has that epoch."""
        self.catch_up(epoch)
        # If the store is gone, the log does not say that the process left, and never will.
        self.died(process)

    def catch_up(self, epoch: int) -> None:
        """Read the log up to an epoch that another process knows."""
        with self._lock:
            while self.epoch < epoch:
                try:
                    line = self._store.get(f"departures/{self.epoch}")
                except RuntimeError:
                    return  # the store died with its host
                if line is None or not self._is_learnt(line):
                    return

    def _append(self, departure: Departure) -> int:
        with self._lock:
            # The death of a process that had left in good order concerns no sum.
            least = min(departure.state, MemberState.CLOSED)
            while self.members.state_of(departure.process) < least:
                if not self._is_learnt(self._agree(departure)):
                    break
            return self.epoch

    def _agree(self, departure: Departure) -> str:
        mine = departure.encode()
        try:
            return self._store.agree(f"departures/{self.epoch}", mine)
        except RuntimeError:
            return mine  # the store died with its host: nobody is left to agree with

    def _is_learnt(self, line: str) -> bool:
        try:
            departure = Departure.decode(line, f"departures/{self.epoch}", self._size)
        except Error as error:
            self._stop.failure = self._stop.failure or error
            return False
        self.known.append(departure)
        self.members.came_to(departure.process, departure.state)
        self._apply(self.epoch, departure)
        return True
