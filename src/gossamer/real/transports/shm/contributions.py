"""Who has posted what it puts into an all-reduce, and waiting for those who have not."""

from __future__ import annotations

from collections.abc import Mapping

from gossamer.real.transports.shm.backoff import Vigil
from gossamer.real.transports.shm.board import Board
from gossamer.real.transports.shm.operation import Operation
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import Bell
from gossamer.real.transports.transport import StopToken


class Posts:
    """What one process sees of those of the others."""

    def __init__(
        self, boards: Mapping[int, Board], control: Control, bell: Bell, stop: StopToken
    ) -> None:
        self._boards = boards
        self._control = control
        self._bell = bell
        self._stop = stop

    def are_complete(self, operation: Operation, *, is_thorough: bool) -> bool:
        """Whether nobody will post any more; the cells of those who have are noted."""
        return all(
            self._is_in(operation, member, is_thorough=is_thorough)
            for member in operation.kind.others
        )

    def _is_in(self, operation: Operation, member: int, *, is_thorough: bool) -> bool:
        """Whether it has posted, or never will."""
        board, key, likely = self._boards[member], operation.key, operation.cell
        cell = board.find(key, likely, is_thorough=is_thorough)
        if cell is None:
            if not self._control.is_out_of_sums(member):
                return False
            # What it had posted when it went is there to be found, wherever it is.
            cell = board.find(key, likely, is_thorough=True)
        if cell is not None:
            operation.found[member] = cell
        return True

    def wait(self, operation: Operation) -> None:
        """Until they are complete. One member after the other: who waits often shares a processor
        with those it waits for, and every look takes some of their time."""
        key, likely, found = operation.key, operation.cell, operation.found
        vigil: Vigil | None = None
        for member in operation.kind.others:
            keys = self._boards[member].keys
            while member not in found:
                seen = self._bell.value
                there = keys[likely]
                if there == key:
                    found[member] = likely
                    break
                if vigil is None:
                    vigil = Vigil(self._bell, self._stop)
                is_due = there or vigil.is_thorough
                if is_due and self._is_in(operation, member, is_thorough=True):
                    break
                vigil.pause(seen)
