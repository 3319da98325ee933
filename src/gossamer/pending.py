"""A started operation. Await it for its result; the driver decides what waiting means.

There is no event loop here. `await` means "wait for this operation": in virtual time the kernel
parks the task until the operation resolves, on real workers the task's own thread blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from gossamer.errors import ProtocolError

T = TypeVar("T")
V = TypeVar("V")

_OPEN, _RESOLVED, _FAILED, _CANCELLED = range(4)


def check_awaited(found: object, whose: str) -> None:
    """Refuse what a coroutine awaits that is no operation of a `Worker`, such as asyncio's."""
    if not isinstance(found, Pending):
        raise ProtocolError(
            f"{whose} awaited {found!r}: not a Worker's word; await what w.gradient, w.read and "
            "the other words return"
        )


class Pending(Generic[T]):
    """The result of an operation that has been started and may not have finished yet."""

    __slots__ = (
        "_callbacks", "_error", "_state", "_value", "done", "label", "on_cancel", "peer", "settle",
    )  # fmt: skip

    def __init__(self, label: str, peer: int | None = None) -> None:
        self.label = label
        self.peer = peer
        """The worker this operation depends on; its death fails the operation."""
        self.on_cancel: Callable[[], None] | None = None
        self.settle: Callable[[], None] | None = None
        """On real workers, a function that finishes the operation in the thread that awaits it."""
        self.done = False
        """Whether the operation has ended; set last, because other threads look at it."""
        self._state = _OPEN
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    @staticmethod
    def resolved(label: str, value: V, peer: int | None = None) -> Pending[V]:
        """An operation that has already finished."""
        pending: Pending[V] = Pending(label, peer)
        pending.resolve(value)
        return pending

    @staticmethod
    def failed(label: str, error: BaseException, peer: int | None = None) -> Pending[Any]:
        """An operation that could not be started."""
        pending: Pending[Any] = Pending(label, peer)
        pending.fail(error)
        return pending

    @property
    def cancelled(self) -> bool:
        return self._state == _CANCELLED

    def result(self) -> T:
        """The value, or the error that the operation ended with."""
        if self._error is not None:
            raise self._error
        if self._state != _RESOLVED:
            raise ProtocolError(f"the result of {self.label!r} was asked for before it was there")
        return self._value  # pyright: ignore[reportReturnType]

    def resolve(self, value: T) -> None:
        if self._state == _OPEN:
            # The value is set first, because another thread may read it once the state is set.
            self._value = value
            self._state = _RESOLVED
            self.done = True
            if self._callbacks is not None:
                self._call_back()

    def fail(self, error: BaseException) -> None:
        if self._state == _OPEN:
            self._error = error
            self._state = _FAILED
            self.done = True
            if self._callbacks is not None:
                self._call_back()

    def cancel(self) -> None:
        """Give up the operation. Receives and sleeps lose nothing; a message may still arrive."""
        if self._state == _OPEN:
            # The state comes first, because another thread may resolve while the error is made.
            self._state = _CANCELLED
            self._error = ProtocolError(f"{self.label!r} was cancelled and then awaited")
            self.done = True
            if self.on_cancel is not None:
                self.on_cancel()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once when the operation ends, or now if it has ended; first come, first served.

        No lock is needed if the operation ends in another thread: whoever pops a callback calls it.
        """
        if self.done:
            callback()
            return
        if self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)
        if self.done:
            self._call_back()

    def _call_back(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return  # another thread was faster
            callback()

    def __await__(self) -> Generator[Pending[Any], None, T]:
        yield self
        return self.result()


class Gathered(Pending[list[T]]):
    """Several operations as one. It ends when all have ended, and fails as soon as one fails."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Pending[T]]) -> None:
        self.parts = parts
        if len(parts) == 1:
            # This is the usual case in a step, where every call counts.
            super().__init__(parts[0].label, parts[0].peer)
            parts[0].when_done(self._all_ended)
            return
        peers = {part.peer for part in parts}
        label = parts[0].label if parts else "gather"
        super().__init__(label, peers.pop() if len(peers) == 1 else None)
        done = count(1)

        def ended(part: Pending[T]) -> None:
            number = next(done)
            try:
                part.result()
            except Exception as error:
                self.fail(error)
            if number == len(parts):
                self._all_ended()

        if not parts:
            self.resolve([])
        for part in parts:
            part.when_done(partial(ended, part))

    def _all_ended(self) -> None:
        try:
            self.resolve([part.result() for part in self.parts])
        except Exception as error:
            self.fail(error)

    def __await__(self) -> Generator[Pending[Any], None, list[T]]:
        for part in self.parts:
            # A part that its awaiter must finish is awaited by itself.
            if part.settle is not None and not self.done:
                yield part
        yield self
        return self.result()


def gather(pendings: Sequence[Pending[T]]) -> Pending[list[T]]:
    """All results in order, once all operations have ended; one failure fails the whole."""
    return Gathered(pendings)
