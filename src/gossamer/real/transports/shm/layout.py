"""Where things are in a process's memory; everybody works it out from the same description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.real.transports.shm.system import LOCK_BYTES
from gossamer.real.transports.transport import Window

LINE = 64
PAGE = 4096
RING_BYTES = 1 << 20
RING_HEAD_BYTES = 3 * LINE
CELLS = 512
CELL_FIELDS = 7
PARCELS = 64
"""That one process may have on the way to another."""
_REDUCTION_MIN_BYTES = 1 << 30
_REDUCTIONS = 16
_PARCEL_MIN_BYTES = 1 << 28


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
    releases: int
    """A word for each slot of each sender: which of its parcels this process has released."""
    reductions: int
    parcels: int
    total: int

    def released(self, source: int) -> int:
        return self.releases + source * PARCELS * 8

    def ring(self, source: int) -> int:
        """The ring that this process receives from `source` through."""
        return self.rings + source * (RING_HEAD_BYTES + RING_BYTES)


def lay_out(process: int, size: int, windows: Mapping[int, Window]) -> Layout:
    at = aligned(size * (RING_HEAD_BYTES + RING_BYTES), PAGE)
    cells, at = at, at + aligned(CELLS * CELL_FIELDS * 8, PAGE)
    releases, at = at, at + aligned(size * PARCELS * 8, PAGE)
    own = {end: windows[end] for end in sorted(windows) if windows[end].process == process}
    locks, at = at, at + aligned(LOCK_BYTES * len(own), PAGE)
    places: dict[int, Place] = {}
    for number, (end, window) in enumerate(own.items()):
        places[end] = Place(locks + LOCK_BYTES * number, at, window)
        at += aligned(window_bytes(window), PAGE)
    largest = max((window_bytes(window) for window in windows.values()), default=0)
    parcels = at + aligned(_REDUCTION_MIN_BYTES + _REDUCTIONS * largest, PAGE)
    # Two for each peer and some more: who is behind is sent to through its ring.
    total = parcels + aligned(_PARCEL_MIN_BYTES + 2 * (size + 2) * largest, PAGE)
    return Layout(0, places, cells, releases, at, parcels, total)
