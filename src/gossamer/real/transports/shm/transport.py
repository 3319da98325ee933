"""The transport of one machine: frames, windows and all-reduces in shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.beginning import ALL, Beginning
from gossamer.real.transports.shm.all_reduce import SharedMemoryAllReduce
from gossamer.real.transports.shm.contributions import Board
from gossamer.real.transports.shm.frames import FrameReceiver, FrameSender
from gossamer.real.transports.shm.large_frames import LargeFrameReceiver, LargeFrameSender
from gossamer.real.transports.shm.memory import (
    CLOSED,
    FRESH,
    LARGE_FRAMES,
    OPEN,
    RING_BYTES,
    RING_HEAD_BYTES,
    Control,
    FreeList,
    SharedMemory,
    is_segment,
    lay_out,
    window_bytes,
)
from gossamer.real.transports.shm.rings import RingReader, RingWriter
from gossamer.real.transports.shm.system import fence
from gossamer.real.transports.shm.windows import Windows
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.transport import Listener, Parts, StopToken, Store, Window

if TYPE_CHECKING:
    from gossamer.real.transports.shm.gpu import Gpu

_DONE = Pending.resolved("window", None)
_LIFE_BITS = 32
_VARIABLES = (
    "GOSSAMER_RANK", "GOSSAMER_SIZE", "GOSSAMER_STORE", "GOSSAMER_SHM_FDS", "GOSSAMER_SECRET",
)  # fmt: skip


class ShmTransport:
    """One process's connection to the others of its machine."""

    name = "shm"
    reduces_meanwhile = False

    def __init__(
        self, rank: int, size: int, files: Sequence[int], store: Store, beginning: Beginning = ALL
    ) -> None:
        """`files` are `Segments.fds`. The transport owns them from now on."""
        self.rank = rank
        self.size = size
        self.absent, self.life = beginning.absent(rank, size), beginning.life
        self.store = store
        self._files = list(files)
        self._control = Control(files[0], size, rank)
        self._is_open = False
        self._is_closed = False

    @classmethod
    def from_environment(cls) -> ShmTransport:
        """Make the transport that the launcher describes in the environment."""
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"the shm transport needs {', '.join(missing)} in the environment; start the"
                " program with `gossamer run`"
            )
        rank, size, store, files, _ = (os.environ[name] for name in _VARIABLES)
        host, _, port = store.rpartition(":")
        fds = [int(file) for file in files.split(",")]
        if len(fds) != int(size) + 1:
            raise ConfigurationError(
                f"GOSSAMER_SHM_FDS has {len(fds)} files, expected {int(size) + 1}: one for control"
                " and one per process"
            )
        if not all(is_segment(file) for file in fds):
            # These descriptors may be other files by now, which must not be written to.
            raise ConfigurationError(
                "the shared memory of `gossamer run` is not open in this process; it serves one"
                " gossamer.join in the very process that was started, so do all training in one"
                " `with gossamer.join(...)`, and none in children of that process"
            )
        for file in fds:
            os.set_inheritable(file, False)
        here = Beginning.from_environment()
        return cls(int(rank), int(size), fds, TcpStore.connect(host, int(port)), here)

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        rank, control, files = self.rank, self._control, self._files[1:]
        everybody = range(self.size)
        layouts = {process: lay_out(process, self.size, windows) for process in everybody}
        memories: dict[int, SharedMemory] = {}
        for process, layout in layouts.items():
            # Every process sizes all files: the sizes agree, and a process may die before it does.
            os.ftruncate(files[process], layout.total)
            memories[process] = SharedMemory(files[process], layout.total)
        self._memories, self._layouts = memories, layouts
        self._windows = Windows(memories, layouts, stop)
        self._windows.initialise(initial)
        boards = {process: Board(memories[process], layouts[process]) for process in everybody}
        free = FreeList(layouts[rank].reductions, layouts[rank].large_frames)
        gpu, arenas = _gpu_for(windows[rank].device), None
        if gpu is not None:
            from gossamer.real.transports.shm.gpu import GpuArenas

            largest = max(window_bytes(window) for window in windows.values())
            arenas = GpuArenas(rank, boards, control, self.store, gpu, largest)
        self._all_reduce = SharedMemoryAllReduce(rank, boards, free, control, stop, arenas)
        self._make_rings(listener, stop)
        self._close_files()
        control.set_state(rank, OPEN)
        if not self.life:
            self._wait_for_others(stop)
        if gpu is not None:
            from gossamer.real.transports.shm.gpu import share_windows

            share_windows(self._windows, rank, gpu, initial, self.store, control, stop)
        self._receiver.start()
        self._is_open = True

    def _make_rings(self, listener: Listener, stop: StopToken) -> None:
        """Make the rings for frames to every other process and from it."""
        rank, control, memory = self.rank, self._control, self._memories[self.rank]
        layout = self._layouts[rank]
        others = [process for process in range(self.size) if process != rank]
        free = FreeList(layout.large_frames, layout.total)
        released_by = {to: self._released(rank, to) for to in others}
        first = self.life << _LIFE_BITS
        large_frames = LargeFrameSender(memory, free, released_by, control, first)
        writers = {to: RingWriter(self._ring(rank, to)) for to in others}
        self._sender = FrameSender(rank, writers, large_frames, control, stop)
        for process in self.absent:
            self._sender.drop(process)
        readers = {source: self._reader(source) for source in others}
        self._receiver = FrameReceiver(
            rank, readers, control, listener, stop, self, self.absent
        )  # fmt: skip

    def _ring(self, source: int, to: int) -> memoryview:
        place = self._layouts[to].ring(source)
        return self._memories[to].region(place, RING_HEAD_BYTES + RING_BYTES)

    def _released(self, source: int, by: int) -> memoryview:
        return self._memories[by].words(self._layouts[by].released(source), LARGE_FRAMES)

    def _reader(self, source: int) -> RingReader:
        large = LargeFrameReceiver(self._memories[source], self._released(source, self.rank))
        return RingReader(self._ring(source, self.rank), self._control.room[source], large.open)

    # --- called by the receiving thread

    def drop(self, process: int) -> None:
        self._sender.drop(process)

    def greet(self, process: int) -> RingReader | None:
        rank, layout = self.rank, self._layouts[process]
        try:
            memory = self._memories[process] = self._memory_of(process)
        except OSError:
            return None
        self._windows.take(memory, layout)
        self._all_reduce.renew(process, Board(memory, layout))
        released = self._released(process, rank)
        for slot in range(LARGE_FRAMES):
            released[slot] = 0
        reader = self._reader(process)
        reader.skip_all()
        fence()  # a process that is greeted finds the ring as it is now
        memory.words(layout.greetings, self.size)[rank] = self.life + 1
        self._control.frames[process].ring()
        return reader

    def has_greeted(self, process: int) -> bool:
        words = self._memories[self.rank].words(self._layouts[self.rank].greetings, self.size)
        return words[process] == self._control.life(process) + 1

    def connect(self, process: int) -> None:
        writer = RingWriter(self._ring(self.rank, process))
        self._sender.begin_again(process, writer, self._released(self.rank, process))

    def _memory_of(self, process: int) -> SharedMemory:
        """The memory of the present life of a process, which the launcher holds."""
        file = os.open(self._control.file_of(process), os.O_RDWR)
        try:
            return SharedMemory(file, self._layouts[process].total)
        finally:
            os.close(file)

    def _wait_for_others(self, stop: StopToken) -> None:
        bell = self._control.reductions[self.rank]
        while True:
            seen = bell.value
            if all(self._control.state(process) != FRESH for process in range(self.size)):
                return
            stop.check()
            bell.wait(seen, stop.patience)

    def _close_files(self) -> None:
        # The mappings keep the memory, and programs started by this one shall not inherit it.
        for file in self._files:
            os.close(file)
        self._files.clear()

    @property
    def lost(self) -> frozenset[int]:
        return self._receiver.lost

    @property
    def torn_updates(self) -> int:
        return self._windows.torn_updates

    def send(self, to: int, parts: Parts) -> None:
        if to in self._receiver.lost:
            raise PeerLost(to)
        if to == self.rank:
            self._receiver.send_to_self(parts)
        else:
            self._sender.send(to, parts)

    def window(self, end: int) -> Tensor:
        return self._windows.shared[end].data

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._windows.shared[end]

    def read(self, end: int) -> Pending[Tensor]:
        lost = self._lost(end)
        return Pending.resolved("read", self.window(end)) if lost is None else lost

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        if (lost := self._lost(end)) is not None:
            return lost
        self._windows.accumulate(end, delta, start)
        return _DONE

    def average(self, own: int, peer: int) -> Pending[None]:
        if (lost := self._lost(peer)) is not None:
            return lost
        self._windows.average(own, peer)
        return _DONE

    def _lost(self, end: int) -> Pending[Any] | None:
        """Return the failure of an operation on a dead process, whose window nobody will use."""
        process = self._windows.shared[end].window.process
        if process not in self._receiver.lost:
            return None
        return Pending.failed("window", PeerLost(process), process)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        return self._all_reduce.start(tensors, members)

    def leave_sums(self) -> None:
        self._all_reduce.leave()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_open:
            self._sender.close()
            self._windows.finish()
        self._control.set_state(self.rank, CLOSED)
        if self._is_open:
            self._receiver.close()
        self._close_files()


def _gpu_for(device: torch.device) -> Gpu | None:
    """Return the GPU that the device is, if it is one."""
    if device.type != "cuda":
        return None
    from gossamer.real.transports.shm.gpu import Gpu

    return Gpu(device)
