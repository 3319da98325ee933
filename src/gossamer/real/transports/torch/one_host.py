"""Memory for the sums of workers who are all on one host (`shm.shared_sums`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from gossamer.real.transports.checked_values import numbers_from
from gossamer.real.transports.shm.segments import Segments, create_segments
from gossamer.real.transports.shm.shared_sums import SharedSums, open_files
from gossamer.real.transports.torch.choose import Check, tell_all, wait_for
from gossamer.real.transports.transport import StopToken, Store, Window


def share_sums(
    rank: int, size: int, windows: Mapping[int, Window], store: Store, stop: StopToken, check: Check
) -> SharedSums | None:
    """Collective. None where the system keeps one of them from having or opening the memory."""
    with ExitStack() as at_end:
        if rank == 0:
            segments = _segments(size)
            told = () if segments is None else (os.getpid(), *segments.fds)
            store.agree("sums/memory", " ".join(map(str, told)))
            if segments is not None:
                at_end.callback(segments.close)
        where = wait_for("sums/memory", 0, store, check)
        told = numbers_from("sums/memory", where, " ") if where else []
        files = open_files(told[0], told[1:]) if told else []
        for file in files:
            at_end.callback(os.close, file)
        sums = _sums(files, rank, windows, stop) if len(files) == size + 1 else None
        # When all have answered they have opened it, or never will: it has no name, and ends with
        # the last who holds it.
        answers = tell_all("sums/opened", str(sums is not None), rank, size, store, check)
        return sums if answers == ["True"] * size else None


def _segments(size: int) -> Segments | None:
    try:
        return create_segments(size)
    except OSError:
        return None


def _sums(
    files: list[int], rank: int, windows: Mapping[int, Window], stop: StopToken
) -> SharedSums | None:
    try:
        return SharedSums(files, rank, windows, stop)
    except OSError:
        return None  # a limit of this process, on addresses or on files
