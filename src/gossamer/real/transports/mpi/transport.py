"""The transport for MPI: one-sided windows, frames as messages, all-reduces in order of rank.

MPI has no death of a single process: when one dies, MPI ends the whole job. So `lost` stays empty
here. To survive deaths, use another transport.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gossamer.errors import ConfigurationError, ProtocolError
from gossamer.pending import Pending
from gossamer.real.transports.backoff import Backoff
from gossamer.real.transports.buffers import take_elements
from gossamer.real.transports.mpi.engine import MPI, require_threads
from gossamer.real.transports.mpi.frames import Doorbell, MpiFrames
from gossamer.real.transports.mpi.meeting import meet
from gossamer.real.transports.mpi.reductions import Reductions
from gossamer.real.transports.mpi.windows import MpiWindows
from gossamer.real.transports.shm.one_host import OneHostAllReduce, share_memory
from gossamer.real.transports.transport import Listener, Parts, StopToken, Store, Window

_BUSY_ALONE_S = 1e-3
_BUSY_CROWDED_S = 200e-6


@dataclass
class _Opened:
    """What exists from `open` on."""

    windows: Mapping[int, Window]
    memory: MpiWindows
    post: MpiFrames
    reductions: Reductions
    shared: OneHostAllReduce | None
    """Computes the all-reduces if all processes are on one host."""
    stop: StopToken


class MpiTransport:
    """One process of an MPI job. Making one is collective, as is `open`."""

    name = "mpi"
    reduces_meanwhile = False
    life = 0
    absent: frozenset[int] = frozenset()
    torn_updates = 0

    def __init__(self, *, mapped: bool | None = None) -> None:
        """`mapped`: whether all processes map all windows, by default if they share a host."""
        require_threads()
        # Communicators of our own, apart from those of the program and from each other.
        self._frames = MPI.COMM_WORLD.Dup()
        self._sums = MPI.COMM_WORLD.Dup()
        self.rank = self._frames.rank
        self.size = self._frames.size
        self._doorbell = Doorbell()
        self._local_size = self._look_around()
        sizes = np.zeros(self.size, np.int64)
        self._frames.Allgather(np.array([self._local_size]), sizes)
        self._one_host = int(sizes[0]) == self.size
        if mapped and not self._one_host:
            raise ConfigurationError(
                f"windows can be mapped on one host only, but {self._local_size} of the "
                f"{self.size} processes are on this one; leave mapped=None"
            )
        self.is_mapped = self._one_host if mapped is None else mapped
        """Whether `read` returns the memory of the others and does not fetch a copy."""
        self._keeper, store = meet(self._frames, one_host=self._one_host)
        self.store: Store = store
        self._opened: _Opened | None = None
        self._closed = False
        atexit.register(self._leave)

    @staticmethod
    def from_environment() -> MpiTransport:
        """Connect to the job of this process."""
        asked = os.environ.get("GOSSAMER_REDUCTION", "auto")
        if asked != "auto":
            raise ConfigurationError(
                f"GOSSAMER_REDUCTION={asked} means nothing to the mpi transport, which always adds"
                " in order of rank; leave the variable out"
            )
        return MpiTransport()

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        memory = MpiWindows(self._frames, windows, stop, mapped=self.is_mapped)
        memory.fill(initial)
        reductions = Reductions(self._sums, self.store, stop, self._busy_s)
        post = MpiFrames(self._frames, self._doorbell, one_host=self._one_host)
        shared = None
        if self.is_mapped:
            shared = share_memory(self.rank, self.size, windows, stop, self._tell, self._agree)
        self._opened = _Opened(dict(windows), memory, post, reductions, shared, stop)
        self._frames.Barrier()
        post.start(listener, reductions)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset()

    def send(self, to: int, parts: Parts) -> None:
        self._now.post.send(to, parts)

    def window(self, end: int) -> Tensor:
        return self._now.memory.views[end]

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._now.memory.lock(end)

    def read(self, end: int) -> Pending[Tensor]:
        now = self._now
        window, view = now.windows[end], now.memory.views.get(end)
        if view is not None:
            return Pending.resolved("read", view, window.process)
        pending: Pending[Tensor] = Pending("read", window.process)
        value = take_elements(window.numel, window.dtype)
        request = now.memory.fetch(end, value)

        def settle() -> None:
            backoff = Backoff(now.stop, self._busy_s)
            while not request.Test():
                backoff.pause()
            pending.resolve(value)

        pending.settle = settle
        return pending

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        window = self._now.windows[end]
        flat = delta.detach().reshape(-1).to(window.dtype)
        if not 0 <= start <= window.numel - len(flat):
            # Checked here, because MPI does not check writes to distant memory.
            raise ProtocolError(
                f"{len(flat)} values from {start} on do not fit end {end} of {window.numel}"
            )
        self._now.memory.add(end, flat, start)
        return Pending.resolved("accumulate", None, window.process)

    def average(self, own: int, peer: int) -> Pending[None]:
        if own != peer:
            self._now.memory.average(own, peer)
        return Pending.resolved("average", None, self._now.windows[peer].process)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        now = self._now
        if now.shared is not None and now.shared.has_room_for(tensors):
            return now.shared.start(tensors, members)
        return now.reductions.start(tensors, members)

    def leave_sums(self) -> None:
        if self._now.shared is not None:
            self._now.shared.leave()
        self._now.reductions.leave()

    def close(self) -> None:
        """Tell the others that this process leaves. It stays reachable until all have left.

        This does not wait for the others. The end of the program does, as MPI demands.
        """
        if not self._closed:
            self._closed = True
            if self._opened is not None:
                if self._opened.shared is not None:
                    self._opened.shared.close()
                self._opened.post.close()

    @property
    def _now(self) -> _Opened:
        if self._opened is None:
            raise ProtocolError("the transport was used before it was opened")
        return self._opened

    @property
    def _busy_s(self) -> float:
        """How long to poll without a pause: longer if every process has a core of its own."""
        is_crowded = self._local_size > (os.cpu_count() or 1)
        return _BUSY_CROWDED_S if is_crowded else _BUSY_ALONE_S

    def _tell(self, numbers: Sequence[int]) -> Sequence[int]:
        told = np.zeros(self.size + 2, np.int64)
        told[: len(numbers)] = numbers
        self._frames.Bcast(told)
        return told.tolist() if told[0] else ()

    def _agree(self, answer: bool) -> bool:
        everybody = np.array([int(answer)])
        self._frames.Allreduce(MPI.IN_PLACE, everybody, MPI.MIN)
        return bool(everybody[0])

    def _look_around(self) -> int:
        """Tell the processes of this host the port of the bell; return how many they are."""
        nearby = self._frames.Split_type(MPI.COMM_TYPE_SHARED)
        bells = np.zeros((nearby.size, 2), np.int64)
        nearby.Allgather(np.array([self.rank, self._doorbell.port]), bells)
        self._doorbell.know([(int(rank), int(port)) for rank, port in bells])
        nearby.Free()
        return len(bells)

    def _leave(self) -> None:
        """At the end of the program, before MPI ends."""
        if self._opened is None:
            return
        if not self._closed:
            # This process has failed, and the others would wait for it for ever.
            print(f"process {self.rank} ends without closing its transport", file=sys.stderr)
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
        self._opened.post.join()
        self._opened.memory.free()
        if self._keeper is not None:
            self._keeper.close()
            if self._keeper.refusals is not None:
                print(f"gossamer: {self._keeper.refusals}", file=sys.stderr)
