"""A started operation. Await it for its result; the driver decides what waiting means.

There is no event loop here. `await` means "wait for this operation": in virtual time the kernel
parks the task until the operation resolves, on real workers the task's own thread blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar, cast

from gossamer.errors import ProtocolError

T = TypeVar("T")

_OPEN, _RESOLVED, _FAILED, _CANCELLED = range(4)


class Pending(Generic[T]):
    """The result of an operation that has been started and may not have finished yet."""

    __slots__ = ("_callback", "_error", "_state", "_value", "label", "on_cancel", "peer")

    def __init__(self, label: str, peer: int | None = None) -> None:
        self.label = label
        self.peer = peer
        """The worker this operation depends on; its death fails the operation."""
        self.on_cancel: Callable[[], None] | None = None
        self._state = _OPEN
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callback: Callable[[], None] | None = None

    @property
    def done(self) -> bool:
        return self._state != _OPEN

    def result(self) -> T:
        """The value, or the error that the operation ended with."""
        if self._error is not None:
            raise self._error
        if self._state != _RESOLVED:
            raise ProtocolError(f"the result of {self.label!r} was asked for before it was there")
        return cast(T, self._value)

    def resolve(self, value: T) -> None:
        if self._state == _OPEN:
            self._state, self._value = _RESOLVED, value
            if self._callback is not None:
                self._callback()

    def fail(self, error: BaseException) -> None:
        if self._state == _OPEN:
            self._state, self._error = _FAILED, error
            if self._callback is not None:
                self._callback()

    def cancel(self) -> None:
        """Give up. Receives and sleeps lose nothing; what was sent may still arrive."""
        if self._state == _OPEN:
            self._state = _CANCELLED
            self._error = ProtocolError(f"{self.label!r} was cancelled and then awaited")
            if self.on_cancel is not None:
                self.on_cancel()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once, at once if the operation has already ended; later callers chain."""
        if self._state != _OPEN:
            callback()
        elif self._callback is None:
            self._callback = callback
        else:
            first = self._callback

            def both() -> None:
                first()
                callback()

            self._callback = both

    def __await__(self) -> Generator[Pending[Any], None, T]:
        yield self
        return self.result()


def gather(pendings: Sequence[Pending[T]]) -> Pending[list[T]]:
    """All results in order, once all are there; a failure among them fails the whole."""
    whole: Pending[list[T]] = Pending("gather")
    left = len(pendings)

    def one_more() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            try:
                whole.resolve([pending.result() for pending in pendings])
            except Exception as error:
                whole.fail(error)

    if not pendings:
        whole.resolve([])
    for pending in pendings:
        pending.when_done(one_more)
    return whole
