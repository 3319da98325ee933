"""The transport over Gloo: links to all peers, and on top of them windows and means.

    TorchTransport            the transport, which puts the parts together
      Links                   messages between processes, over Gloo
      OneSidedByMessages      windows: read, accumulate, average
      MessageAllReduce        means, with `NcclMeans` for GPUs
      DepartureLog            which processes have died or left, in the same order everywhere

Where all workers are on one host, they compute the means in shared memory (`OneHostAllReduce`).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.membership import MemberState
from gossamer.pending import Pending
from gossamer.real.transports.checked_values import numbers_from
from gossamer.real.transports.death_notices import DeathWatch, StartupCheck
from gossamer.real.transports.store import TcpStore
from gossamer.real.transports.torch import one_sided, reduce
from gossamer.real.transports.torch.departures import Departure, DepartureLog
from gossamer.real.transports.torch.late_connections import LateConnections
from gossamer.real.transports.torch.links import Links
from gossamer.real.transports.torch.nccl import NcclMeans
from gossamer.real.transports.torch.one_sided import OneSidedByMessages
from gossamer.real.transports.torch.reduce import MessageAllReduce
from gossamer.real.transports.torch.reduction_choice import (
    Check,
    ReductionPlace,
    agree_on_reduction,
    check_reduction,
    own_gpu,
    tell_all,
    wait_for,
)
from gossamer.real.transports.torch.rendezvous import Lanes, Meeting, meet
from gossamer.real.transports.transport import Listener, Parts, StopToken, Window

if TYPE_CHECKING:
    from gossamer.real.transports.shm.one_host import OneHostAllReduce

_FAREWELL_S = 2.0


class TorchTransport:
    """One process's connection to the others through Gloo."""

    name = "torch"
    torn_updates = 0

    def __init__(self, meeting: Meeting, reduction: str = "auto") -> None:
        check_reduction(reduction)
        self.rank = meeting.rank
        self.size = meeting.size
        beginning = meeting.beginning
        self.absent = beginning.absent(meeting.rank, meeting.size)
        self.life = beginning.life
        self._lost = self.absent
        self._joining = threading.Lock()
        self._late: LateConnections | None = None
        self._meeting = meeting
        self._engine = meeting.connect()
        self.store: TcpStore = meeting.enter(self._engine)
        self._reduction_name = reduction
        self._shared: OneHostAllReduce | None = None
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
        check = StartupCheck(stop, notices).check
        place = ReductionPlace(own_gpu(device), self._meeting.neighbours)
        beginning = self._meeting.beginning
        # Who comes later has no part in memory or groups that were shared at the beginning.
        chosen = "messages" if beginning.is_elastic else agree_on_reduction(
            self._reduction_name, place, self.rank, self.size, self.store, check
        )  # fmt: skip
        if chosen == "shared":
            self._shared = self._share_memory(windows, check)
        nccl = NcclMeans(self._meeting, device) if chosen == "nccl" else None
        self._links = Links(self.rank, self.size, self._frame, self._ended)
        began_absent = replace(beginning, life=0).absent(-1, self.size)
        self._log = DepartureLog(self.store, self._learn, self.size, stop, began_absent)
        if beginning.is_elastic:
            self._late = LateConnections(self._meeting, self._log, self._connected)
        self._one_sided = OneSidedByMessages(self._links, windows, initial)
        self._reduction = MessageAllReduce(self._links, self._log, stop, nccl, self.absent)
        lanes = None if self.life else meet(self._meeting, check)
        self._links.open(
            lanes, [(one_sided.KINDS, self._one_sided), (reduce.KINDS, self._reduction)]
        )
        self._notices = DeathWatch(
            lambda: TcpStore(self._meeting.connect_again()), self._links.peers, self._noticed
        )
        if self._late is not None:
            self._late.start()
        if self._meeting.has_notices:
            self._notices.start()
        self._is_open = True
        atexit.register(_end_if_there, weakref.ref(self))

    @property
    def reduces_meanwhile(self) -> bool:
        return self._shared is None

    @property
    def lost(self) -> frozenset[int]:
        return self._lost

    def send(self, to: int, parts: Parts) -> None:
        self._links.send(to, parts)

    def window(self, end: int) -> Tensor:
        return self._one_sided.window(end)

    def guard(self, end: int) -> AbstractContextManager[None]:
        return self._one_sided.guard(end)

    def read(self, end: int) -> Pending[Tensor]:
        return self._one_sided.read(end)

    def accumulate(self, end: int, delta: Tensor, start: int = 0) -> Pending[None]:
        return self._one_sided.accumulate(end, delta, start)

    def average(self, own: int, peer: int) -> Pending[None]:
        return self._one_sided.average(own, peer)

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        if self._shared is not None and self._shared.has_room_for(tensors):
            return self._shared.start(tensors, members)
        return self._reduction.start(tensors, members)

    def _share_memory(self, windows: Mapping[int, Window], check: Check) -> OneHostAllReduce | None:
        # Imported here, because it needs Linux.
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
            self._shared.leave()
        is_clean, finished = self._reduction.own_finished()
        self._reduction.announce(self._log.leaves_sums(self.rank, is_clean, finished))

    def close(self) -> None:
        self.leave(is_dead=False)

    def leave(self, *, is_dead: bool) -> None:
        """`is_dead` means that nobody closed the transport, so the others must wait for nothing."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if not self._is_open:
            return
        self._notices.stop()
        if self._late is not None:
            self._late.stop()
        if self._shared is not None:
            self._shared.close()
        if is_dead:
            epoch = self._log.died(self.rank)
        else:
            epoch = self._log.leaves(self.rank, *self._reduction.own_finished())
        self._links.close(epoch, 0.0 if self._stop.is_hopeless else _FAREWELL_S)

    def end(self) -> None:
        """The program ends: a peer that is slow to answer can no longer be waited for."""
        self.leave(is_dead=True)
        self._links.cut()

    # --- called by the links' threads

    def _frame(self, source: int, data: memoryview) -> None:
        if source not in self._lost:
            self._listener.frame(source, data)

    def _ended(self, peer: int, life: int, is_lost: bool, epoch: int) -> None:
        if self._is_closed:
            return
        if is_lost:
            self._log.died(peer, life)
        else:
            self._log.left(peer, epoch, life)

    def _noticed(self, peer: int, life: int) -> None:
        """A launcher says that a process died, whose connection may be open or properly closed."""
        if self._log.noticed(peer, life):
            self._lose(peer)

    def _connected(self, peer: int, life: int, lanes: Lanes) -> None:
        """A process that has come during the run, or was there before, is connected now."""
        members = self._log.members
        with self._joining:
            if members.life_of(peer) != life or members.state_of(peer) is MemberState.DEAD:
                return
            link = self._links.add(lanes, peer, life)
            self._one_sided.returned(peer)
            self._lost -= {peer}
            self._listener.joined(peer)
        link.start()

    def _lose(self, process: int) -> None:
        with self._joining:
            is_news = process not in self._lost
            self._lost |= {process}
        if is_news:
            self._listener.lost(process)

    def _learn(self, epoch: int, departure: Departure) -> None:
        """Apply a line of the log. Every process does this in the same order."""
        process = departure.process
        if self._late is not None:
            self._late.learn(departure)
        if departure.is_arrival:
            self._reduction.depart(epoch, departure)
            return
        if self._shared is not None and not departure.is_from_sums:
            self._shared.lost(process)
        if process == self.rank or departure.is_from_sums:
            self._reduction.depart(epoch, departure)
            return
        error = PeerLost(process, "it died" if departure.is_dead else "it has left")
        link = self._links.get(process)
        if link is not None and link.life == departure.life:
            if departure.is_dead:
                link.give_up(error)
            self._one_sided.lost(process, error)
        self._reduction.depart(epoch, departure)
        if departure.is_dead:
            self._lose(process)
        else:
            self._listener.closed(process)


def _end_if_there(reference: weakref.ref[TorchTransport]) -> None:
    transport = reference()
    if transport is not None:
        transport.end()
