"""One mean for all members, made by whoever is there: for more members than processors.

Who posts last makes the parts of it from the front on. Who waits and finds that all have posted
takes a part from the back: its processor has nothing better to do. All is put together in one
place, behind what the first contributor put in, where it is given back only when every member is
done with it. A part may be made twice, because two took it at once or its maker died, and be read
while it is made again: so every number is written there once by each, and has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from gossamer.real.transports.shm.board import Board
from gossamer.real.transports.shm.layout import aligned
from gossamer.real.transports.shm.means import mean_at_once
from gossamer.real.transports.shm.operation import PROCESSORS, Operation
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import fence

_PARTS = min(PROCESSORS, 8)
_ALL = (1 << _PARTS) - 1
_UNIT = 1 << 10
"""Parts begin at multiples of so many elements: two makers never write the same line."""


class Making:
    """What one process does for results that all need, and what it sees of others doing so.

    In such operations the words `working` and `published` of a cell have a bit for each part.
    """

    def __init__(self, rank: int, boards: Mapping[int, Board], control: Control) -> None:
        self._rank = rank
        self._boards = boards
        self._control = control
        # Others than the first part, which the last to post begins with; not all the same one.
        self._order = [*((-1 - rank - n) % (_PARTS - 1) + 1 for n in range(_PARTS - 1)), 0]

    def is_over(self, operation: Operation) -> bool:
        made = 0
        for member, cell in operation.found.items():
            made |= self._boards[member].published[cell]
        return made == _ALL

    @staticmethod
    def result_at(operation: Operation, offset: int) -> int:
        """Where the result lies, in the memory of the first contributor, whose value lies there."""
        return offset + aligned(operation.kind.nbytes)

    def make(self, operation: Operation, *, is_last: bool) -> bool:
        """The parts that nobody is at; whether there were any. To be called when all have posted.

        `is_last`: this process has posted last, and begins at the front.
        """
        own, cell = self._boards[self._rank], operation.cell
        has_made = False
        for part in range(_PARTS) if is_last else self._order:
            if self._is_taken(operation, part):
                continue
            own.working[cell] |= 1 << part
            try:
                self._make_part(operation, part)
            except BaseException:
                own.working[cell] &= ~(1 << part)  # or all would wait for it
                raise
            fence()
            own.published[cell] |= 1 << part
            has_made = True
        return has_made

    def _is_taken(self, operation: Operation, part: int) -> bool:
        """Whether it is made, or being made by somebody alive."""
        for member, cell in operation.found.items():
            board = self._boards[member]
            if board.published[cell] >> part & 1:
                return True
            if board.working[cell] >> part & 1 and not self._control.is_out_of_sums(member):
                return True
        return False

    def _make_part(self, operation: Operation, part: int) -> None:
        kind, boards = operation.kind, self._boards
        step = aligned(-(-kind.count // _PARTS), _UNIT)
        start, end = min(kind.count, part * step), min(kind.count, (part + 1) * step)
        at = start * kind.dtype.itemsize
        found = operation.found.items()
        sources = sorted((member, boards[member].offsets[cell]) for member, cell in found)
        values = [
            boards[member].memory.tensor(offset + at, end - start, kind.dtype)
            for member, offset in sources
        ]
        first, offset = sources[0]
        place = self.result_at(operation, offset) + at
        result = boards[first].memory.tensor(place, end - start, kind.dtype)
        mean_at_once(values, result, kind.divisor(values))
