"""A run as a timeline that Perfetto and chrome://tracing open: who computed, who waited, and which
message went from whom to whom.

Each worker and each server is a process of the trace. Its first thread is what the worker does; the
threads after it are its messages, as many as are on their way at once, for spans of one thread may
not overlap. A message is a span of its sender, from sending to arriving; an arrow leads from it to
a mark at the receiver.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from gossamer.trace import Carried, Span

_MAIN_THREAD = 0
"""The trace format has numbers where it has names only for people."""
_ARRIVAL_NS = 1_000
"""An arrow must end in a span; this one is as short as the format's unit."""
_NAMED_MEMBERS = 16


class Timeline:
    """Chrome-trace events, written as they happen: a run that is cut short can still be opened."""

    def __init__(
        self, path: Path, workers: int, *, most_events: int = 200_000, most_messages: int = 25_000
    ) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")
        # Perfetto accepts an array without its closing bracket: a killed run stays readable.
        self._file.write("[\n")
        self._left = most_events
        self._messages_left = most_messages
        self._arrows = 0
        self._first = True
        self._failure: OSError | None = None
        self._workers = workers
        self._lanes: dict[int, list[int]] = {}
        """When the last message of each thread of an end was over."""
        for rank in range(workers):
            self._name(rank)

    def _name(self, end: int) -> None:
        self._lanes[end] = []
        is_worker = end < self._workers
        name = f"worker {end}" if is_worker else f"server {end - self._workers}"
        self._describe(end, "process_name", _MAIN_THREAD, name)
        self._describe(end, "thread_name", _MAIN_THREAD, "main" if is_worker else "serving")

    def _describe(self, end: int, kind: str, thread: int, name: str) -> None:
        named = {"ph": "M", "pid": end, "tid": thread, "name": kind}
        self._write({**named, "args": {"name": name}})

    def computed(self, worker: int, start_ns: int, end_ns: int) -> None:
        self._span(worker, "gradient", start_ns, end_ns)

    def waited(
        self, worker: int, what: str, whom: str, start_ns: int, end_ns: int, moving: Sequence[Span]
    ) -> None:
        self._span(worker, f"waiting: {what}{whom}", start_ns, end_ns)

    def carried(self, message: Carried) -> None:
        """A span of the sender, an arrow, and a mark where it arrives."""
        if not self._may_show(1, message.end_ns):
            return
        what, source, target, size_bytes, start_ns, end_ns = message
        for end in (source, target):
            if end not in self._lanes:
                self._name(end)
        arrow = {"cat": "message", "name": what, "id": self._arrows}
        self._arrows += 1
        told: dict[str, object] = {"bytes": size_bytes}
        lane = self._lane(source, start_ns, end_ns)
        self._slice(source, lane, f"{what} to {self._called(target)}", start_ns, end_ns, told)
        self._write({"ph": "s", "pid": source, "tid": lane, "ts": start_ns / 1000, **arrow})
        after_ns = end_ns + _ARRIVAL_NS
        lane = self._lane(target, end_ns, after_ns)
        self._slice(target, lane, f"{what} from {self._called(source)}", end_ns, after_ns, told)
        self._write(
            {"ph": "f", "bp": "e", "pid": target, "tid": lane, "ts": end_ns / 1000, **arrow}
        )

    def gathered(self, what: str, members: Sequence[int], start_ns: int, end_ns: int) -> None:
        """A collective has no sender: it is a span of each of its members."""
        if not self._may_show(len(members), end_ns):
            return
        named = ", ".join(str(rank) for rank in members[:_NAMED_MEMBERS])
        if len(members) > _NAMED_MEMBERS:
            named += f" and {len(members) - _NAMED_MEMBERS} more"
        name = f"{what} of {len(members)} workers"
        for rank in members:
            lane = self._lane(rank, start_ns, end_ns)
            self._slice(rank, lane, name, start_ns, end_ns, {"workers": named})

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        """At one moment: a death, a partition."""
        moment = {"ph": "i", "pid": worker, "tid": _MAIN_THREAD, "s": "g"}
        self._write({**moment, "name": what, "ts": at_ns / 1000})

    def _may_show(self, spans: int, at_ns: int) -> bool:
        """Whether there is room for messages still; the first that has none says so."""
        if self._messages_left < 0:
            return False
        self._messages_left -= spans
        if self._messages_left < 0:
            self.happened(0, "messages are left out from here on", at_ns)
        return self._messages_left >= 0

    def _called(self, end: int) -> str:
        return f"worker {end}" if end < self._workers else f"server {end - self._workers}"

    def _lane(self, end: int, start_ns: int, end_ns: int) -> int:
        """The first thread of messages that is free from `start_ns` on.

        Messages are told in the order in which they end, so what a thread had last ends last.
        """
        lanes = self._lanes[end]
        for at, busy_until in enumerate(lanes):
            if busy_until <= start_ns:
                lanes[at] = end_ns
                return at + 1
        lanes.append(end_ns)
        self._describe(end, "thread_name", len(lanes), f"messages {len(lanes)}")
        return len(lanes)

    def _span(self, worker: int, name: str, start_ns: int, end_ns: int) -> None:
        if self._left > 0 and end_ns > start_ns:
            self._left -= 1
            self._slice(worker, _MAIN_THREAD, name, start_ns, end_ns)

    def _slice(
        self, end: int, thread: int, name: str, start_ns: int, end_ns: int,
        told: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        event: dict[str, object] = {
            "ph": "X", "pid": end, "tid": thread, "name": name,
            "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000,
        }  # fmt: skip
        self._write(event if told is None else {**event, "args": told})

    def _write(self, event: dict[str, object]) -> None:
        if self._failure is not None:
            return
        try:
            self._file.write(("" if self._first else ",\n") + json.dumps(event))
        except OSError as error:
            self._failure = error  # The disk is full: the run goes on, and `close` tells it.
        self._first = False

    def close(self) -> None:
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
            finally:
                self._file.close()
            if self._failure is not None:
                raise self._failure
