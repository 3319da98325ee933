"""Which processes have died, left or come: one log in the store, which all read in the same order.

A process that notices a death appends it. The length of the log is an epoch. Processes that know
the same epoch know the same departures, so they decide alike what follows from them. A process that
leaves in good order appends itself, and says how many means of each group it has finished. A
process that leaves only the sums does the same; it goes on answering, and may depart again later. A
process that comes to a run that goes on appends itself, too, before anybody connects to it; all
lines about it name its life, so that an old death says nothing of a new life.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
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
    life: int = 0
    """Which life of the process the line is about."""
    is_arrival: bool = False
    """Whether that life begins."""

    def encode(self) -> str:
        finished = dict(self.finished)
        return json.dumps([
            self.process, self.is_dead, self.is_clean, finished, self.is_from_sums, self.life,
            self.is_arrival,
        ])  # fmt: skip

    @staticmethod
    def decode(text: str, key: str, size: int) -> Departure:
        """Read a line of the log of `size` processes, which was found under that key."""
        expected = f"one of {size} workers that died, left or came"
        try:
            process, is_dead, is_clean, finished, is_from_sums, life, comes = json.loads(text)
            counts = [process, life, *finished.values()]
        except (ValueError, TypeError, AttributeError):
            raise broken_value(key, text, expected) from None
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        are_known = {type(one) for one in (is_dead, is_clean, is_from_sums, comes)} == {bool}
        if not are_counts or not are_known or process >= size:
            raise broken_value(key, text, expected)
        return Departure(process, is_dead, is_clean, finished, is_from_sums, life, comes)

    @property
    def state(self) -> MemberState:
        """The state of the process after this line."""
        if self.is_arrival:
            return MemberState.TRAINING
        if self.is_dead:
            return MemberState.DEAD
        return MemberState.ANSWERING if self.is_from_sums else MemberState.CLOSED


class DepartureLog:
    """This process's copy of the log. It calls `apply` once for each line, in order."""

    def __init__(
        self, store: Store, apply: Callable[[int, Departure], None], size: int, stop: StopToken,
        absent: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """`stop` gets the error of a line that none of the `size` processes can have written. Those
        that are absent did not begin the run."""
        self._store = store
        self._apply = apply
        self._size = size
        self._stop = stop
        self._lock = threading.RLock()
        self.known: list[Departure] = []
        self.members = Membership(size)
        for process in absent:
            self.members.died(process)
        """The states of the processes after the lines so far."""

    @property
    def epoch(self) -> int:
        return len(self.known)

    def comes(self, process: int, life: int) -> int:
        """Append that this process comes; return the epoch of that line."""
        with self._lock:
            self.catch_up()
            if self.members.state_of(process) is not MemberState.DEAD:
                self.died(process)  # nobody has noticed the end of its earlier life
            return self._append(Departure(process, False, life=life, is_arrival=True))

    def died(self, process: int, life: int | None = None) -> int:
        """Append that this life of a process has ended, by default the present one, unless the log
        says already that it is gone; return the epoch by which that is known."""
        with self._lock:
            life = self.members.life_of(process) if life is None else life
            return self._append(Departure(process, is_dead=True, life=life))

    def noticed(self, process: int, life: int = 0) -> bool:
        """A launcher says that a life of a process has ended. Return whether that is new. By the
        log the process may have left in good order."""
        with self._lock:
            self.died(process, life)
            return self.members.died(process, life)

    def leaves(self, process: int, is_clean: bool, finished: Mapping[str, int]) -> int:
        """Append that this process leaves; return the epoch of that line."""
        life = self.members.life_of(process)
        return self._append(Departure(process, False, is_clean, finished, life=life))

    def leaves_sums(self, process: int, is_clean: bool, finished: Mapping[str, int]) -> int:
        """Append that this process leaves the sums; return the epoch of that line."""
        life = self.members.life_of(process)
        return self._append(
            Departure(process, False, is_clean, finished, is_from_sums=True, life=life)
        )

    def left(self, process: int, epoch: int, life: int | None = None) -> None:
        """A process says that it leaves; its own line in the log has that epoch."""
        self.catch_up(epoch)
        # If the store is gone, the log does not say that the process left, and never will.
        self.died(process, life)

    def catch_up(self, epoch: int | None = None) -> None:
        """Read the log up to an epoch that another process knows, or to its end."""
        with self._lock:
            while epoch is None or self.epoch < epoch:
                try:
                    line = self._store.get(f"departures/{self.epoch}")
                except RuntimeError:
                    return  # the store died with its host
                if line is None or not self._is_learnt(line):
                    return

    def _append(self, departure: Departure) -> int:
        with self._lock:
            while self._is_news(departure):
                if not self._is_learnt(self._agree(departure)):
                    break
            return self.epoch

    def _is_news(self, departure: Departure) -> bool:
        """Whether the lines so far do not say it, and it is about no earlier life."""
        known = self.members.life_of(departure.process)
        if departure.life != known:
            return departure.life > known
        # The death of a process that had left in good order concerns no sum.
        least = min(departure.state, MemberState.CLOSED)
        return self.members.state_of(departure.process) < least

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
        if departure.is_arrival:
            self.members.joined(departure.process, departure.life)
        else:
            self.members.came_to(departure.process, departure.state, departure.life)
        self._apply(self.epoch, departure)
        return True
