"""The memory that the processes of one machine share, and its layout.

The launcher makes the memory without a name and passes it on as open files. So no death leaves
anything behind, not even the launcher's own. One file holds the control words of all processes.
Each process has another file, with its rings, windows, contributions and large frames.
Each control word has one writer at a time: a process writes its own state, and the launcher writes
the states of dead processes. A process that comes back begins another life in another file, whose
number the launcher writes down; the others open it through the launcher's table of files. Under
other launchers process 0 makes the memory (`one_host`), and every process that learns of a death
writes the state of the dead one; all write the same.
"""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

from gossamer.real.transports.shm.system import LOCK_BYTES, Bell, fence
from gossamer.real.transports.transport import Window

CACHE_LINE = 64
PAGE = 4096
RING_BYTES = 1 << 20
RING_HEAD_BYTES = 3 * CACHE_LINE
CELLS = 512
CELL_FIELDS = 7
LARGE_FRAMES = 64
"""How many large frames one process may have on their way to another."""
FRESH, OPEN, CLOSED, DEAD = range(4)
"""The states of a process."""
_NAME = "gossamer"
_WORDS_PER_PROCESS = 4 * CACHE_LINE // 8
_STATE, _OUT_OF_SUMS, _LIFE, _FILE, _HOLDER = range(5)
"""The first words of a process."""
_LAUNCHER = 1023
_REDUCTION_MIN_BYTES = 1 << 30
_REDUCTIONS = 16
_LARGE_FRAME_MIN_BYTES = 1 << 28


def aligned(count: int, unit: int = CACHE_LINE) -> int:
    return -(-count // unit) * unit


def window_bytes(window: Window) -> int:
    return window.numel * window.dtype.itemsize


# ---------------------------------------------------------------------- control words


class Control:
    """For each process: its state, whether it has left the sums, and three bells, which tell it
    that frames have come, that there is room for frames, or that an all-reduce has progressed."""

    def __init__(self, file: int, size: int, who: int) -> None:
        self._memory = mmap(file, _control_bytes(size))
        self._states = memoryview(self._memory).cast("Q")

        def bells(line: int) -> list[Bell]:
            return [
                Bell(self._memory, (4 * process + line) * CACHE_LINE, who)
                for process in range(size)
            ]

        self.frames, self.room, self.reductions = bells(1), bells(2), bells(3)

    def state(self, process: int) -> int:
        return self._word(process, _STATE)

    def _word(self, process: int, number: int) -> int:
        return self._states[process * _WORDS_PER_PROCESS + number]

    def life(self, process: int) -> int:
        """How often the process has come back."""
        return self._word(process, _LIFE)

    def file_of(self, process: int) -> str:
        """The file of a process, in the table of the launcher that holds it."""
        return f"/proc/{self._word(process, _HOLDER)}/fd/{self._word(process, _FILE)}"

    def set_file(self, process: int, file: int) -> None:
        """This process holds the memory of a process in this file."""
        self._states[process * _WORDS_PER_PROCESS + _FILE] = file
        self._states[process * _WORDS_PER_PROCESS + _HOLDER] = os.getpid()

    def begin_life(self, process: int, life: int, file: int) -> None:
        """A process is about to come, for the first time or back. It is in no sum yet."""
        at = process * _WORDS_PER_PROCESS
        self._states[at + _OUT_OF_SUMS] = 1
        self.set_file(process, file)
        self._states[at + _LIFE] = life
        self.set_state(process, FRESH)

    def set_state(self, process: int, state: int) -> None:
        """Set the state of a process, and wake all threads that may wait for it."""
        self._states[process * _WORDS_PER_PROCESS] = state
        for bells in (self.frames, self.room, self.reductions):
            for bell in bells:
                bell.ring()

    def is_gone(self, process: int) -> bool:
        """Whether the process is dead or has closed its transport, so that it does nothing more."""
        return self._word(process, _STATE) >= CLOSED

    def leave_sums(self, process: int) -> None:
        """The process contributes to no further sum; it may still read those that it has begun."""
        fence()  # a process that sees the word also sees all contributions
        self._states[process * _WORDS_PER_PROCESS + _OUT_OF_SUMS] = 1
        for bell in self.reductions:
            bell.ring()

    def is_out_of_sums(self, process: int) -> bool:
        return bool(self._word(process, _OUT_OF_SUMS)) or self.is_gone(process)


def _control_bytes(size: int) -> int:
    return aligned(4 * CACHE_LINE * size, PAGE)


class Segments:
    """The launcher's side: the files that it passes on, and its reports of deaths."""

    def __init__(self, fds: tuple[int, ...]) -> None:
        self.fds = fds
        """The file of the control words, then one file for each process, in order of rank."""
        self._control = Control(fds[0], len(fds) - 1, _LAUNCHER)
        for rank, file in enumerate(fds[1:]):
            self._control.set_file(rank, file)

    def mark_dead(self, rank: int) -> None:
        """A process has ended. If it had not closed its transport, it counts as dead."""
        if self._control.state(rank) < CLOSED:
            self._control.set_state(rank, DEAD)

    def renew(self, rank: int, life: int) -> None:
        """Make empty memory for a process that comes during the run. Whoever has mapped that of its
        earlier life keeps it."""
        fresh = os.memfd_create(_NAME)
        old = self.fds[rank + 1]
        self.fds = (*self.fds[: rank + 1], fresh, *self.fds[rank + 2 :])
        self._control.begin_life(rank, life, fresh)
        os.close(old)

    def close(self) -> None:
        """Close the files; processes that still use the memory keep it."""
        for file in self.fds:
            os.close(file)
        self.fds = ()


def create_segments(size: int) -> Segments:
    """Make empty memory for `size` processes, which size it when they open their transports."""
    fds = [os.memfd_create(_NAME) for _ in range(size + 1)]
    os.ftruncate(fds[0], _control_bytes(size))
    return Segments(tuple(fds))


def is_segment(file: int, process: int | str = "self") -> bool:
    """Whether this file descriptor is still such memory, and not a file of the program's own."""
    try:
        return os.readlink(f"/proc/{process}/fd/{file}").startswith(f"/memfd:{_NAME} ")
    except OSError:
        return False


# ---------------------------------------------------------------------- the memory of one process


@dataclass(frozen=True)
class WindowPlace:
    """The places of one window and of its lock in the owner's memory."""

    lock: int
    data: int
    window: Window


@dataclass(frozen=True)
class MemoryLayout:
    """The layout of the memory of one process, which all compute from the same windows.

    Pages that nobody touches cost nothing, so the sizes are generous.
    """

    windows: Mapping[int, WindowPlace]
    cells: int
    greetings: int
    """One word for each process: which life of it has made its connection to this process."""
    releases: int
    """One word for each slot of each sender: the large frame that this process released there."""
    reductions: int
    large_frames: int
    total: int

    def released(self, source: int) -> int:
        return self.releases + source * LARGE_FRAMES * 8

    def ring(self, source: int) -> int:
        """The place of the ring through which this process receives from `source`."""
        return source * (RING_HEAD_BYTES + RING_BYTES)


def lay_out(process: int, size: int, windows: Mapping[int, Window]) -> MemoryLayout:
    at = aligned(size * (RING_HEAD_BYTES + RING_BYTES), PAGE)
    cells, at = at, at + aligned(CELLS * CELL_FIELDS * 8, PAGE)
    greetings, at = at, at + aligned(size * 8, PAGE)
    releases, at = at, at + aligned(size * LARGE_FRAMES * 8, PAGE)
    own = {end: windows[end] for end in sorted(windows) if windows[end].process == process}
    locks, at = at, at + aligned(LOCK_BYTES * len(own), PAGE)
    places: dict[int, WindowPlace] = {}
    for number, (end, window) in enumerate(own.items()):
        places[end] = WindowPlace(locks + LOCK_BYTES * number, at, window)
        at += aligned(window_bytes(window), PAGE)
    largest = max((window_bytes(window) for window in windows.values()), default=0)
    frames = at + aligned(_REDUCTION_MIN_BYTES + _REDUCTIONS * largest, PAGE)
    # Two for each peer and some more. A frame for which there is no room goes through the ring.
    total = frames + aligned(_LARGE_FRAME_MIN_BYTES + 2 * (size + 2) * largest, PAGE)
    return MemoryLayout(places, cells, greetings, releases, at, frames, total)


class TensorBlock:
    """A block of bytes, in main memory or on a GPU, that is seen as tensors."""

    def __init__(self, whole: Tensor) -> None:
        self._bytes = whole

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements of that type from byte `start` on."""
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)


class SharedMemory(TensorBlock):
    """The memory of one process, which stays mapped while a view of it exists."""

    def __init__(self, file: int, length: int) -> None:
        self.map = mmap(file, length)
        self._view = memoryview(self.map)
        super().__init__(torch.frombuffer(self.map, dtype=torch.uint8))

    def region(self, start: int, length: int) -> memoryview:
        return self._view[start : start + length]

    def words(self, start: int, count: int) -> memoryview:
        return self.region(start, 8 * count).cast("Q")


class FreeList:
    """Which bytes of a range are in use. It hands out the lowest gap that is large enough."""

    def __init__(self, start: int, end: int) -> None:
        self._start = start
        self._end = end
        self._taken: list[tuple[int, int]] = []

    def take(self, length: int) -> int | None:
        """Return the start of that many free bytes, or None if there is no such gap."""
        length = aligned(max(1, length))  # two empty places must differ
        at = self._start
        for start, end in self._taken:
            if start - at >= length:
                break
            at = end
        if self._end - at < length:
            return None
        insort(self._taken, (at, at + length))
        return at

    def give_back(self, start: int) -> None:
        self._taken = [taken for taken in self._taken if taken[0] != start]
