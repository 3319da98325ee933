"""What an engine underneath must give: frames between processes, windows of memory, and sums.

A process is one worker. A method's servers live inside the workers' processes; workers and servers
together are *ends*, numbered workers first. A transport moves frames between processes and keeps
one window of published parameters per end; which end a frame is for stands inside the frame.

Everything here may be called from several threads of a process at once. What waits obeys `stop`
within a tenth of a second by raising `Stopped`. Nothing is ever unpickled from the wire.
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
    """Set once; whoever waits looks at it at least every `patience` seconds."""

    patience = 0.05

    def __init__(self) -> None:
        self.is_set = False
        self.failure: Error | None = None
        """What a transport's own thread has found wrong: whoever waits raises it."""
        self.is_hopeless = False
        """Set where nobody can go on: then nobody waits for farewells either."""

    def set(self) -> None:
        self.is_set = True

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_set:
            raise Stopped


@dataclass(frozen=True)
class Window:
    """The published parameters of one end: how many, of which type, in whose process."""

    numel: int
    dtype: torch.dtype
    process: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where it lies; a transport whose windows lie in main memory refuses any other."""
    home: torch.device = torch.device("cpu")  # noqa: RUF009
    """Where this process computes, and where values to be reduced are."""


class Listener(Protocol):
    """What a transport calls from its own thread."""

    def frame(self, source: int, data: memoryview) -> None:
        """A whole frame of another process. The memory is the listener's to keep."""
        ...

    def lost(self, process: int) -> None:
        """A process has died. Called once for each."""
        ...


class Store(Protocol):
    """Small facts that all processes share; it outlives any worker where the engine allows it."""

    def agree(self, key: str, value: str) -> str:
        """The first value proposed for a key, whoever proposed it; never waits for anybody."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return the sum."""
        ...

    def get(self, key: str) -> str | None:
        """The agreed value, or None as long as nobody has proposed one."""
        ...


class Transport(Protocol):
    """One process's connection to the others."""

    name: str
    rank: int
    size: int

    @property
    def store(self) -> Store: ...

    @property
    def reduces_meanwhile(self) -> bool:
        """Whether a reduction goes on while nobody waits for it: then a gradient's first parts are
        on their way while backward makes the last. Known once it is open."""
        ...

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        """Connect, make the windows and fill this process's own with `initial`.

        Collective: returns when every process has done the same; frames may arrive from then on.
        """
        ...

    @property
    def lost(self) -> frozenset[int]:
        """The processes known to have died."""
        ...

    @property
    def torn_updates(self) -> int:
        """How many times this process found that a window's last writer was killed at it; only
        where memory is shared can a writer's death cut an update short."""
        ...

    def send(self, to: int, parts: Parts) -> None:
        """One frame: the parts one after the other, whole or not at all, in order per pair.

        The parts may be changed by the caller as soon as this returns. It never waits for the
        receiver's attention, so it may be called from `Listener.frame`. Raises `PeerLost` if the
        process is known to be dead. Sending to oneself is allowed.
        """
        ...

    def window(self, end: int) -> Tensor:
        """The memory of an end of this process, flat. Change it only under `guard`."""
        ...

    def guard(self, end: int) -> AbstractContextManager[None]:
        """Keeps everybody else from adding to an end of this process. Not for long. A `with` may be
        given the same one again and again."""
        ...

    def read(self, end: int) -> Pending[Tensor]:
        """The window's present value: a view where memory is shared, or a copy.

        A lent view may change under the reader, element by element; whoever keeps it copies it.
        """
        ...

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        """Add to a window from `start` on; no update is lost under contention.

        `delta` is read before this returns or is copied.
        """
        ...

    def average(self, own: int, peer: int) -> Pending[None]:
        """Two windows, one of this process, become their mean, as deltas that keep the sum."""
        ...

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        """Replace the tensors by their mean over the living members, added in order of rank.

        They are read before this returns; the mean is written when the operation is finished, in
        the thread that awaits it. Nothing is written if the operation is cancelled before that. All
        tensors have one type and lie on one device. Every member calls it in the same order for the
        same members, with tensors of the same sizes. A member that dies is left out, by the same
        decision for all survivors.
        """
        ...

    def leave_sums(self) -> None:
        """This process puts nothing into sums any more, and no sum of the others waits for it; it
        goes on answering. What it was to put into those that it has not finished is left out."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent. Others see this process as gone, not as dead."""
        ...
