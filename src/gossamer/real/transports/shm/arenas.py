"""Values to be reduced that lie on a GPU: they are added up there, and never leave it.

Each process has one block of GPU memory, its arena, which the others open. It puts its values
there, the board says who has posted, as for values in main memory, and everybody adds all of them
up straight from the arenas. Why nothing is read too early or overwritten too soon:

A process waits for its own stream before it posts. So what is posted lies complete in the GPU's
memory and stays there, mapped by the others, whatever becomes of its process: one that died after
posting has contributed, one that died before has not, and all survivors see the same.

Reading is only asked of the GPU. The process says that it needs nobody's contribution any longer
when it finds its stream done with it: at the latest at its next post, which waits for the stream
anyway. An arena has room for two values of the largest size. Whoever writes a third has seen
everybody's post of the second, and with it everybody's word that the first has been read; so in
step with the others nobody ever waits for room.

A value goes into the arena once all living members have opened it. Before, and where there is no
room, it goes through main memory. Nobody needs to agree on that: each contribution says where it
lies. An arena that cannot be opened, as its process has just died, is left alone: that process can
never have posted anything in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.real.transports.shm.board import Board, Room
from gossamer.real.transports.shm.cuda import Gpu, Mark
from gossamer.real.transports.shm.layout import aligned
from gossamer.real.transports.shm.memory import Block
from gossamer.real.transports.shm.operation import Operation
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.transport import Store

IN_ARENA = 1 << 62
"""In a place on the board: it is one in the arena, not in main memory."""
OFFSET = (1 << 60) - 1
"""What of a place says where it is; the rest says what is there."""
_SMALL_BYTES = 1 << 20


class Arenas:
    """Those of all processes that share a GPU with this one, and its own."""

    def __init__(
        self, rank: int, boards: Mapping[int, Board], control: Control, store: Store, gpu: Gpu,
        largest: int,
    ) -> None:  # fmt: skip
        """`largest` is how many bytes the largest value usually has."""
        self.device = gpu.device
        self._rank = rank
        self._boards = boards
        self._opened_by_us = boards[rank].opened
        self._control = control
        self._store = store
        self._gpu = gpu
        self._capacity = 2 * aligned(largest) + _SMALL_BYTES
        self._room = Room(0, self._capacity)
        self._blocks: dict[int, Block] = {}
        self._refused: set[int] = set()
        self._reading: deque[tuple[Operation, Mark]] = deque()
        self._divisors: dict[tuple[float, torch.dtype], Tensor] = {}

    def take(self, length: int, members: Sequence[int]) -> int | None:
        """Room for a value where all living members can read it, or None."""
        if not self.is_open_to(members):
            return None
        offset = self._room.take(length)
        return None if offset is None else offset | IN_ARENA

    def is_open_to(self, members: Sequence[int]) -> bool:
        """Whether all of them who live can read this process's."""
        if self._rank not in self._blocks:
            self._make_own()
        return all(
            self._boards[member].opened[self._rank] or self._control.is_gone(member)
            for member in members
        )

    def give_back(self, place: int) -> None:
        self._room.give_back(place & OFFSET)

    def tensor(self, member: int, place: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._blocks[member].tensor(place & OFFSET, count, dtype)

    def finish_writing(self) -> None:
        """What was asked of the GPU in this thread is done, and can be posted."""
        self._gpu.finish()

    def mean(self, operation: Operation, values: Sequence[Tensor]) -> Tensor:
        """As in main memory, on the GPU."""
        kind = operation.kind
        result = torch.empty(kind.count, dtype=kind.dtype, device=self.device)
        here = [value.to(self.device) for value in values]
        if len(here) == 1:
            result.copy_(here[0])
        else:
            torch.add(here[0], here[1], out=result)
        for value in here[2:]:
            result.add_(value)
        divisor = kind.divisor(values)
        if divisor != 1.0:
            result.div_(self._divisor(divisor, kind.dtype))
        return result.view(operation.shape)

    def mark_reading(self, operation: Operation) -> None:
        """All that reads its contributions was asked of the GPU; the members' arenas are opened
        on the way."""
        self._open_those_of(operation.kind.members)
        self._reading.append((operation, self._gpu.mark()))

    def note_what_was_read(self, finish: Callable[[Operation], None]) -> None:
        """Finish the operations whose contributions the GPU has read."""
        for _ in range(len(self._reading)):
            operation, mark = self._reading.popleft()
            if mark.query():
                finish(operation)
            else:
                self._reading.append((operation, mark))

    def _make_own(self) -> None:
        memory = self._gpu.allocate(self._capacity)
        self._store.agree(_name(self._rank), self._gpu.handle(memory))
        self._blocks[self._rank] = Block(memory)
        fence()  # whoever sees the word finds the handle
        self._opened_by_us[self._rank] = 1

    def _open_those_of(self, members: Sequence[int]) -> None:
        for member in members:
            is_known = member in self._blocks or member in self._refused
            if is_known or not self._boards[member].opened[member]:
                continue
            handle = self._store.get(_name(member))
            assert handle is not None
            try:
                self._blocks[member] = Block(self._gpu.open(handle))
            except RuntimeError:
                self._refused.add(member)
                continue
            self._opened_by_us[member] = 1

    def _divisor(self, divisor: float, dtype: torch.dtype) -> Tensor:
        """On the GPU: by a plain number torch would multiply with its rounded inverse there."""
        key = (divisor, dtype)
        if key not in self._divisors:
            self._divisors[key] = torch.tensor(divisor, dtype=dtype, device=self.device)
        return self._divisors[key]


def _name(process: int) -> str:
    return f"arena {process}"
