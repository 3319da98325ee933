"""The record of a run: a digest of its events, who does what when, and the first moments of it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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


Span = tuple[int, int]
"""From when to when, in nanoseconds."""


class Carried(NamedTuple):
    """A message that has arrived; ends beyond the workers are servers."""

    what: str
    source: int
    target: int
    size_bytes: int
    start_ns: int
    end_ns: int


class Recorder(Protocol):
    """Keeps what workers did when."""

    def computed(self, worker: int, start_ns: int, end_ns: int) -> None: ...

    def waited(
        self, worker: int, what: str, whom: str, start_ns: int, end_ns: int, moving: Sequence[Span]
    ) -> None:
        """`moving`: when what was awaited was on its way already."""
        ...

    def carried(self, message: Carried) -> None: ...

    def gathered(self, what: str, members: Sequence[int], start_ns: int, end_ns: int) -> None:
        """A collective of these workers."""
        ...

    def happened(self, worker: int, what: str, at_ns: int) -> None: ...


class Recorders:
    """Several recorders as one."""

    def __init__(self, parts: Sequence[Recorder]) -> None:
        self._parts = parts

    def computed(self, worker: int, start_ns: int, end_ns: int) -> None:
        for part in self._parts:
            part.computed(worker, start_ns, end_ns)

    def waited(
        self, worker: int, what: str, whom: str, start_ns: int, end_ns: int, moving: Sequence[Span]
    ) -> None:
        for part in self._parts:
            part.waited(worker, what, whom, start_ns, end_ns, moving)

    def carried(self, message: Carried) -> None:
        for part in self._parts:
            part.carried(message)

    def gathered(self, what: str, members: Sequence[int], start_ns: int, end_ns: int) -> None:
        for part in self._parts:
            part.gathered(what, members, start_ns, end_ns)

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        for part in self._parts:
            part.happened(worker, what, at_ns)


class Strip:
    """The first moments of a run, worker by worker: computing, waiting for whom, communicating."""

    def __init__(self, until_ns: int, *, most_segments: int = 2000) -> None:
        self._until_ns = until_ns
        self._left = most_segments
        self._segments: list[list[Any]] = []
        self.is_full = False

    def computed(self, worker: int, start_ns: int, end_ns: int) -> None:
        self._add(worker, start_ns, end_ns, "computing", "")

    def waited(
        self, worker: int, what: str, whom: str, start_ns: int, end_ns: int, moving: Sequence[Span]
    ) -> None:
        detail = f"{what}{whom}"
        at = start_ns
        for begin, end in _joined(moving):
            begin, end = max(begin, at), min(end, end_ns)
            if end > begin:
                self._add(worker, at, begin, "waiting", detail)
                self._add(worker, begin, end, "communicating", detail)
                at = end
        self._add(worker, at, end_ns, "waiting", detail)

    def carried(self, message: Carried) -> None:
        pass

    def gathered(self, what: str, members: Sequence[int], start_ns: int, end_ns: int) -> None:
        pass

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        pass

    def _add(self, worker: int, start_ns: int, end_ns: int, kind: str, detail: str) -> None:
        if self.is_full or end_ns <= start_ns or start_ns >= self._until_ns:
            return
        if self._left == 0:
            # What is shown is shown of everybody: up to the moment at which there was no room.
            self.is_full = True
            self._until_ns = min(self._until_ns, start_ns)
            return
        self._left -= 1
        self._segments.append([worker, start_ns, end_ns, kind, detail])

    def as_dict(self, servers: int, duration_ns: int) -> dict[str, Any]:
        """In seconds, cut at the end of what is shown."""
        until = min(self._until_ns, duration_ns)
        shown = [
            [worker, round(start / 1e9, 7), round(min(end, until) / 1e9, 7), kind, detail]
            for worker, start, end, kind, detail in self._segments
            if start < until
        ]
        return {"from": 0.0, "to": until / 1e9, "segments": shown, "servers": servers}


def _joined(spans: Sequence[Span]) -> list[Span]:
    """In order of time; those that touch or overlap are one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
