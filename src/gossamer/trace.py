"""The record of a run: a digest of its events, and a timeline that Perfetto opens."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import IO

_MOST_NS = (1 << 63) - 1


class Digest:
    """A fingerprint of the sequence of events: same seed, same digest; integers only, so cheap."""

    __slots__ = ("_buffer", "_codes", "_hash")

    _FLUSH = 8192

    def __init__(self) -> None:
        self._buffer = array("q")
        self._codes: dict[str, int] = {}
        self._hash = hashlib.blake2b(digest_size=16)

    def event(self, now_ns: int, worker: int, label: str) -> None:
        code = self._codes.setdefault(label, len(self._codes))
        buffer = self._buffer
        # A clock beyond 292 years wraps around rather than ending the run.
        buffer.append(now_ns & _MOST_NS)
        buffer.append(worker << 20 | code)
        if len(buffer) >= self._FLUSH:
            self._flush()

    def _flush(self) -> None:
        self._hash.update(self._buffer.tobytes())
        del self._buffer[:]

    def hexdigest(self) -> str:
        self._flush()
        whole = self._hash.copy()
        # The names of the events count too: codes alone are only their order of appearance.
        whole.update("\n".join(self._codes).encode())
        return whole.hexdigest()


class Timeline:
    """Chrome-trace events, written as they happen: a run that is cut short can still be opened."""

    def __init__(self, path: Path, *, most_events: int = 200_000) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")
        # Perfetto accepts an array without its closing bracket: a killed run stays readable.
        self._file.write("[\n")
        self._left = most_events
        self._first = True

    def name_worker(self, worker: int, name: str) -> None:
        self._write({"ph": "M", "pid": worker, "name": "process_name", "args": {"name": name}})

    def span(self, worker: int, track: str, name: str, start_ns: int, end_ns: int) -> None:
        """Something that took time."""
        if self._left > 0 and end_ns > start_ns:
            self._left -= 1
            self._write(
                {
                    "ph": "X",
                    "pid": worker,
                    "tid": track,
                    "name": name,
                    "ts": start_ns / 1000,
                    "dur": (end_ns - start_ns) / 1000,
                }
            )

    def instant(self, worker: int, name: str, at_ns: int) -> None:
        """Something that happened at one moment: a death, a partition."""
        self._write({"ph": "i", "pid": worker, "s": "g", "name": name, "ts": at_ns / 1000})

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
            finally:
                self._file.close()
