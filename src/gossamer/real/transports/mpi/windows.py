"""Windows of published parameters in MPI's one-sided memory, with a lock for each end.

Every process has one block of memory for its ends: for each a lock word, then the data. If all
processes are on one host, every process maps all blocks, and a read returns the memory itself.
Between hosts values travel by Get and Accumulate.

MPI makes an Accumulate atomic only with respect to other Accumulates, and not to writes of the
owner's threads. So a process that changes a window holds the lock of the end, also the owner. The
lock is a word that is taken by Compare_and_swap, which needs no thread of the owner. Large changes
happen in pieces, each under the lock, so that no process holds it for long. Readers take no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.buffers import take_elements
from gossamer.real.transports.mpi.engine import MPI, as_words
from gossamer.real.transports.transport import StopToken, Window

_LINE = 64
_FREE = np.zeros(1, np.int64)
_TAKEN = np.ones(1, np.int64)
_PIECE = 1 << 22
"""How many bytes are added under the lock at a time."""
_CACHED_PIECE = 1 << 20
"""So many bytes stay in the cache of a core while they are read and written."""
_SUMMED = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
}
"""The types that MPI can add. Others are fetched, added here and put back."""


def places_of(windows: Mapping[int, Window]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the place of each end's lock in the memory of its process, and the length of each
    memory."""
    places: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for end in sorted(windows):
        window = windows[end]
        places[end] = lengths.get(window.process, 0)
        data = -(-window.numel * window.dtype.itemsize // _LINE) * _LINE
        lengths[window.process] = places[end] + _LINE + data
    return places, lengths


class EndLock:
    """The lock of one end of any process. It also excludes threads of the same process."""

    def __init__(self, win: MPI.Win, process: int, place: int, stop: StopToken) -> None:
        self._win = win
        self._process = process
        self._place = place
        self._stop = stop

    def __enter__(self) -> None:
        backoff = Backoff(self._stop, 0.0)
        while not self._swap(_FREE, _TAKEN):
            backoff.pause()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._swap(_TAKEN, _FREE)

    def _swap(self, expected: np.ndarray, wanted: np.ndarray) -> bool:
        found = np.empty(1, np.int64)
        # All writes under the lock must be visible before the lock is seen free.
        self._win.Sync()
        self._win.Compare_and_swap(wanted, expected, found, self._process, self._place)
        self._win.Flush(self._process)
        self._win.Sync()
        return found[0] == expected[0]


class MpiWindows:
    """All windows of a job."""

    def __init__(
        self, communicator: MPI.Intracomm, windows: Mapping[int, Window], stop: StopToken,
        *, mapped: bool,
    ) -> None:  # fmt: skip
        self._windows = dict(windows)
        self._places, lengths = places_of(windows)
        self._rank = communicator.rank
        length = lengths.get(self._rank, 0)
        if mapped:
            info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
            self._win = MPI.Win.Allocate_shared(length, 1, info, communicator)
            info.Free()
        else:
            self._win = MPI.Win.Allocate(length, 1, MPI.INFO_NULL, communicator)
        self._win.Lock_all()
        self.views = {
            end: self._map(end)
            for end, window in windows.items()
            if mapped or window.process == self._rank
        }
        """The memory of every end that this process can access directly."""
        self._locks = {
            end: EndLock(self._win, window.process, self._places[end], stop)
            for end, window in windows.items()
        }

    def fill(self, initial: Mapping[int, Tensor]) -> None:
        """Give this process's own ends their first values and free locks."""
        mine = np.frombuffer(cast(Any, self._win.tomemory()), np.uint8)
        for end, window in self._windows.items():
            if window.process == self._rank:
                mine[self._places[end] : self._places[end] + _LINE] = 0
                self.views[end].copy_(initial[end].reshape(-1))
        self._win.Sync()

    def lock(self, end: int) -> EndLock:
        return self._locks[end]

    def fetch(self, end: int, into: Tensor, start: int = 0) -> MPI.Request:
        """Start to copy a distant window, from `start` on, into a tensor."""
        window = self._windows[end]
        return self._win.Rget(as_words(into), window.process, self._place(end, start))

    def add(self, end: int, delta: Tensor, start: int = 0) -> None:
        """Add to an end from `start` on, piece by piece under its lock."""
        view, lock = self.views.get(end), self._locks[end]
        at = start
        for piece in delta.split(_PIECE // delta.element_size()):
            with lock:
                if view is not None:
                    view[at : at + len(piece)].add_(piece)
                else:
                    self._add_far(end, piece, at)
            at += len(piece)

    def average(self, own: int, peer: int) -> None:
        """Replace both windows by their mean, piece by piece.

        This holds both locks, so that nothing intervenes and the sum stays; otherwise two averages
        of one pair at the same time would exchange the values. All processes take locks in the
        order of the ends, so no deadlock can arise.
        """
        mine, theirs = self.views[own], self.views.get(peer)
        first, second = self._locks[min(own, peer)], self._locks[max(own, peer)]
        if theirs is not None:
            size = _CACHED_PIECE // mine.element_size()
            for part, other in zip(mine.split(size), theirs.split(size), strict=True):
                with first, second:
                    other.copy_(part.lerp_(other, 0.5))
            return
        size = _PIECE // mine.element_size()
        room = take_elements(min(size, len(mine)), mine.dtype)
        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            other = room[: len(part)]
            with first, second:
                self.fetch(peer, other, start).Wait()
                part.lerp_(other, 0.5)
                self._put(peer, part, start)

    def free(self) -> None:
        """Free the memory. All processes call this together."""
        self._win.Unlock_all()
        self._win.Free()

    def _add_far(self, end: int, delta: Tensor, start: int) -> None:
        """Add to memory of another host, under the lock of the end."""
        window = self._windows[end]
        kind = _SUMMED.get(delta.dtype)
        if kind is not None:
            target = (self._place(end, start), len(delta), kind)
            self._win.Accumulate([delta.numpy(), kind], window.process, target, MPI.SUM)
            self._win.Flush(window.process)
        else:
            fetched = take_elements(len(delta), delta.dtype)
            self.fetch(end, fetched, start).Wait()
            self._put(end, fetched.add_(delta), start)

    def _put(self, end: int, value: Tensor, start: int) -> None:
        window = self._windows[end]
        self._win.Put(as_words(value), window.process, self._place(end, start))
        self._win.Flush(window.process)

    def _place(self, end: int, start: int) -> int:
        return self._places[end] + _LINE + start * self._windows[end].dtype.itemsize

    def _map(self, end: int) -> Tensor:
        window = self._windows[end]
        if window.numel == 0:
            return torch.empty(0, dtype=window.dtype)
        if window.process == self._rank:
            memory = self._win.tomemory()
        else:
            memory, _ = self._win.Shared_query(window.process)
        start = self._place(end, 0)
        whole = np.frombuffer(cast(Any, memory), np.uint8)
        part = whole[start : start + window.numel * window.dtype.itemsize]
        return torch.from_numpy(part).view(window.dtype)
