"""Who has died or left, as one list in the store that all processes read in the same order.

Whoever notices a death appends it. The length of the list is an epoch: processes that know the
same epoch know the same deaths, so what follows from them is decided alike by everybody. A process
that leaves in good order appends itself and says how far it took part in each group's sums; so does
one that rests: it takes part in no further sum, and goes on answering.
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
class Loss:
    """One line of the list."""

    process: int
    is_dead: bool
    is_clean: bool = False
    """It left with no sum open, so nobody can have a result that others lack."""
    taken: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many sums of each group a process that left had finished."""
    is_resting: bool = False
    """It has left the sums only; another line may follow when it goes."""

    def encode(self) -> str:
        taken = dict(self.taken)
        return json.dumps([self.process, self.is_dead, self.is_clean, taken, self.is_resting])

    @staticmethod
    def decode(text: str, key: str, size: int) -> Loss:
        """Of one of `size` processes; the key is where it was found."""
        expected = f"one of {size} workers that died or left"
        try:
            process, is_dead, is_clean, taken, is_resting = json.loads(text)
            counts = [process, *taken.values()]
        except (ValueError, TypeError, AttributeError):
            raise broken_value(key, text, expected) from None
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        are_known = type(is_dead) is type(is_clean) is type(is_resting) is bool
        if not are_counts or not are_known or process >= size:
            raise broken_value(key, text, expected)
        return Loss(process, is_dead, is_clean, taken, is_resting)

    @property
    def state(self) -> MemberState:
        """Which state of its process it tells of."""
        if self.is_dead:
            return MemberState.DEAD
        return MemberState.ANSWERING if self.is_resting else MemberState.CLOSED


class Losses:
    """This process's copy of the list; `apply` is called once for each line, in order."""

    def __init__(
        self, store: Store, apply: Callable[[int, Loss], None], size: int, stop: StopToken
    ) -> None:
        """Of `size` processes; `stop` tells them of a line that none of them has written."""
        self._store = store
        self._apply = apply
        self._size = size
        self._stop = stop
        self._lock = threading.RLock()
        self.known: list[Loss] = []
        self.members = Membership(size)
        """What follows from the lines so far."""

    @property
    def epoch(self) -> int:
        return len(self.known)

    def died(self, process: int) -> int:
        """Say that a process is dead, unless the list says that it is gone already; returns the
        epoch by which it is known."""
        return self._append(Loss(process, is_dead=True))

    def noticed(self, process: int) -> bool:
        """A launcher says that a process is dead. Returns whether nobody has said so before; the
        process may have left in good order, by the list."""
        with self._lock:
            self.died(process)
            return self.members.died(process)

    def leaves(self, process: int, is_clean: bool, taken: Mapping[str, int]) -> int:
        """This process's own farewell; returns the epoch that it makes."""
        return self._append(Loss(process, False, is_clean, taken))

    def rests(self, process: int, is_clean: bool, taken: Mapping[str, int]) -> int:
        """This process's own word that it has left the sums; returns the epoch that it makes."""
        return self._append(Loss(process, False, is_clean, taken, is_resting=True))

    def left(self, process: int, epoch: int) -> None:
        """A process has said good-bye, by the epoch that its own farewell made."""
        self.catch_up(epoch)
        # Where the store has died the list does not say so, and nobody would ever.
        self.died(process)

    def catch_up(self, epoch: int) -> None:
        """Another process knows more: read up to there."""
        with self._lock:
            while self.epoch < epoch:
                try:
                    line = self._store.get(f"losses/{self.epoch}")
                except RuntimeError:
                    return  # the store died with its host
                if line is None or not self._is_learnt(line):
                    return

    def _append(self, loss: Loss) -> int:
        with self._lock:
            # That one which has left in good order is dead concerns no sum.
            least = min(loss.state, MemberState.CLOSED)
            while self.members.state_of(loss.process) < least:
                if not self._is_learnt(self._agree(loss)):
                    break
            return self.epoch

    def _agree(self, loss: Loss) -> str:
        mine = loss.encode()
        try:
            return self._store.agree(f"losses/{self.epoch}", mine)
        except RuntimeError:
            return mine  # the store died with its host: nobody is left to agree with

    def _is_learnt(self, line: str) -> bool:
        try:
            loss = Loss.decode(line, f"losses/{self.epoch}", self._size)
        except Error as error:
            self._stop.failure = self._stop.failure or error
            return False
        self.known.append(loss)
        self.members.came_to(loss.process, loss.state)
        self._apply(self.epoch, loss)
        return True
