"""Memory for the sums of a job whose processes are all on one host (`shm.shared_sums`)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from gossamer.real.transports.mpi.engine import MPI
from gossamer.real.transports.shm.segments import create_segments
from gossamer.real.transports.shm.shared_sums import SharedSums, open_files
from gossamer.real.transports.transport import StopToken, Window


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
    files = open_files(owner, numbers)
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
