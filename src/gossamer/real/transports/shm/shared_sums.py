"""Sums of processes of one host that another transport connects: in memory that they share.

As messages every value would be copied twice more, and whoever waits would have to be told by each
of the others; shared memory is written once and read once, and who waits for it sleeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.shm.all_reduce import Reducing
from gossamer.real.transports.shm.board import TURN_BYTES, Board, Room
from gossamer.real.transports.shm.layout import lay_out
from gossamer.real.transports.shm.memory import Memory
from gossamer.real.transports.shm.segments import CLOSED, DEAD, OPEN, Control, is_segment
from gossamer.real.transports.transport import Scattered, StopToken, Window

_AT_ONCE = 4
"""Values for which there must be room, with what is made of them, for one to go this way."""
_LAST_POST_S = 1.0


class SharedSums:
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
            boards[process] = Board(Memory(files[1 + process], layout.total), layout)
        own = layouts[rank]
        room = Room(own.reductions, own.total, TURN_BYTES)
        self._most = (own.total - own.reductions) // (2 * _AT_ONCE)
        self._reducing = Reducing(rank, boards, room, self._control, stop)
        self._posting = threading.Lock()
        self._control.set_state(rank, OPEN)

    def has_room_for(self, value: Tensor | Scattered) -> bool:
        """What has not goes another way; all members find the same."""
        if isinstance(value, Scattered):
            return value.count * value.kind.itemsize <= self._most
        return value.nbytes <= self._most

    def start(self, value: Tensor | Scattered, members: Sequence[int]) -> Pending[Tensor]:
        with self._posting:
            # Whom the others hold for gone must not post: some of them have seen that it did not.
            if self._control.is_gone(self._rank):
                raise PeerLost(self._rank, "it has left, or the others take it for dead")
            return self._reducing.start(value, members)

    def lost(self, process: int) -> None:
        """Another one has ended, and will post nothing more; each who notices may say so."""
        if not self._control.is_gone(process):
            self._control.set_state(process, DEAD)

    def close(self) -> None:
        """Nobody is to wait for this process any longer; what it is just posting still counts."""
        is_free = self._posting.acquire(timeout=_LAST_POST_S)
        self._control.set_state(self._rank, CLOSED)
        if is_free:
            self._posting.release()


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
