"""Windows and all-reduces in the memory of a GPU that several processes share. It is imported only
where they do.

A handle, by which another process opens memory or an event, consists of a few numbers and bytes. It
travels through the store as text, and nothing is unpickled.

*All-reduces.* Each process has one block of GPU memory, its arena, which the others open. It writes
its values there, the board says which processes have posted, as for values in main memory, and each
process adds up all values directly from the arenas. No value is read too early or overwritten too
soon, for these reasons:

A process waits for its own stream before it posts. So a posted value is complete in the memory of
the GPU, and stays there, mapped by the others, even if its process dies. A process that died after
it posted has contributed, and one that died before has not; all survivors see the same.

The GPU reads values later than the process asks it to. A process says that it needs no contribution
any longer when its stream has read them: at the latest at its next post, which waits for the stream
anyway. An arena has room for two values of the largest size. Before a process writes a third value,
all others have posted their second. A process posts its second value only after it has read the
first values of all. So the room of the first value is free, and processes in step with each other
never wait for room.

A value goes into the arena once all living members have opened it. Before that, and when there is
no room, it goes through main memory. Processes need not agree on that, because each contribution
says where it is. A process ignores an arena that it cannot open because the owner has just died;
that owner can never have posted anything in it.

*Windows.* A lock orders what processes ask of the GPU. But the GPU may still be doing it when the
lock is free; to wait for the stream under every lock would double the time of a step of AD-PSGD. So
a process that releases a window sets a mark behind its work, and writes down that it was the last.
The next process waits until the GPU has passed that mark, or the other process is gone, before it
asks the GPU for anything. The process itself waits, and does not let its stream wait: if the other
process is killed, the GPU never reaches its mark, and a stream that waits for it cannot be stopped.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transports.shm.contributions import ON_GPU, Board, OwnContribution, ReduceKind
from gossamer.real.transports.shm.memory import Control, FreeList, TensorBlock, aligned
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.shm.windows import Windows
from gossamer.real.transports.transport import StopToken, Store, Window

_SMALL_BYTES = 1 << 20
_PATIENCE_S = 60.0
_NOBODY = 0


# ---------------------------------------------------------------------- what is asked of a GPU


class GpuMark:
    """A place in the order of what a GPU was asked to do: a CUDA event.

    Other processes may look at a shared mark, and it can be set again. CUDA counts a mark that was
    never set as reached.
    """

    def __init__(self, device: torch.device, *, is_shared: bool = False) -> None:
        """Raises RuntimeError where marks cannot be shared."""
        self._device = device
        with torch.cuda.device(device):
            self._event: Any = torch.cuda.Event(interprocess=is_shared)
            self.handle: str = self._event.ipc_handle().hex() if is_shared else ""

    @staticmethod
    def opened(device: torch.device, handle: str) -> GpuMark:
        """The shared mark of another process; raises RuntimeError where that has just died."""
        mark = GpuMark(device)
        mark._event = cast(Any, torch.cuda.Event).from_ipc_handle(device, bytes.fromhex(handle))
        return mark

    def record(self) -> None:
        """Set it behind all that the present stream was asked to do."""
        self._event.record(torch.cuda.current_stream(self._device))

    def precede(self) -> None:
        """Let the current stream wait for this mark before it does anything more."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def query(self) -> bool:
        """Whether the GPU has come that far."""
        return self._event.query()


class Gpu:
    """A GPU of this machine. In tests main memory takes its place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def at(self, device: torch.device) -> Gpu:
        """The GPU on which a process's memory lies, where each process has its own."""
        return Gpu(device)

    def allocate(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    def handle(self, memory: Tensor) -> str:
        """The text by which other processes can open that memory."""
        storage = cast(Any, memory.untyped_storage())
        parts = [part.hex() if isinstance(part, bytes) else part for part in storage._share_cuda_()]
        return json.dumps(parts)

    def open(self, handle: str) -> Tensor:
        """The bytes of another process; raises RuntimeError where they cannot be opened."""
        # The handles of the memory, of its reference count and of its event are bytes.
        parts = [
            bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)
        ]
        storage = cast(Any, torch.UntypedStorage)._new_shared_cuda(*parts)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def finish(self) -> None:
        """Wait until all that the present stream was asked to do is done."""
        torch.cuda.current_stream(self.device).synchronize()

    def mark(self) -> GpuMark:
        """A mark that is set where the present stream is now."""
        mark = GpuMark(self.device)
        mark.record()
        return mark

    def shared_mark(self) -> GpuMark:
        return GpuMark(self.device, is_shared=True)

    def open_mark(self, handle: str) -> GpuMark:
        return GpuMark.opened(self.device, handle)


# ---------------------------------------------------------------------- sums


class GpuArenas:
    """The arenas of all processes that share a GPU, this one included."""

    def __init__(
        self, rank: int, boards: Mapping[int, Board], control: Control, store: Store, gpu: Gpu,
        largest: int,
    ) -> None:  # fmt: skip
        """`largest` is the usual number of bytes of the largest value."""
        self.device = gpu.device
        self._rank = rank
        self._boards = boards
        self._opened_by_us = boards[rank].opened
        self._control = control
        self._store = store
        self._gpu = gpu
        self._capacity = 2 * aligned(largest) + _SMALL_BYTES
        self._free = FreeList(0, self._capacity)
        self._blocks: dict[int, TensorBlock] = {}
        self._refused: set[int] = set()
        self._reading: deque[tuple[OwnContribution, GpuMark]] = deque()

    def take(self, length: int, members: Sequence[int]) -> int | None:
        """Return a place in the arena for a value that all living members can read, or None."""
        if self._rank not in self._blocks:
            self._make_own()
        is_open = all(
            self._boards[member].opened[self._rank] or self._control.is_gone(member)
            for member in members
        )
        offset = self._free.take(length) if is_open else None
        return None if offset is None else offset | ON_GPU

    def give_back(self, place: int) -> None:
        self._free.give_back(place & ~ON_GPU)

    def tensor(self, member: int, place: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._blocks[member].tensor(place & ~ON_GPU, count, dtype)

    def finish_writing(self) -> None:
        """Wait until the GPU has done what this thread asked of it, so that it can be posted."""
        self._gpu.finish()

    def write_mean(
        self, kind: ReduceKind, values: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        # As in main memory (`rules.mean_into`), numbers of 16 bits are added in 32.
        wide = torch.float32 if kind.dtype.itemsize == 2 else kind.dtype
        total = values[0].to(self.device, wide, copy=True)
        for value in values[1:]:
            total.add_(value.to(self.device))
        divisor = kind.divisor(len(values))
        if divisor != 1.0:
            # A tensor, because by a plain number torch divides less exactly on a GPU.
            total.div_(torch.tensor(divisor, dtype=wide, device=self.device))
        cut = zip(total.split(kind.sizes), kind.shapes, strict=True)
        cast(Any, torch)._foreach_copy_(list(tensors), [one.view(shape) for one, shape in cut])

    def mark_reading(self, own: OwnContribution) -> None:
        """The GPU was asked to read the contributions of an all-reduce. This also opens the arenas
        of the members."""
        self._open_those_of(own.kind.members)
        self._reading.append((own, self._gpu.mark()))

    def note_what_was_read(self, finish: Callable[[OwnContribution], None]) -> None:
        """Finish the all-reduces whose contributions the GPU has read."""
        for _ in range(len(self._reading)):
            own, mark = self._reading.popleft()
            if mark.query():
                finish(own)
            else:
                self._reading.append((own, mark))

    def _make_own(self) -> None:
        memory = self._gpu.allocate(self._capacity)
        self._store.agree(f"arena {self._rank}", self._gpu.handle(memory))
        self._blocks[self._rank] = TensorBlock(memory)
        fence()  # a process that sees the word finds the handle
        self._opened_by_us[self._rank] = 1

    def _open_those_of(self, members: Sequence[int]) -> None:
        for member in members:
            is_known = member in self._blocks or member in self._refused
            if is_known or not self._boards[member].opened[member]:
                continue
            handle = self._store.get(f"arena {member}")
            assert handle is not None
            try:
                self._blocks[member] = TensorBlock(self._gpu.open(handle))
            except RuntimeError:
                self._refused.add(member)
                continue
            self._opened_by_us[member] = 1


# ---------------------------------------------------------------------- windows


class WindowOrder:
    """Orders what processes ask of the GPU at one window. A process uses it under the lock of the
    window."""

    def __init__(
        self, rank: int, end: int, last: memoryview, gpu: Gpu, store: Store, control: Control,
        stop: StopToken,
    ) -> None:  # fmt: skip
        """`last` is one shared word: the process that held the window last, counted from 1."""
        self._rank = rank
        self._end = end
        self._last = last
        self._gpu = gpu
        self._store = store
        self._control = control
        self._stop = stop
        self._own: GpuMark | None = None
        self._is_shared = True
        self._marks: dict[int, GpuMark] = {}

    def begin(self) -> bool:
        """Wait for the last process; return whether it died, perhaps with its work half done."""
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
        """Wait until the GPU has done all that this process asked for."""
        self._gpu.finish()

    def _has_passed(self, process: int) -> bool:
        """Wait until the GPU has passed the mark of a process; return False if that is gone."""
        while not self._control.is_gone(process):
            mark = self._mark_of(process)
            if mark is not None and mark.query():
                return True
            self._stop.check()
            time.sleep(0)  # the mark is microseconds away, and a true sleep lasts longer
        return False

    def _mark_of(self, process: int) -> GpuMark | None:
        if process not in self._marks:
            handle = self._store.get(_mark_name(process, self._end))
            assert handle is not None
            try:
                self._marks[process] = self._gpu.open_mark(handle)
            except RuntimeError:
                return None  # the process is dying, which will be known in a moment
        return self._marks[process]

    def _share(self) -> None:
        """Share a mark. If the system cannot do that, this process waits for the GPU instead."""
        try:
            self._own = self._gpu.shared_mark()
        except RuntimeError:
            self._is_shared = False
            return
        self._store.agree(_mark_name(self._rank, self._end), self._own.handle)


def _mark_name(process: int, end: int) -> str:
    return f"mark of {process} at window {end}"


def share_windows(
    windows: Windows, rank: int, gpu: Gpu, initial: Mapping[int, Tensor], store: Store,
    control: Control, stop: StopToken,
) -> None:  # fmt: skip
    """Move the windows from main memory to that of the GPU. All processes call this."""
    for end, value in initial.items():
        window = windows.shared[end].window
        memory = gpu.allocate(window.numel * window.dtype.itemsize)
        data = TensorBlock(memory).tensor(0, window.numel, window.dtype)
        data.copy_(value.detach().reshape(-1))
        gpu.finish()
        windows.shared[end].data = data
        store.agree(f"window {end}", gpu.handle(memory))
    for end, shared in windows.shared.items():
        if end not in initial:
            memory = gpu.open(_handle(end, shared.window, store, control, stop))
            shared.data = TensorBlock(memory).tensor(0, shared.window.numel, shared.window.dtype)
    for end, shared in windows.shared.items():
        there = gpu.at(shared.data.device)
        shared.order = WindowOrder(rank, end, shared.last, there, store, control, stop)


def _handle(end: int, window: Window, store: Store, control: Control, stop: StopToken) -> str:
    until = time.monotonic() + _PATIENCE_S
    while (handle := store.get(f"window {end}")) is None:
        stop.check()
        if time.monotonic() > until or control.is_gone(window.process):
            raise PeerLost(window.process, "it has not published its GPU memory")
        time.sleep(0.01)
    return handle
