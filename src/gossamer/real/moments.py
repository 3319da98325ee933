"""The first moments of one worker's run: when it computed, and when it waited for whom."""

from __future__ import annotations

from gossamer.pending import Pending

Segment = tuple[float, float, str, str]
"""From when to when in seconds, what it did, and for what it waited."""
_MOST = 250


class Moments:
    """Few enough to be written down with the books; afterwards it costs a comparison."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._began = 0.0
        self._segments: list[Segment] = []

    def begin(self, now: float) -> None:
        self._began = now

    def computed(self, start: float, end: float) -> None:
        self._add(start, end, "computing", "")

    def waited(self, pending: Pending[object], start: float, end: float) -> None:
        if pending.label != "gradient":
            self._add(start, end, "waiting", f"{pending.label}{self._whom(pending.peer)}")

    def _whom(self, end: int | None) -> str:
        if end is None:
            return ""
        is_worker = end < self._workers
        return f" from worker {end}" if is_worker else f" from server {end - self._workers}"

    def _add(self, start: float, end: float, kind: str, detail: str) -> None:
        if len(self._segments) < _MOST:
            start, end = start - self._began, end - self._began
            self._segments.append((round(start, 6), round(end, 6), kind, detail))

    @property
    def segments(self) -> list[Segment]:
        return self._segments
