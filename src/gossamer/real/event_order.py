"""The order of events of a real run, so that it can be executed again.

While a run is recorded, what its workers do between two waits happens one at a time: a lock that
all processes share is held, and each such turn gets the next number. Gradients are computed outside
of it, so workers still overlap where it matters. A turn is either a worker's own coroutine going on
or a frame being delivered; the numbers are all that a replay needs, because everything else that a
turn does follows from what was done before.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Protocol

from gossamer.real.transports.transport import Stopped

_NUMBER = struct.Struct("<q")


class Turns(Protocol):
    """When a thread of a worker may go on."""

    def enter(self, kind: str, source: int = -1) -> None: ...

    def leave(self) -> None: ...


class Free:
    """Without a record everybody goes on at once."""

    def enter(self, kind: str, source: int = -1) -> None:
        pass

    def leave(self) -> None:
        pass


class Recorder:
    """One process's part of a record: `order/RANK.jsonl`, and the number that all share."""

    def __init__(self, folder: Path, rank: int) -> None:
        place = folder / "order"
        place.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(place / ".turn", os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._descriptor).st_size < _NUMBER.size:
            os.ftruncate(self._descriptor, _NUMBER.size)
        self._shared = mmap.mmap(self._descriptor, _NUMBER.size)
        # The file's lock excludes processes and is freed with them; threads need one of their own.
        self._lock = threading.Lock()
        self._file = (place / f"{rank}.jsonl").open("w", encoding="utf-8")

    def enter(self, kind: str, source: int = -1) -> None:
        self._lock.acquire()
        if self._file.closed:
            self._lock.release()
            raise Stopped
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        (number,) = _NUMBER.unpack_from(self._shared)
        _NUMBER.pack_into(self._shared, 0, number + 1)
        self._file.write(json.dumps([number, kind, source]) + "\n")

    def leave(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._lock.release()

    def close(self) -> None:
        """A loop that runs freely may still want a turn; it gets none."""
        with self._lock:
            self._file.close()
