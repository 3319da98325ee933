"""One process of a run: its ends, their mailboxes, and who else is there.

Frames carry which end they are for. A frame to an end of the same process never leaves it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.payload import decode, encode_parts, moved
from gossamer.pending import Pending, gather
from gossamer.real.driver import Driver
from gossamer.real.mailbox import Mailbox, Receive
from gossamer.real.transports.transport import Stopped, StopToken, Transport, Window
from gossamer.worker import INBOX, Left, Message, Tag

_HEADER = struct.Struct("<BiiqqH")
"""Kind, to, from, reply to, the tag's number, the length of its name."""
_MESSAGE, _PHASE, _CALL, _ANSWER, _GONE = range(5)
_NO_NUMBER = -(2**63)


@dataclass(frozen=True)
class Plan:
    """Who is who: workers are the ends 0 to size - 1, servers follow."""

    size: int
    slices: tuple[slice, ...] = ()
    """The range of the parameters that each server holds."""

    @property
    def ends(self) -> int:
        return self.size + len(self.slices)

    def lengths(self, whole: int) -> list[int]:
        """Of the ends' windows: a worker's holds the whole, a server's its range."""
        return [whole] * self.size + [part.stop - part.start for part in self.slices]

    def process_of(self, end: int) -> int:
        """Servers sit in the workers' processes in turn: nobody launches them by hand."""
        return end if end < self.size else (end - self.size) % self.size

    def hosted_by(self, process: int) -> list[int]:
        return [end for end in range(self.ends) if self.process_of(end) == process]


class Hub:
    """The listener of a transport, and the post office of the ends of its process."""

    def __init__(self, transport: Transport, plan: Plan, driver: Driver) -> None:
        self.transport = transport
        self.plan = plan
        self.driver = driver
        self.rank = transport.rank
        hosted = plan.hosted_by(transport.rank)
        self.mailboxes = {end: Mailbox(is_of_server=end >= plan.size) for end in hosted}
        self.live = frozenset(range(plan.size))
        self.left: dict[int, int] = {}
        """Workers that have left their loops, each after how many steps; they go on answering."""
        self.training = self.live
        """The living who have not."""
        self.ended = Phase(self)
        """Workers that have made their last step and go on answering."""
        self.settled = Phase(self)
        """Workers of whom no update is on its way any more: what servers hold is the last of it."""
        self.read = Phase(self)
        """Workers that have read all they want of the others: nobody needs answers any more."""
        self._phases = (self.ended, self.settled, self.read)
        self._services = Services(self._answer)
        self.offer = self._services.offer
        self.offer("flush", self._servers_are_quiet)
        self.bytes_sent = 0
        """In messages, by one-sided operations and in reductions."""
        self.on_lost: Callable[[int], None] = lambda process: None
        """Called when a process is gone before all have read everything."""
        self.device = torch.device("cpu")
        """Where tensors that arrive are put."""
        self.window_bytes: dict[int, int] = {}
        """How large each end's window is."""
        self._lock = threading.Lock()
        self._requests = 0

    # ------------------------------------------------------------------ out

    def post(self, to: int, tag: Tag, message: Message, *, kind: int = _MESSAGE) -> None:
        process = self.plan.process_of(to)
        if process == self.rank:
            self.mailboxes[to].deliver(tag, message)
            return
        name, number = tag if isinstance(tag, tuple) else (tag, _NO_NUMBER)
        label = name.encode()
        header = _HEADER.pack(kind, to, message.source, message.reply_to, number, len(label))
        parts = [header + label, *encode_parts(message.payload)]
        self.bytes_sent += sum(len(part) for part in parts)
        self.transport.send(process, parts)

    def next_request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    # ------------------------------------------------------------------ in

    def receive(self, end: int, tag: Tag, pending: Receive) -> None:
        """At an end of this process. Fails when the process of the end that it names dies."""
        mailbox = self.mailboxes[end]
        mailbox.receive(tag, pending)
        if pending.peer is None or pending.done:
            return
        process = self.plan.process_of(pending.peer)
        # Asked once it is posted: a death before would not have found it.
        if process not in self.live:
            mailbox.lose(self.plan.hosted_by(process))
        elif pending.peer in self.left:
            mailbox.expect_no_more(pending.peer)

    def open(self, windows: Mapping[int, Window], initial: Mapping[int, Tensor]) -> None:
        """Connect to the others."""
        self.window_bytes = {
            end: window.numel * window.dtype.itemsize for end, window in windows.items()
        }
        self.transport.open(windows, initial, self, self.driver.stop)

    def frame(self, source: int, data: memoryview) -> None:
        try:
            if self._is_an_event(data):
                self.driver.turns.enter("deliver", source)
                try:
                    self._take(data)
                finally:
                    self.driver.turns.leave()
            else:
                self._take(data)
        except Stopped:
            pass  # the run is over; nobody waits for this frame
        except Exception as error:
            # The thread that receives must live: whoever waits next raises the error.
            self.driver.fail(error)

    @staticmethod
    def _is_an_event(data: memoryview) -> bool:
        """Whether a method can see it: questions about outputs, and who has read them, are none."""
        kind, phase, *_ = _HEADER.unpack_from(data)
        return kind == _MESSAGE or (kind == _PHASE and phase == 0)

    def _take(self, data: memoryview) -> None:
        kind, to, sender, reply_to, number, length = _HEADER.unpack_from(data)
        if kind == _PHASE:
            if reply_to:
                self._leave(sender, reply_to - 1)
            self._phases[to].reached(sender)
            return
        if kind == _GONE:
            self.lost(sender)
            return
        at = _HEADER.size + length
        name = bytes(data[_HEADER.size : at]).decode()
        if kind == _CALL:
            self._services.serve(name, sender, reply_to, number)
            return
        tag: Tag = name if number == _NO_NUMBER else (name, number)
        value = decode(data[at:])
        if self.device.type != "cpu" and kind == _MESSAGE:
            value = moved(value, self.device)
        self.mailboxes[to].deliver(tag, Message(sender, value, reply_to))

    def lost(self, process: int) -> None:
        self.driver.turns.enter("lost", process)
        try:
            self._lose(process)
        finally:
            self.driver.turns.leave()

    def _lose(self, process: int) -> None:
        with self._lock:
            if process not in self.live:
                return  # it has said so itself
            is_news = not self.read.is_over
            self.live = self.live - {process}
            self.training = self.training - {process}
        ends = self.plan.hosted_by(process)
        for mailbox in self.mailboxes.values():
            mailbox.lose(ends)
        self._tell_servers(process)
        for phase in self._phases:
            phase.consider()
        if is_news:
            self.on_lost(process)

    def _leave(self, rank: int, steps: int) -> None:
        with self._lock:
            self.left = {**self.left, rank: steps}
            self.training = self.training - {rank}
        for mailbox in self.mailboxes.values():
            mailbox.expect_no_more(rank)

    # ------------------------------------------------------------------ the end of a worker

    def announce_leaving(self, steps: int) -> None:
        """This process's worker has left its loop after so many steps: nobody is to wait for more
        of them. It goes on answering."""
        self._leave(self.rank, steps)
        self.transport.leave_sums()
        self.announce_end(steps)

    def announce_death(self) -> None:
        """This process's worker has failed: to the others it is dead, though the process may live
        on."""
        header = _HEADER.pack(_GONE, 0, self.rank, 0, _NO_NUMBER, 0)
        self._send_to_all(header)
        self.transport.leave_sums()

    def announce_end(self, steps: int | None = None) -> None:
        """This process's worker has made its last step; it goes on answering."""
        for end in range(self.plan.size, self.plan.ends):
            if self.plan.process_of(end) != self.rank:
                try:
                    # Like the end of a connection: it arrives behind the pushes before it.
                    self.post(end, INBOX, Message(self.rank, Left()))
                except PeerLost:
                    pass  # nobody is there to be told
        self._tell_servers(self.rank)
        self._announce(self.ended, 0 if steps is None else steps + 1)

    def settle(self) -> None:
        """After the end of all workers: wait until every update that anybody sent to a server has
        been dealt with there. The word that its sender has ended may reach a third worker first."""
        if not self.plan.slices:
            return
        keepers = {self.plan.process_of(end) for end in range(self.plan.size, self.plan.ends)}
        for process in sorted(keepers & self.live):
            # Answered behind everything that was sent there before, or never: it has died.
            self.driver.wait(self.call(process, "flush"), "flush", is_booked=False)
        self._announce(self.settled)
        self.settled.wait()

    def _servers_are_quiet(self) -> Pending[None]:
        servers = [mailbox for end, mailbox in self.mailboxes.items() if end >= self.plan.size]
        quiet: Pending[None] = Pending("flush")
        gather([mailbox.quiet() for mailbox in servers]).when_done(lambda: quiet.resolve(None))
        return quiet

    def announce_read(self) -> None:
        """This process wants nothing from the others any more."""
        self._announce(self.read)

    def _announce(self, phase: Phase, left: int = 0) -> None:
        """`left`: its worker has left its loop, one less than so many steps after its beginning."""
        number = self._phases.index(phase)
        self._send_to_all(_HEADER.pack(_PHASE, number, self.rank, left, _NO_NUMBER, 0))
        phase.reached(self.rank)

    def _send_to_all(self, frame: bytes) -> None:
        for process in sorted(self.live - {self.rank}):
            try:
                self.transport.send(process, [frame])
            except PeerLost:
                pass

    def _tell_servers(self, rank: int) -> None:
        for end, mailbox in self.mailboxes.items():
            if end >= self.plan.size:
                mailbox.deliver(INBOX, Message(rank, Left()))

    def _answer(self, caller: int, number: int, answer: Any) -> None:
        try:
            self.post(caller, ("answer", number), Message(self.rank, answer), kind=_ANSWER)
        except PeerLost:
            pass  # nobody is there to be told

    def ask(self, process: int, service: str, reason: str) -> Any:
        """Call a service and wait for its answer; the reason is what the table of waits says."""
        answer = self.call(process, service)
        self.driver.wait(answer, reason)
        return answer.result()

    def call(self, process: int, service: str, about: int = 0) -> Pending[Any]:
        """Ask a process for something that the thread receiving there can give; a service is told
        what number it is about, unless that is 0."""
        if process == self.rank:
            return self._services.ask(service, about)
        number = self.next_request()
        arrival = Receive(service, process)
        answer = arrival.content()
        self.receive(self.rank, ("answer", number), arrival)
        label = service.encode()
        header = _HEADER.pack(_CALL, process, self.rank, number, about, len(label))
        try:
            self.transport.send(process, [header + label])
        except PeerLost:
            arrival.cancel()
            answer.fail(PeerLost(process))
        return answer


class Services:
    """What other processes may ask this one for, by name.

    They may be done with opening, and ask, while this process is still at it.
    """

    def __init__(self, answer: Callable[[int, int, Any], None]) -> None:
        self._answer = answer
        self._known: dict[str, Callable[..., Any]] = {}
        self._early: list[tuple[str, int, int, int]] = []
        self._lock = threading.Lock()

    def ask(self, service: str, about: int = 0) -> Pending[Any]:
        """One that takes its time gives a pending itself."""
        known = self._known[service]
        found = known(about) if about else known()
        return found if isinstance(found, Pending) else Pending.resolved(service, found)

    def offer(self, service: str, function: Callable[[], Any]) -> None:
        with self._lock:
            self._known[service] = function
            early = [call for call in self._early if call[0] == service]
            self._early = [call for call in self._early if call[0] != service]
        for call in early:
            self.serve(*call)

    def serve(self, service: str, caller: int, number: int, about: int) -> None:
        with self._lock:
            if service not in self._known:
                self._early.append((service, caller, number, about))
                return
        answer = self.ask(service, about)
        answer.when_done(lambda: self._answer(caller, number, answer.result()))


class Phase:
    """A point that every living worker reaches, each in its time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.is_over = False
        self._there: set[int] = set()
        self._everyone = threading.Event()

    def reached(self, rank: int) -> None:
        self._there.add(rank)
        self.consider()

    def consider(self) -> None:
        if self._hub.live <= self._there:
            self.is_over = True
            self._everyone.set()

    def wait(self) -> None:
        """Until all who live are there; this process goes on answering meanwhile."""
        while not self._everyone.wait(StopToken.patience):
            self._hub.driver.check()
