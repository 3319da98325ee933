"""All-reduces in shared memory for processes of one host that another transport connects.

As messages every value would be copied twice more, and whoever waits would have to be told by each
of the others. Shared memory is written once and read once, and whoever waits for it sleeps.
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
"""Values for which there must be room, with the chunks of their means, for one to go this way."""
_LAST_POST_S = 1.0

Tell = Callable[[Sequence[int]], Sequence[int]]
"""Collective: process 0 gives numbers, and everybody gets them."""
Agree = Callable[[bool], bool]
"""Collective: whether all have said yes."""


class OneHostAllReduce:
    """The all-reduces of one process, and its farewell."""

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
        """What has no room goes another way; all members find the same."""
        return sum(tensor.nbytes for tensor in tensors) <= self._most

    def start(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        with self._posting:
            # A process that the others take for gone must not post: some of them have seen that it
            # had not.
            if self._control.is_out_of_sums(self._rank):
                raise PeerLost(self._rank, "it has left, or the others take it for dead")
            return self._inner.start(tensors, members)

    def lost(self, process: int) -> None:
        """Another process has ended and will post nothing more; each who notices may say so."""
        if not self._control.is_gone(process):
            self._control.set_state(process, DEAD)

    def leave(self) -> None:
        """Nobody is to wait for this process any longer; what it is just posting still counts."""
        is_free = self._posting.acquire(timeout=_LAST_POST_S)
        self._inner.leave()
        if is_free:
            self._posting.release()

    def close(self) -> None:
        """Leave, and read nobody's contribution any more."""
        self.leave()
        self._control.set_state(self._rank, CLOSED)


def share_memory(
    rank: int, size: int, windows: Mapping[int, Window], stop: StopToken, tell: Tell, agree: Agree
) -> OneHostAllReduce | None:
    """Collective. None where the system keeps one of them from having or opening the memory."""
    with ExitStack() as at_end:
        told: Sequence[int] = ()
        if rank == 0:
            try:
                segments = create_segments(size)
                at_end.callback(segments.close)
                told = (os.getpid(), *segments.fds)
            except OSError:
                pass  # the others find nothing to open
        told = tell(told)
        files = open_files(told[0], told[1:]) if told else []
        for file in files:
            at_end.callback(os.close, file)
        made = None
        if len(files) == size + 1:
            try:
                made = OneHostAllReduce(files, rank, windows, stop)
            except OSError:
                pass  # a limit of this process, on addresses or on files
        # When all have answered, they have opened the memory or never will: it has no name, and
        # ends with the last process that holds it.
        return made if agree(made is not None) else None


def open_files(owner: int, numbers: Sequence[int]) -> list[int]:
    """The memory of another process that runs as the same user; less where that is forbidden."""
    files: list[int] = []
    for number in numbers:
        if not is_segment(number, owner):
            break
        try:
            files.append(os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR))
        except OSError:
            break
    return files
