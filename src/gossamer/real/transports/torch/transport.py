"""`TorchTransport`: links to all peers, and on top of them windows and sums.

Where all are on one host the sums are made in memory beside the links, which bring the word of who
has died.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.errors import PeerLost, unknown_name
from gossamer.pending import Pending
from gossamer.real.transports.buffers import joined
from gossamer.real.transports.checked_values import numbers_from
from gossamer.real.transports.death_notices import Attendance, Notices
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.torch import one_sided as active
from gossamer.real.transports.torch.collectives import (
    REDUCTIONS,
    Check,
    Place,
    agree_on_collectives,
    no_shared_memory,
    own_gpu,
    tell_all,
    wait_for,
)
from gossamer.real.transports.torch.departures import Loss, Losses
from gossamer.real.transports.torch.engine import GroupEngine, gloo_engine, nccl_engine
from gossamer.real.transports.torch.link import Link, LinkStream
from gossamer.real.transports.torch.one_sided import ActiveWords
from gossamer.real.transports.torch.reduction import Reduction
from gossamer.real.transports.torch.rendezvous import Meeting, meet
from gossamer.real.transports.torch.wire import Receiver
from gossamer.real.transports.transport import Listener, Parts, StopToken, Window

if TYPE_CHECKING:
    from gossamer.real.transports.shm.one_host import OneHostAllReduce

_FAREWELL_S = 2.0


class TorchTransport:
    """One process's connection to the others through Gloo."""

    name = "torch"
    torn_updates = 0

    def __init__(self, meeting: Meeting, reduction: str = "auto") -> None:
        if reduction not in REDUCTIONS:
            raise unknown_name("reduction", reduction, REDUCTIONS)
        self.rank = meeting.rank
        self.size = meeting.size
        self._meeting = meeting
        self._engine = meeting.connect()
        self.store: TcpStore = meeting.enter(self._engine)
        self._reduction_name = reduction
        self._adder: GroupEngine | None = None
        self._shared: OneHostAllReduce | None = None
        self._links: dict[int, Link] = {}
        self._to_self: SimpleQueue[bytes | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._is_open = False

    @staticmethod
    def from_environment(variables: Mapping[str, str] | None = None) -> TorchTransport:
        found = os.environ if variables is None else variables
        name = found.get("GOSSAMER_REDUCTION", "auto")
        return TorchTransport(Meeting.from_environment(found), name)

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        self._listener = listener
        self._stop = stop
        device = windows[self.rank].home
        notices = TcpStore(self._engine) if self._meeting.has_notices else None
        check = Attendance(stop, notices).check
        place = Place(own_gpu(device), self._meeting.neighbours)
        chosen = agree_on_collectives(
            self._reduction_name, place, self.rank, self.size, self.store, check
        )
        if chosen == "shared":
            self._shared = self._share_memory(windows, check)
            if self._shared is None and self._reduction_name == "shared":
                raise no_shared_memory("one of the workers could not have it or open it")
        if chosen == "nccl":
            self._adder = nccl_engine(self._meeting, device, lambda: self.lost)
        elif chosen != "fixed" and self._shared is None:
            self._adder = gloo_engine(self._meeting)
        self._losses = Losses(self.store, self._learn, self.size, stop)
        self._active = ActiveWords(self, windows, initial)
        self._reduction = Reduction(self, self._losses, self._adder)
        lanes = meet(self._meeting, self._engine, check)
        receiver = _Dispatch(self._active, self._reduction)
        self._links = {
            peer: Link(
                lanes.towards(self.rank, peer),
                lanes.towards(peer, self.rank),
                peer,
                receiver,
                self._frame,
                self._ended,
            )
            for peer in range(self.size)
            if peer != self.rank
        }
        threading.Thread(
            target=self._talk_to_self, name="gossamer talks to itself", daemon=True
        ).start()
        for link in self._links.values():
            link.start()
        self._notices = Notices(
            lambda: TcpStore(self._meeting.connect_again()), self._links, self._noticed
        )
        if self._meeting.has_notices:
            self._notices.start()
        self._is_open = True
        # A receiving thread that wakes while the interpreter ends would abort the process.
        atexit.register(_leave_if_there, weakref.ref(self))

    @property
    def reduces_meanwhile(self) -> bool:
        return self._shared is None

    @property
    def lost(self) -> frozenset[int]:
        return self._losses.members.dead

    def send(self, to: int, parts: Parts) -> None:
        if to == self.rank:
            self._to_self.put(b"".join(parts))
        else:
            self._links[to].send(parts)

    def post(self, to: int, kind: int, head: bytes, body: Tensor | None = None) -> None:
        self._links[to].post(kind, head, body)

    def begin(self, to: int, kind: int, head: bytes, length: int) -> LinkStream:
        return self._links[to].begin(kind, head, length)

    def expect(self, source: int, target: Tensor) -> int:
        return self._links[source].expect(target)

    def answer(self, to: int, kind: int, head: bytes, body: Tensor, room: int) -> None:
        self._links[to].answer(kind, head, body, room)

    def window(self, end: int) -> Tensor:
        return self._active.window(end)

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._active.guard(end)

    def read(self, end: int) -> Pending[Tensor]:
        return self._active.read(end)

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        return self._active.accumulate(end, delta, start)

    def average(self, own: int, peer: int) -> Pending[None]:
        return self._active.average(own, peer)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        if self._shared is not None and self._shared.has_room_for(tensors):
            return self._shared.start(tensors, members)
        whole = joined([tensor.detach().reshape(-1) for tensor in tensors])
        reduced = self._reduction.start(whole, members)
        pending: Pending[None] = Pending("all_reduce")

        def settle() -> None:
            has_ended = threading.Event()
            reduced.when_done(has_ended.set)
            while not has_ended.wait(StopToken.patience):
                self._stop.check()
            if pending.done:
                return
            pieces = reduced.result().split([tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
            pending.resolve(None)
            pending.settle = pending.on_cancel = None

        def forget() -> None:
            pending.settle = None  # through which it refers to itself

        pending.settle, pending.on_cancel = settle, forget
        return pending

    def _share_memory(self, windows: Mapping[int, Window], check: Check) -> OneHostAllReduce | None:
        # Only Linux has what this needs.
        from gossamer.real.transports.shm.one_host import share_memory

        def tell(numbers: Sequence[int]) -> Sequence[int]:
            if self.rank == 0:
                self.store.agree("sums/memory", " ".join(map(str, numbers)))
            where = wait_for("sums/memory", 0, self.store, check)
            return numbers_from("sums/memory", where, " ") if where else ()

        def agree(answer: bool) -> bool:
            own = str(answer)
            answers = tell_all("sums/opened", own, self.rank, self.size, self.store, check)
            return answers == ["True"] * self.size

        return share_memory(self.rank, self.size, windows, self._stop, tell, agree)

    def leave_sums(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._reduction.say_farewell(self._losses.rests(self.rank, *self._reduction.farewell()))

    def close(self) -> None:
        self.leave(is_dead=False)

    def leave(self, *, is_dead: bool) -> None:
        """`is_dead`: without having closed; nobody is to wait for what this process owes."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if not self._is_open:
            return
        self._notices.stop()
        if self._shared is not None:
            self._shared.close()
        if is_dead:
            epoch = self._losses.died(self.rank)
        else:
            is_clean, taken = self._reduction.farewell()
            epoch = self._losses.leaves(self.rank, is_clean, taken)
        for link in self._links.values():
            link.leave(epoch)
        farewell_s = 0.0 if self._stop.is_hopeless else _FAREWELL_S
        limit = time.monotonic() + farewell_s
        for link in self._links.values():
            link.join(max(0.0, limit - time.monotonic()))
        if self._adder is not None:
            self._adder.close(farewell_s)
        self._to_self.put(None)

    # --- called by the links' threads

    def _frame(self, source: int, data: memoryview) -> None:
        if source not in self.lost:
            self._listener.frame(source, data)

    def _ended(self, peer: int, is_lost: bool, epoch: int) -> None:
        if self._is_closed:
            return
        if is_lost:
            self._losses.died(peer)
        else:
            self._losses.left(peer, epoch)

    def _noticed(self, peer: int) -> None:
        """A launcher says that it died; its connection may be open, or was closed politely."""
        if self._losses.noticed(peer):
            self._listener.lost(peer)

    def _learn(self, epoch: int, loss: Loss) -> None:
        """A line of the list of losses, in the same order in every process."""
        process = loss.process
        if self._shared is not None:
            self._shared.lost(process)
        if process == self.rank:
            return
        if loss.is_resting:
            self._reduction.lost(epoch, loss)
            return
        error = PeerLost(process, "it died" if loss.is_dead else "it has left")
        if loss.is_dead:
            self._links[process].give_up(error)
        self._active.lost(process, error)
        self._reduction.lost(epoch, loss)
        if loss.is_dead:
            if self._adder is not None:
                self._adder.lost(process)
            self._listener.lost(process)

    def _talk_to_self(self) -> None:
        while (frame := self._to_self.get()) is not None:
            self._listener.frame(self.rank, memoryview(frame))


class _Dispatch:
    """Gives each message to whom its kind belongs."""

    def __init__(self, words: ActiveWords, sums: Reduction) -> None:
        self._words = words
        self._sums = sums

    def _of(self, kind: int) -> Receiver:
        return self._words if kind in active.KINDS else self._sums

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        return self._of(kind).place(source, kind, head, length)

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        self._of(kind).piece(source, kind, head, start, data)

    def end(self, source: int, kind: int, head: bytes) -> None:
        self._of(kind).end(source, kind, head)


def _leave_if_there(reference: weakref.ref[TorchTransport]) -> None:
    transport = reference()
    if transport is not None:
        transport.leave(is_dead=True)
