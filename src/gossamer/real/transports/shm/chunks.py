"""One mean for all members, each of which makes its own chunk: where all have a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from gossamer.real.transports.shm.backoff import Vigil
from gossamer.real.transports.shm.board import Board
from gossamer.real.transports.shm.layout import aligned
from gossamer.real.transports.shm.means import mean_of_range
from gossamer.real.transports.shm.operation import Operation
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.transport import StopToken


class Chunks:
    """What one process makes and takes of them."""

    def __init__(
        self, rank: int, boards: Mapping[int, Board], control: Control, stop: StopToken
    ) -> None:  # fmt: skip
        self._rank = rank
        self._boards = boards
        self._control = control
        self._bell = control.reductions[rank]
        self._stop = stop

    def reduce(self, operation: Operation, values: Sequence[Tensor], result: Tensor) -> None:
        """To be called when all have posted."""
        key, kind, own = operation.key, operation.kind, self._boards[self._rank]
        chunks = dict(zip(kind.members, pairwise(kind.bounds), strict=True))
        own.working[operation.cell] = key
        start, end = chunks.pop(self._rank)
        divisor = kind.divisor(values)
        mean_of_range(values, result, start, end, divisor)
        self._chunk(operation, self._rank, end - start).copy_(result[start:end])
        fence()
        own.published[operation.cell] = key
        for member in kind.others:
            self._control.reductions[member].ring()
        vigil = Vigil(self._bell, self._stop)
        while chunks:
            seen = self._bell.value
            for member, (start, end) in list(chunks.items()):
                cell = operation.found.get(member)
                board = self._boards[member]
                if cell is not None and board.published[cell] == key:
                    result[start:end].copy_(self._chunk(operation, member, end - start))
                elif (
                    cell is None
                    or board.working[cell] != key
                    or self._control.is_out_of_sums(member)
                ):
                    mean_of_range(values, result, start, end, divisor)
                else:
                    continue
                del chunks[member]
            if chunks:
                vigil.pause(seen)

    def _chunk(self, operation: Operation, member: int, count: int) -> Tensor:
        """Where a member publishes its part of the result: behind what it put in."""
        board = self._boards[member]
        offset = board.offsets[operation.found[member]] + aligned(operation.kind.nbytes)
        return board.memory.tensor(offset, count, operation.kind.dtype)
