"""Windows in shared memory: all processes add to them directly, one at a time.

If a process is killed while it adds, each element of the window has its share or does not. The
process that takes the lock next counts a torn update and goes on. The windows of workers that share
a GPU are in its memory; `gpu` says when a process may use one there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.real.transports.shm.memory import MemoryLayout, SharedMemory, WindowPlace
from gossamer.real.transports.shm.system import SPARE_WORD, RobustLock
from gossamer.real.transports.transport import StopToken

if TYPE_CHECKING:
    from gossamer.real.transports.shm.gpu import WindowOrder

_BLOCK = 1 << 16
"""So many elements are still in the cache for a second pass over them."""


class SharedWindow:
    """The memory of one end and its lock, which a `with` statement holds."""

    def __init__(self, memory: SharedMemory, place: WindowPlace, stop: StopToken) -> None:
        self.window = place.window
        self.data = memory.tensor(place.data, self.window.numel, self.window.dtype)
        self.lock = RobustLock(memory.map, place.lock, stop)
        self.last = memory.words(place.lock + SPARE_WORD, 1)
        """For a window on a GPU: the process that held it last."""
        self.order: WindowOrder | None = None
        self.torn_updates = 0

    @cached_property
    def blocks(self) -> Sequence[Tensor]:
        """The memory in blocks; on a GPU there is one."""
        return (self.data,) if self.data.is_cuda else self.data.split(_BLOCK)

    def __enter__(self) -> None:
        result = self.lock.try_acquire()
        if result and self.lock.acquire_after(result):
            self.torn_updates += 1
        if self.order is not None:
            try:
                self.torn_updates += self.order.begin()
            except BaseException:
                self.lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        try:
            if self.order is not None:
                self.order.end()
        finally:
            self.lock.release()


class Windows:
    """The windows of all ends."""

    def __init__(
        self, memories: Mapping[int, SharedMemory], layouts: Mapping[int, MemoryLayout],
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._stop = stop
        self.shared: dict[int, SharedWindow] = {}
        for process, memory in memories.items():
            self.take(memory, layouts[process])

    def take(self, memory: SharedMemory, layout: MemoryLayout) -> None:
        """Use the windows of a process in this memory from now on."""
        for end, place in layout.windows.items():
            self.shared[end] = SharedWindow(memory, place, self._stop)

    @property
    def torn_updates(self) -> int:
        return sum(shared.torn_updates for shared in self.shared.values())

    def initialise(self, initial: Mapping[int, Tensor]) -> None:
        """Fill this process's own windows, before other processes use them."""
        for end, value in initial.items():
            shared = self.shared[end]
            shared.lock.initialise()
            shared.data.copy_(value.detach().reshape(-1))

    def finish(self) -> None:
        """Wait until the GPUs have done what this process asked of them at the windows."""
        for shared in self.shared.values():
            if shared.order is not None:
                shared.order.finish()

    def accumulate(self, end: int, delta: Tensor, start: int) -> None:
        delta = delta.detach().reshape(-1)
        shared = self.shared[end]
        stop = start + delta.numel()
        if start < 0 or stop > shared.data.numel():
            raise ProtocolError(
                f"{delta.numel()} values from {start} on do not fit into the window of end {end},"
                f" which has {shared.data.numel()}"
            )
        with shared:
            shared.data[start:stop].add_(delta.to(shared.data.device))

    def average(self, own: int, peer: int) -> None:
        """Replace two windows by their mean. All processes take locks in the order of the ends, so
        no two of them wait for each other."""
        if own == peer:
            return
        mine, theirs = self.shared[own], self.shared[peer]
        is_together = mine.data.device == theirs.data.device
        with self.shared[min(own, peer)], self.shared[max(own, peer)]:
            for some, others in zip(mine.blocks, theirs.blocks, strict=True):
                some.lerp_(others if is_together else others.to(some.device), 0.5)
                others.copy_(some)
