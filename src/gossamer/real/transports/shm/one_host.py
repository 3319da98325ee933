"""All-reduces in shared memory for processes of one host that another transport connects.

With messages every value would be copied twice more, and each process would get a message from
every other one. Shared memory is written once and read once, and a waiting process sleeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.shm.all_reduce import SharedMemoryAllReduce
from gossamer.real.transports.shm.contributions import Board
from gossamer.real.transports.shm.memory import (
    CLOSED,
    DEAD,
    OPEN,
    Control,
    FreeList,
    SharedMemory,
    create_segments,
    is_segment,
    lay_out,
)
from gossamer.real.transports.transport import StopToken, Window

_AT_ONCE = 4
"""A value goes this way if there is room for so many like it, with the chunks of their means."""
_LAST_POST_S = 1.0

Tell = Callable[[Sequence[int]], Sequence[int]]
"""All processes call this: process 0 gives numbers, and all get them."""
Agree = Callable[[bool], bool]
"""All processes call this: it returns whether all said yes."""


class OneHostAllReduce:
    """The all-reduces of one process, and how it leaves them."""

    def __init__(
        self, files: Sequence[int], rank: int, windows: Mapping[int, Window], stop: StopToken
    ) -> None:
        size = len(files) - 1
        self._rank = rank
        self._control = Control(files[0], size, rank)
        layouts = {process: lay_out(process, size, windows) for process in range(size)}
        boards: dict[int, Board] = {}
        for process, layout in layouts.items():
            os.ftruncate(files[1 + process], layout.total)
            boards[process] = Board(SharedMemory(files[1 + process], layout.total), layout)
        own = layouts[rank]
        self._most = (own.total - own.reductions) // (2 * _AT_ONCE)
        free = FreeList(own.reductions, own.total)
        self._inner = SharedMemoryAllReduce(rank, boards, free, self._control, stop)
        self._posting = threading.Lock()
        self._control.set_state(rank, OPEN)

    def has_room_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a value goes this way, which all members decide alike."""
        return sum(tensor.nbytes for tensor in tensors) <= self._most

    def start(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        with self._posting:
            # A process that the others regard as gone must not post: some of them may have decided
            # already that it contributes nothing.
            if self._control.is_out_of_sums(self._rank):
                raise PeerLost(self._rank, "it has left, or the others regard it as dead")
            return self._inner.start(tensors, members)

    def lost(self, process: int) -> None:
        """Another process has ended and will post nothing more; any process may say so."""
        if not self._control.is_gone(process):
            self._control.set_state(process, DEAD)

    def leave(self) -> None:
        """The others wait for this process no longer. What it is posting now still counts."""
        is_free = self._posting.acquire(timeout=_LAST_POST_S)
        self._inner.leave()
        if is_free:
            self._posting.release()

    def close(self) -> None:
        """Leave, and read no contribution of the others any more."""
        self.leave()
        self._control.set_state(self._rank, CLOSED)


def share_memory(
    rank: int, size: int, windows: Mapping[int, Window], stop: StopToken, tell: Tell, agree: Agree
) -> OneHostAllReduce | None:
    """All processes call this. It returns None if the system refuses the memory to one of them."""
    with ExitStack() as at_end:
        told: Sequence[int] = ()
        if rank == 0:
            try:
                segments = create_segments(size)
                at_end.callback(segments.close)
                told = (os.getpid(), *segments.fds)
            except OSError:
                pass  # then the others have nothing to open
        told = tell(told)
        files = open_files(told[0], told[1:]) if told else []
        for file in files:
            at_end.callback(os.close, file)
        made = None
        if len(files) == size + 1:
            try:
                made = OneHostAllReduce(files, rank, windows, stop)
            except OSError:
                pass  # this process has reached a limit of addresses or of files
        # When all have answered, each has opened the memory or never will. It has no name, and ends
        # with the last process that has it open.
        return made if agree(made is not None) else None


def open_files(owner: int, numbers: Sequence[int]) -> list[int]:
    """Open the memory of another process of the same user; return fewer files if one is refused."""
    files: list[int] = []
    for number in numbers:
        if not is_segment(number, owner):
            break
        try:
            files.append(os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR))
        except OSError:
            break
    return files
