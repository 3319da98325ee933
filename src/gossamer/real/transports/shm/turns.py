"""Whose turn it is with a window on a GPU, where what is asked for is done later.

A lock orders what processes ask of the GPU. What they asked under it may still be under way when
the lock is free: waiting for the stream in every guard would cost a step of AD-PSGD as much as the
step itself. So whoever leaves sets a mark behind its work and writes down that it was the last.
Who comes next and finds itself has nothing to wait for but its own streams; who finds another
waits, before it asks for anything, until the GPU has passed the other's mark, or the other is gone.
It waits itself instead of letting its stream wait: the mark of a process that was killed is never
reached, and a stream cannot be told so.
"""

from __future__ import annotations

import time

from gossamer.real.transports.shm.cuda import Gpu, Mark, OwnMark
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.transport import StopToken, Store

_NOBODY = 0


class Turns:
    """Those of one process at one window; only to be used under the window's lock."""

    def __init__(
        self, rank: int, end: int, last: memoryview, gpu: Gpu, store: Store, control: Control,
        stop: StopToken,
    ) -> None:  # fmt: skip
        """`last` is one shared word: the process before, counted from 1."""
        self._rank = rank
        self._end = end
        self._last = last
        self._gpu = gpu
        self._store = store
        self._control = control
        self._stop = stop
        self._own: OwnMark | None = None
        self._is_shared = True
        self._marks: dict[int, Mark] = {}

    def begin(self) -> bool:
        """Whether the process before died and may have left its work half done."""
        last = self._last[0]
        if last == _NOBODY:
            return False
        if last == self._rank + 1:
            if self._own is not None:
                self._own.precede()
            return False
        return not self._has_passed(last - 1)

    def end(self) -> None:
        if self._own is None and self._is_shared:
            self._share()
        if self._own is None:
            self._gpu.finish()
            self._last[0] = _NOBODY
            return
        self._own.record()
        self._last[0] = self._rank + 1

    def finish(self) -> None:
        """Wait for all that this process asked for here."""
        self._gpu.finish()

    def _has_passed(self, process: int) -> bool:
        """Wait for the GPU; False if that will never be, or nobody can tell any more."""
        if self._control.is_gone(process):
            return False
        mark = self._mark_of(process)
        while mark is None or not mark.query():
            if self._control.is_gone(process):
                return False
            self._stop.check()
            time.sleep(0)  # it is a matter of microseconds, for which a true sleep is too long
        return True

    def _mark_of(self, process: int) -> Mark | None:
        if process not in self._marks:
            handle = self._store.get(_name(process, self._end))
            assert handle is not None
            try:
                self._marks[process] = self._gpu.open_mark(handle)
            except RuntimeError:
                return None  # its process is just dying, which will be known in a moment
        return self._marks[process]

    def _share(self) -> None:
        """Where a system has no marks that processes can share, every turn is waited for."""
        try:
            self._own = self._gpu.shared_mark()
        except RuntimeError:
            self._is_shared = False
            return
        self._store.agree(_name(self._rank, self._end), self._own.handle)


def _name(process: int, end: int) -> str:
    return f"mark of {process} at window {end}"
