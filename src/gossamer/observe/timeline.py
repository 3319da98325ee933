"""A run as a timeline that Perfetto and chrome://tracing open: computing, waiting and messages.

Each worker and each server is a process of the trace. Its first thread shows what the worker does.
The other threads show its messages; there are as many threads as messages on their way at once,
because spans of one thread may not overlap. A message is a span of its sender, from sending to
arrival; an arrow leads from it to a mark at the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from torch import Tensor

from gossamer.observe.observer import Observer, Span, end_name

_MAIN_THREAD = 0
"""The trace format identifies threads by numbers; names are only for display."""
_ARRIVAL_NS = 1_000
"""The length of the span in which an arrow ends: one unit of the format."""
_NAMED_MEMBERS = 16


class Timeline(Observer):
    """Writes Chrome-trace events as they happen, so that an interrupted run can be opened."""

    def __init__(
        self, path: Path, workers: int, *, most_events: int = 200_000, most_messages: int = 25_000
    ) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")
        # Perfetto accepts an array without its closing bracket, which a killed run leaves.
        self._file.write("[\n")
        self._left = most_events
        self._messages_left = most_messages
        self._arrows = 0
        self._first = True
        self._failure: OSError | None = None
        self._workers = workers
        self._lanes: dict[int, list[int]] = {}
        """For each end, when the last message of each of its threads was over."""
        for rank in range(workers):
            self._name(rank)

    def _name(self, end: int) -> None:
        self._lanes[end] = []
        self._describe(end, "process_name", _MAIN_THREAD, end_name(end, self._workers).strip())
        thread = "main" if end < self._workers else "serving"
        self._describe(end, "thread_name", _MAIN_THREAD, thread)

    def _describe(self, end: int, kind: str, thread: int, name: str) -> None:
        named = {"ph": "M", "pid": end, "tid": thread, "name": kind}
        self._write({**named, "args": {"name": name}})

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        self._span(worker, "gradient", span)

    def passed(self, machine: int, what: str, span: Span) -> None:
        self._span(machine, what, span)

    def waited(
        self, worker: int, what: str, peer: int | None, span: Span, moving: Sequence[Span] = ()
    ) -> None:
        self._span(worker, f"waiting: {what}{end_name(peer, self._workers, 'from')}", span)

    def carried(self, what: str, source: int, target: int, size_bytes: int, span: Span) -> None:
        """Write a span of the sender, an arrow, and a mark at the receiver."""
        start_ns, end_ns = span
        if not self._may_show(1, end_ns):
            return
        for end in (source, target):
            if end not in self._lanes:
                self._name(end)
        arrow = {"cat": "message", "name": what, "id": self._arrows}
        self._arrows += 1
        told: dict[str, object] = {"bytes": size_bytes}
        lane = self._lane(source, span)
        self._slice(source, lane, what + end_name(target, self._workers, "to"), span, told)
        self._write({"ph": "s", "pid": source, "tid": lane, "ts": start_ns / 1000, **arrow})
        arrival = (end_ns, end_ns + _ARRIVAL_NS)
        lane = self._lane(target, arrival)
        self._slice(target, lane, what + end_name(source, self._workers, "from"), arrival, told)
        self._write(
            {"ph": "f", "bp": "e", "pid": target, "tid": lane, "ts": end_ns / 1000, **arrow}
        )

    def gathered(self, what: str, members: Sequence[int], span: Span) -> None:
        """A collective has no sender, so it is a span of each member."""
        if not self._may_show(len(members), span[1]):
            return
        named = ", ".join(str(rank) for rank in members[:_NAMED_MEMBERS])
        if len(members) > _NAMED_MEMBERS:
            named += f" and {len(members) - _NAMED_MEMBERS} more"
        name = f"{what} of {len(members)} workers"
        for rank in members:
            self._slice(rank, self._lane(rank, span), name, span, {"workers": named})

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        """Write an event of one moment: a death, a partition."""
        moment = {"ph": "i", "pid": worker, "tid": _MAIN_THREAD, "s": "g"}
        self._write({**moment, "name": what, "ts": at_ns / 1000})

    def _may_show(self, spans: int, at_ns: int) -> bool:
        """Whether there is still room for messages; the first that has no room is noted."""
        if self._messages_left < 0:
            return False
        self._messages_left -= spans
        if self._messages_left < 0:
            self.happened(0, "messages are left out from here on", at_ns)
        return self._messages_left >= 0

    def _lane(self, end: int, span: Span) -> int:
        """The first thread of messages that is free when the span begins.

        Messages are reported in the order of their ends, so the last one of a thread ends last.
        """
        lanes = self._lanes[end]
        for at, busy_until in enumerate(lanes):
            if busy_until <= span[0]:
                lanes[at] = span[1]
                return at + 1
        lanes.append(span[1])
        self._describe(end, "thread_name", len(lanes), f"messages {len(lanes)}")
        return len(lanes)

    def _span(self, worker: int, name: str, span: Span) -> None:
        if self._left > 0 and span[1] > span[0]:
            self._left -= 1
            self._slice(worker, _MAIN_THREAD, name, span)

    def _slice(
        self, end: int, thread: int, name: str, span: Span, told: dict[str, object] | None = None
    ) -> None:
        event: dict[str, object] = {
            "ph": "X", "pid": end, "tid": thread, "name": name,
            "ts": span[0] / 1000, "dur": (span[1] - span[0]) / 1000,
        }  # fmt: skip
        self._write(event if told is None else {**event, "args": told})

    def _write(self, event: dict[str, object]) -> None:
        if self._failure is not None:
            return
        try:
            self._file.write(("" if self._first else ",\n") + json.dumps(event))
        except OSError as error:
            self._failure = error  # If the disk is full the run continues, and `close` raises.
        self._first = False

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
            finally:
                self._file.close()
            if self._failure is not None:
                raise self._failure
