"""Where things are in a process's memory; everybody works it out from the same description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.real.shm.system import LOCK_BYTES
from gossamer.real.transport import Window

LINE = 64
PAGE = 4096
RING_BYTES = 1 << 20
RING_HEAD_BYTES = 3 * LINE
CELLS = 512
CELL_FIELDS = 7
_REDUCTION_MIN_BYTES = 1 << 30
_REDUCTIONS = 16


def aligned(count: int, unit: int = LINE) -> int:
    return -(-count // unit) * unit


def window_bytes(window: Window) -> int:
    return window.numel * window.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """One window inside its owner's memory."""

    lock: int
    data: int
    window: Window


@dataclass(frozen=True)
class Layout:
    """The memory of one process. Pages that nobody touches cost nothing, so sizes are generous."""

    rings: int
    places: Mapping[int, Place]
    cells: int
    reductions: int
    total: int

    def ring(self, source: int) -> int:
        """The ring that this process receives from `source` through."""
        return self.rings + source * (RING_HEAD_BYTES + RING_BYTES)


def lay_out(process: int, size: int, windows: Mapping[int, Window]) -> Layout:
    at = aligned(size * (RING_HEAD_BYTES + RING_BYTES), PAGE)
    cells, at = at, at + aligned(CELLS * CELL_FIELDS * 8, PAGE)
    own = {end: windows[end] for end in sorted(windows) if windows[end].process == process}
    locks, at = at, at + aligned(LOCK_BYTES * len(own), PAGE)
    places: dict[int, Place] = {}
    for number, (end, window) in enumerate(own.items()):
        places[end] = Place(locks + LOCK_BYTES * number, at, window)
        at += aligned(window_bytes(window), PAGE)
    largest = max((window_bytes(window) for window in windows.values()), default=0)
    total = at + aligned(_REDUCTION_MIN_BYTES + _REDUCTIONS * largest, PAGE)
    return Layout(0, places, cells, at, total)
