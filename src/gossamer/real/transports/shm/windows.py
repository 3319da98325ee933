"""Windows in shared memory: everybody adds to them directly, one at a time.

A process that is killed while it adds leaves every element either with or without its share;
whoever takes the lock next counts that as a torn update and goes on. Windows of workers that share
a GPU lie in its memory; `turns` says when one may be touched there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from torch import Tensor

from gossamer.errors import PeerLost, ProtocolError
from gossamer.real.transports.shm.cuda import Gpu
from gossamer.real.transports.shm.layout import Layout, Place
from gossamer.real.transports.shm.memory import Block, Memory
from gossamer.real.transports.shm.segments import Control
from gossamer.real.transports.shm.system import SPARE_WORD, RobustLock
from gossamer.real.transports.shm.turns import Turns
from gossamer.real.transports.transport import StopToken, Store

_PATIENCE_S = 60.0
_BLOCK = 1 << 16
"""Elements that two passes over the same data find in the cache again."""


class _Shared:
    """One end's memory and its lock, which a `with` holds."""

    def __init__(self, memory: Memory, place: Place, stop: StopToken) -> None:
        window = place.window
        self.window = window
        self.process = window.process
        self.data = memory.tensor(place.data, window.numel, window.dtype)
        self.lock = RobustLock(memory.map, place.lock, stop)
        self.last = memory.words(place.lock + SPARE_WORD, 1)
        self.turns: Turns | None = None
        """Of a window on a GPU."""
        self.torn_updates = 0

    @cached_property
    def blocks(self) -> Sequence[Tensor]:
        """A GPU has no use for small ones."""
        return (self.data,) if self.data.is_cuda else self.data.split(_BLOCK)

    def __enter__(self) -> None:
        result = self.lock.try_acquire()
        if result and self.lock.acquire_after(result):
            self.torn_updates += 1
        if self.turns is not None:
            try:
                self.torn_updates += self.turns.begin()
            except BaseException:
                self.lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        try:
            if self.turns is not None:
                self.turns.end()
        finally:
            self.lock.release()


class Windows:
    """The windows of all ends, by end."""

    def __init__(
        self, rank: int, memories: Mapping[int, Memory], layouts: Mapping[int, Layout],
        control: Control, stop: StopToken,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._control = control
        self._stop = stop
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

    def share_gpu_memory(self, gpu: Gpu, initial: Mapping[int, Tensor], store: Store) -> None:
        """Windows on a GPU lie there and not in main memory; everybody calls this."""
        for end, value in initial.items():
            window = self._shared[end].window
            memory = gpu.allocate(window.numel * window.dtype.itemsize)
            data = Block(memory).tensor(0, window.numel, window.dtype)
            data.copy_(value.detach().reshape(-1))
            gpu.finish()
            self._shared[end].data = data
            store.agree(f"window {end}", gpu.handle(memory))
        for end, shared in self._shared.items():
            if end not in initial:
                memory = gpu.open(self._handle(end, store))
                shared.data = Block(memory).tensor(0, shared.window.numel, shared.window.dtype)

    def take_turns(self, gpu: Gpu, store: Store) -> None:
        """At those windows."""
        for end, shared in self._shared.items():
            there = gpu.at(shared.data.device)
            shared.turns = Turns(
                self._rank, end, shared.last, there, store, self._control, self._stop
            )

    def _handle(self, end: int, store: Store) -> str:
        until = time.monotonic() + _PATIENCE_S
        while (handle := store.get(f"window {end}")) is None:
            self._stop.check()
            process = self._shared[end].process
            if time.monotonic() > until or self._control.is_gone(process):
                raise PeerLost(process, "it has not published its GPU memory")
            time.sleep(0.01)
        return handle

    def finish(self) -> None:
        """What this process asked of a GPU is done: nobody will wait for it when it has gone."""
        for shared in self._shared.values():
            if shared.turns is not None:
                shared.turns.finish()

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
        """Both become their mean."""
        if own == peer:
            return
        mine, theirs = self._shared[own], self._shared[peer]
        with self._shared[min(own, peer)], self._shared[max(own, peer)]:
            _average(mine, theirs)


def _average(mine: _Shared, theirs: _Shared) -> None:
    is_together = mine.data.device == theirs.data.device
    for some, others in zip(mine.blocks, theirs.blocks, strict=True):
        some.lerp_(others if is_together else others.to(some.device), 0.5)
        others.copy_(some)
