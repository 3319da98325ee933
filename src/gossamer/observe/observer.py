"""The events of a run, and the observers that receive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

SECOND = 1_000_000_000
Row = dict[str, Any]
Span = tuple[int, int]
"""From when to when, in nanoseconds."""


class Observer:
    """Ignores every event; a subclass overrides those that it needs."""

    def computed(
        self, worker: int, span: Span, work_ns: int, samples: int, loss: Tensor | None
    ) -> None:
        """A gradient is complete; the work took less than the span if the worker was paused."""

    def passed(self, machine: int, what: str, span: Span) -> None:
        """A machine of a pipeline has made one pass of a micro-batch."""

    def began_step(self, worker: int, at_ns: int) -> None:
        """A step begins, or the last one is over. Only real workers report this."""

    def waited(
        self, worker: int, what: str, peer: int | None, span: Span, moving: Sequence[Span] = ()
    ) -> None:
        """A worker had nothing to compute. In the `moving` spans what it awaited was on its way."""

    def communicated(self, worker: int, what: str, span: Span) -> None:
        """A worker spent its own time on sending or fetching something."""

    def carried(self, what: str, source: int, target: int, size_bytes: int, span: Span) -> None:
        """A message between two ends has arrived."""

    def gathered(self, what: str, members: Sequence[int], span: Span) -> None:
        """A collective of these workers has ended; the span begins when the last of them joined."""

    def exchanged(
        self, worker: int, peer: int | None, at_ns: int, *, share: float = 1.0,
        age: int | None = None,
    ) -> None:  # fmt: skip
        """A worker has got a peer's model. `age` counts the peer's steps since, if it is known.

        Servers and collectives are no peer (None); from them a worker gets a share of a model.
        """

    def stale(self, end: int, missed: int, at_ns: int, missed_of_all: int | None = None) -> None:
        """A gradient was applied that missed this many updates of the replica of this end.

        `missed_of_all` counts the updates of all workers, if others change the replica.
        """

    def observed(self, end: int, what: str, value: float, at_ns: int) -> None:
        """A method has reported a number, such as the length of a queue or a dropped gradient."""

    def lost(self, worker: int, at_ns: int) -> None:
        """The others have learnt that a worker is gone."""

    def joined(self, worker: int, at_ns: int) -> None:
        """A worker takes part that was not there before, or was gone."""

    def happened(self, worker: int, what: str, at_ns: int) -> None:
        """A fault has begun."""

    def evaluated(self, row: Row) -> None:
        """The output model was evaluated."""

    def ended(self, summary: Row) -> None:
        """The run has ended by itself."""


class Observers(Observer):
    """Several observers as one; an event costs only the calls of those that override it."""

    def __init__(self, *parts: Observer) -> None:
        for event, ignored in vars(Observer).items():
            if not event.startswith("_"):
                listening = [part for part in parts if getattr(type(part), event) is not ignored]
                setattr(self, event, _each([getattr(part, event) for part in listening]))


def _each(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    if len(listeners) == 1:
        return listeners[0]

    def tell(*facts: Any, **more: Any) -> None:
        for listener in listeners:
            listener(*facts, **more)

    return tell


def end_name(end: int | None, size: int, way: str = "") -> str:
    """The name of an end, to stand behind a text; `size` is the number of workers."""
    if end is None:
        return ""
    return f" {way} worker {end}" if end < size else f" {way} server {end - size}"
