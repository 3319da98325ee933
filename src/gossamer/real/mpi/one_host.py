"""Sums of a job whose processes are all on one host: in memory that they share.

As messages every value would be copied twice more, and whoever waits would have to keep asking MPI;
shared memory is written once and read once, and who waits for it sleeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from gossamer.real.mpi.engine import MPI
from gossamer.real.shm.board import TURN_BYTES, Board, Room
from gossamer.real.shm.layout import lay_out
from gossamer.real.shm.memory import Memory
from gossamer.real.shm.reducing import Reducing
from gossamer.real.shm.segments import CLOSED, OPEN, Control, create_segments
from gossamer.real.transport import StopToken, Window


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
        room = Room(layouts[rank].reductions, layouts[rank].total, TURN_BYTES)
        self.start = Reducing(rank, boards, room, self._control, stop).start
        self._control.set_state(rank, OPEN)

    def close(self) -> None:
        """Nobody is to wait for this process any longer."""
        self._control.set_state(self._rank, CLOSED)


def share_sums(
    communicator: MPI.Intracomm, windows: Mapping[int, Window], stop: StopToken
) -> SharedSums | None:
    """Collective. None where the system keeps processes from opening each other's memory."""
    segments = create_segments(communicator.size) if communicator.rank == 0 else None
    told = np.zeros(communicator.size + 2, np.int64)
    if segments is not None:
        told[:] = (os.getpid(), *segments.fds)
    communicator.Bcast(told)
    owner, *numbers = (int(number) for number in told)
    files = _opened(owner, numbers)
    everybody = np.array([len(files)])
    communicator.Allreduce(MPI.IN_PLACE, everybody, MPI.MIN)
    # All have opened it, or never will: it has no name and ends with the last who holds it.
    if segments is not None:
        segments.close()
    can_all = int(everybody[0]) == len(numbers)
    sums = SharedSums(files, communicator.rank, windows, stop) if can_all else None
    for file in files:
        os.close(file)
    return sums


def _opened(owner: int, numbers: Sequence[int]) -> list[int]:
    """The files of another process that runs as the same user; fewer where that is forbidden."""
    files: list[int] = []
    for number in numbers:
        try:
            files.append(os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR))
        except OSError:
            break
    return files
