"""The first moments of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from gossamer.observe.observer import SECOND, Observer, Row, Span, end_name

Segment = tuple[int, int, str, str]
"""Begin, end, what the worker did, and with or for whom."""
_SHORTEST_NS = 20_000
"""The shortest gap that is shown as other work; a shorter one cannot be seen beside a step."""


class Strip(Observer):
    """The first moments of a run, worker by worker: computing, waiting for whom, communicating.

    On a real network the time of a message on the wire cannot be told from waiting for its sender,
    because one blocking wait contains both. The work of the worker's own thread for an exchange
    (copying, adding, sending) is reported by `communicated`.
    """

    def __init__(
        self, workers: int, until_ns: float = math.inf, *, most_segments: int = 2000
    ) -> None:
        self._workers = workers
        self._began_ns = 0
        self._until_ns = until_ns
        self._left = most_segments
        self._segments: dict[int, list[Segment]] = {}
        self.is_full = False

    def begin(self, now_ns: int) -> None:
        """The run begins at this moment of the clock."""
        self._began_ns = now_ns

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        self._add(worker, span, "computing", "")

    def passed(self, machine: int, what: str, span: Span) -> None:
        self._add(machine, span, "computing", what)

    def communicated(self, worker: int, what: str, span: Span) -> None:
        self._add(worker, span, "communicating", what)

    def waited(
        self, worker: int, what: str, peer: int | None, span: Span, moving: Sequence[Span] = ()
    ) -> None:
        detail = what + end_name(peer, self._workers, "from")
        moves: list[Span] = []
        for begin, end in sorted(moving):
            begin, end = max(begin, span[0]), min(end, span[1])
            if moves and begin <= moves[-1][1]:
                moves[-1] = (moves[-1][0], max(end, moves[-1][1]))
            else:
                moves.append((begin, end))
        for move in moves:
            self._add(worker, move, "communicating", detail)
        self._add(worker, span, "waiting", detail)

    def _add(self, worker: int, span: Span, kind: str, detail: str) -> None:
        start, end = span[0] - self._began_ns, span[1] - self._began_ns
        if self.is_full or end <= start or start >= self._until_ns:
            return
        own = self._segments.setdefault(worker, [])
        inside: list[Segment] = []
        while own and own[-1][0] >= start:
            inside.append(own.pop())
        # Segments that were reported before and lie inside, as an exchange within a wait does,
        # cut this segment into pieces.
        for one in reversed(inside):
            self._put(own, (start, one[0], kind, detail))
            own.append(one)
            start = one[1]
        self._put(own, (start, end, kind, detail))

    def _put(self, own: list[Segment], one: Segment) -> None:
        if one[1] <= one[0]:
            return
        if self._left == 0:
            # All workers are shown up to the same moment: when the room was used up.
            self.is_full = True
            self._until_ns = min(self._until_ns, one[0])
            return
        self._left -= 1
        own.append(one)

    def as_dict(self, servers: int, duration_ns: int) -> Row:
        """The segments in seconds, cut at the end of the shown time."""
        until = min(self._until_ns, duration_ns)
        shown = [
            [worker, _seconds(start), _seconds(min(end, until)), kind, detail]
            for worker, own in self._segments.items()
            for start, end, kind, detail in own
            if start < until
        ]
        return {
            "from": 0.0, "to": until / SECOND, "segments": shown, "workers": self._workers,
            "servers": servers,
        }  # fmt: skip

    def moments(self, worker: int) -> list[tuple[float, float, str, str]]:
        """The segments of one worker, in seconds, without a gap. The time between two segments is
        other work, such as its step, averaging, or serving."""
        found: list[tuple[float, float, str, str]] = []
        at = 0
        for start, end, kind, detail in self._segments.get(worker, ()):
            if start - at >= _SHORTEST_NS:
                found.append((_seconds(at), _seconds(start), "other", "its own work"))
            found.append((_seconds(start), _seconds(end), kind, detail))
            at = end
        return found


def _seconds(ns: float) -> float:
    return round(ns / SECOND, 7)
