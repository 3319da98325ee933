"""Windows in shared memory: everybody adds to them directly, one at a time.

A process that is killed while it adds leaves every element either with or without its share;
whoever takes the lock next counts that as a torn update and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gossamer.errors import ProtocolError
from gossamer.real.shm.cuda import attach, publish
from gossamer.real.shm.layout import Layout, Place
from gossamer.real.shm.memory import Memory
from gossamer.real.shm.system import RobustLock
from gossamer.real.transport import StopToken, Store, Window

_PATIENCE_S = 60.0
_BLOCK = 1 << 16
"""Elements that two passes over the same data find in the cache again."""


class _Shared:
    """One end's memory and its lock, which a `with` holds."""

    def __init__(self, memory: Memory, place: Place, stop: StopToken) -> None:
        window = place.window
        self.process = window.process
        self.data = memory.tensor(place.data, window.numel, window.dtype)
        self.lock = RobustLock(memory.map, place.lock, stop)
        self.torn_updates = 0

    def __enter__(self) -> None:
        if self.lock.acquire():
            self.torn_updates += 1

    def __exit__(self, *error: object) -> None:
        if self.data.is_cuda:
            # What was asked of the GPU under the lock has to be done before it is free.
            torch.cuda.current_stream(self.data.device).synchronize()
        self.lock.release()


class Windows:
    """The windows of all ends, by end."""

    def __init__(
        self, memories: Mapping[int, Memory], layouts: Mapping[int, Layout], stop: StopToken
    ) -> None:
        self._shared = {
            end: _Shared(memories[process], place, stop)
            for process, layout in layouts.items()
            for end, place in layout.places.items()
        }

    @property
    def torn_updates(self) -> int:
        return sum(shared.torn_updates for shared in self._shared.values())

    def process(self, end: int) -> int:
        return self._shared[end].process

    def initialise(self, initial: Mapping[int, Tensor]) -> None:
        """Fill this process's own windows, before anybody else can see them."""
        for end, value in initial.items():
            shared = self._shared[end]
            shared.lock.initialise()
            shared.data.copy_(value.detach().reshape(-1))

    def share_gpu_memory(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], store: Store,
        stop: StopToken,
    ) -> None:  # fmt: skip
        """Windows on a GPU lie there and not in main memory; everybody calls this."""
        on_gpu = {end: window for end, window in windows.items() if window.device.type == "cuda"}
        for end, window in on_gpu.items():
            if end in initial:
                self._shared[end].data = publish(window, initial[end], end, store)
        for end, window in on_gpu.items():
            if end not in initial:
                self._shared[end].data = attach(window, end, store, stop, patience=_PATIENCE_S)

    def data(self, end: int) -> Tensor:
        return self._shared[end].data

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._shared[end]

    def accumulate(self, end: int, delta: Tensor, start: int) -> None:
        delta = delta.detach().reshape(-1)
        shared = self._shared[end]
        stop = start + delta.numel()
        if start < 0 or stop > shared.data.numel():
            raise ProtocolError(
                f"{delta.numel()} values from {start} on do not fit into the window of end {end},"
                f" which has {shared.data.numel()}"
            )
        with shared:
            shared.data[start:stop].add_(delta.to(shared.data.device))

    def average(self, own: int, peer: int) -> None:
        """Both become their mean; locks are taken in order of ends, so nobody waits crosswise."""
        if own == peer:
            return
        mine, theirs = self._shared[own].data, self._shared[peer].data
        with self._shared[min(own, peer)], self._shared[max(own, peer)]:
            block = mine.numel() if mine.is_cuda else _BLOCK
            for some, others in zip(mine.split(block), theirs.split(block), strict=True):
                some.lerp_(others, 0.5)
                others.copy_(some)
