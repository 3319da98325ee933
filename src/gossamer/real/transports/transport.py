"""The contract of a transport: frames between processes, windows of memory, and all-reduces.

A process is one worker. A method's servers live inside the workers' processes. Workers and servers
together are *ends*; the numbers of the workers come first. A transport moves frames between
processes, and keeps one window of published parameters per end. A frame says inside of itself which
end it is for.

Several threads of a process may call everything here at once. A call that waits raises `Stopped`
within a tenth of a second after `stop` was set. No transport unpickles what it receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gossamer.errors import Error
from gossamer.pending import Pending

Part = bytes | bytearray | memoryview
Parts = Sequence[Part]


class Stopped(BaseException):
    """The run was told to stop; unlike an error it is not reported."""


class StopToken:
    """Tells threads to stop. Once it is set it stays set; waiting threads look at it every
    `patience` seconds."""

    patience = 0.05

    def __init__(self) -> None:
        self.is_set = False
        self.failure: Error | None = None
        """An error that a thread of the transport has found; every waiting thread raises it."""
        self.is_hopeless = False
        """Whether no process can go on; then a transport closes without waiting for the others."""

    def set(self) -> None:
        self.is_set = True

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_set:
            raise Stopped


@dataclass(frozen=True)
class Window:
    """The published parameters of one end: their number, their type, and the process of the end."""

    numel: int
    dtype: torch.dtype
    process: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """The device of the window. A transport whose windows are in main memory refuses others."""
    home: torch.device = torch.device("cpu")  # noqa: RUF009
    """The device on which this process computes, and on which values to be reduced are."""


class Listener(Protocol):
    """Receives frames and news of deaths; a transport calls it from a thread of its own."""

    def frame(self, source: int, data: memoryview) -> None:
        """A whole frame of another process has arrived. The listener may keep the memory."""
        ...

    def lost(self, process: int) -> None:
        """A process has died. The transport says so once for each life."""
        ...

    def joined(self, process: int) -> None:
        """A process that was absent or dead has been connected to this one. It has still to say
        when it takes part."""
        ...

    def closed(self, process: int) -> None:
        """A process has closed its transport in good order."""
        ...


class Store(Protocol):
    """Small values that all processes share. Where the launcher allows it, the store outlives every
    worker."""

    def agree(self, key: str, value: str) -> str:
        """Return the first value that any process has proposed for a key. This never waits."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return the sum."""
        ...

    def get(self, key: str) -> str | None:
        """Return the agreed value, or None while no process has proposed one."""
        ...


class Transport(Protocol):
    """One process's connection to the others."""

    name: str
    rank: int
    size: int
    absent: frozenset[int]
    """The processes that do not begin together with this one. For a process that comes during the
    run these are all others."""
    life: int
    """How often this process has come to the run before: 0 at the beginning of the run."""

    @property
    def store(self) -> Store: ...

    @property
    def reduces_meanwhile(self) -> bool:
        """Whether an all-reduce goes on while nobody waits for it. Then the first parts of a
        gradient travel while backward computes the last. It is known once the transport is open."""
        ...

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        """Connect, make the windows, and fill those of this process with `initial`.

        All processes call this, and it returns when all have done so. Frames may arrive from then
        on.
        """
        ...

    @property
    def lost(self) -> frozenset[int]:
        """The processes known to have died."""
        ...

    @property
    def torn_updates(self) -> int:
        """How often this process found that the last writer of a window had died while it wrote.
        Only in shared memory can a death interrupt an update."""
        ...

    def send(self, to: int, parts: Parts) -> None:
        """Send one frame, which consists of the parts one after the other.

        A frame arrives whole or not at all, and frames of one pair arrive in order. The caller may
        change the parts as soon as this returns. It never waits for the receiver, so
        `Listener.frame` may call it. It raises `PeerLost` if the process is known to be dead. A
        process may send to itself.
        """
        ...

    def window(self, end: int) -> Tensor:
        """Return the flat memory of an end of this process. Change it only under `guard`."""
        ...

    def guard(self, end: int) -> AbstractContextManager[None]:
        """Return a lock that keeps all others from adding to an end of this process. Hold it only
        briefly. The same object may be used for many `with` statements."""
        ...

    def read(self, end: int) -> Pending[Tensor]:
        """Read the present value of a window: a view where memory is shared, else a copy.

        The elements of a view may change while it is read; copy it to keep it.
        """
        ...

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        """Add to a window from element `start` on. No update is lost when several processes add.

        The caller may change `delta` as soon as this returns.
        """
        ...

    def average(self, own: int, peer: int) -> Pending[None]:
        """Replace two windows, one of them of this process, by their mean. Their sum is kept."""
        ...

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        """Replace the tensors by their mean over the living members, added in order of rank.

        The tensors are read before this returns. The mean is written when the operation is
        finished, in the thread that awaits it; a cancelled operation writes nothing. All tensors
        have one type and are on one device. Every member calls this for the same members in the
        same order, with tensors of the same sizes. A member that dies is left out; all survivors
        decide alike whether its contribution counts.
        """
        ...

    def leave_sums(self) -> None:
        """This process contributes to no further all-reduce, and no all-reduce of the others waits
        for it. It goes on answering requests. Its contributions to all-reduces that it has begun
        and not finished may be left out."""
        ...

    def close(self) -> None:
        """Release everything. The others see this process as gone, and not as dead. A second call
        does nothing."""
        ...
