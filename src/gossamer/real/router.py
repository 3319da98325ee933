"""The router of one process: it takes frames to mailboxes, knows who is alive, and calls others.

A process hosts one worker and perhaps some servers. Each of them has an address and a mailbox.

      training thread                                 threads of the transport
      ───────────────                                 ────────────────────────
      worker.send ──▶ Router.post ─── a frame ──────▶ Router.frame   (of the other process)
                        │                               │ MESSAGE    to the mailbox of an address
                        │ same process                  │ CALL       RemoteCalls makes the answer
                        ▼                               │ ANSWER     to the mailbox of the caller
                      Mailbox ◀─────────────────────────┤ MILESTONE  a worker has come so far
                        │                               │ FAILED     a worker says that it is dead
                        │                               │ TAKES_PART a worker says that it counts
      worker.receive ◀──┘                               └ Router.lost: the transport saw a death

Whoever delivers a message runs what waits for it, in its own thread: see `driver.py`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.mailbox import Mailbox, Receive, Reply
from gossamer.membership import Membership
from gossamer.payload import decode, encode_parts, moved
from gossamer.pending import Pending, gather
from gossamer.real.addresses import Addresses
from gossamer.real.driver import Driver
from gossamer.real.transports.checked_values import numbers_from
from gossamer.real.transports.transport import Stopped, StopToken, Transport, Window
from gossamer.worker import INBOX, Left, Message, Tag

_HEADER = struct.Struct("<BiiqqH")
"""Kind, to, from, reply to, the tag's number, the length of its name."""
_MESSAGE, _MILESTONE, _CALL, _ANSWER, _FAILED, _TAKES_PART = range(6)
_NO_NUMBER = -(2**63)
BLOCK = 16
"""Steps whose members are agreed on at once: asking the store at every step would cost too much."""


class Router:
    """Listens to the transport on behalf of the worker and the servers of its process."""

    def __init__(self, transport: Transport, addresses: Addresses, driver: Driver) -> None:
        self.transport = transport
        self.addresses = addresses
        self.driver = driver
        self.rank = transport.rank
        hosted = addresses.hosted_by(transport.rank)
        self.mailboxes = {end: Mailbox(is_of_server=end >= addresses.size) for end in hosted}
        self.members = Membership(addresses.size)
        for process in transport.absent:
            self.members.died(process)
        self.ended = Milestone(self)
        """Reached by workers that have made their last step and go on answering."""
        self.settled = Milestone(self)
        """Reached by workers whose updates have all been applied by the servers."""
        self.drained = Milestone(self)
        """Reached by workers that need no more answers from others."""
        self._milestones = (self.ended, self.settled, self.drained)
        self.also_quiet: list[Callable[[], Pending[None]]] = []
        """What must have ended before the servers of this process have dealt with all messages."""
        self._calls = RemoteCalls(self._answer)
        self.offer = self._calls.offer
        self.offer("flush", self._servers_are_quiet)
        self.bytes_sent = 0
        """The bytes of messages, one-sided operations and reductions together."""
        self.on_lost: Callable[[int], None] = lambda process: None
        """Called when a process is gone before all have read everything."""
        self.on_joined: Callable[[int], None] = lambda process: None
        """Called when a worker takes part that was not there, or was dead."""
        self.dies_with: Callable[[int], Sequence[int]] = lambda process: (process,)
        """The processes that are as good as dead when this one has died, itself among them."""
        self.device = torch.device("cpu")
        """Where tensors that arrive are put."""
        self.window_bytes: dict[int, int] = {}
        """The size of the window at each address."""
        self._lock = threading.Lock()
        self._requests = 0
        self._takes_part = False
        self._closed: set[int] = set()
        """Processes that have closed their transports before this one had its model."""

    @property
    def live(self) -> frozenset[int]:
        return self.members.live

    def live_at(self, step: int) -> frozenset[int]:
        """The first process that asks about a block of steps fixes its members for all of them."""
        block = step // BLOCK
        members = self.members.members_of_round(block)
        if members is None:
            proposal = ",".join(map(str, sorted(self.members.training)))
            agreed = self.transport.store.agree(f"live/{block}", proposal)
            found = frozenset(numbers_from(f"live/{block}", agreed, ",", self.addresses.size))
            with self._lock:
                members = self.members.fix_round(block, found)
        return members

    # ------------------------------------------------------------------ out

    def post(self, to: int, tag: Tag, message: Message, *, kind: int = _MESSAGE) -> None:
        process = self.addresses.process_of(to)
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

    def receive(self, end: int, tag: Tag, receive: Receive) -> None:
        """Post a receive at an address of this process."""
        self.mailboxes[end].receive(tag, receive)
        if receive.peer is None or receive.done:
            return
        # Asked after posting, because a death before that would not have found the receive.
        if (reason := self._why_lost(receive)) is not None:
            receive.fail(PeerLost(receive.peer, reason))

    def _why_lost(self, receive: Receive) -> str | None:
        """Why this receive waits for nobody, if it does: its peer's process is dead, or its peer
        sends nothing of its own any more, although it answers what it is asked."""
        assert receive.peer is not None
        process = self.addresses.process_of(receive.peer)
        reason = self.members.why_lost(process)
        if reason is None and process in self._closed:
            return "it has ended"
        has_left = receive.label == "receive" and receive.peer in self.members.left
        return "it has left its loop" if reason is None and has_left else reason

    def open(self, windows: Mapping[int, Window], initial: Mapping[int, Tensor]) -> None:
        """Connect to the others. Windows are given for all addresses, values for those here."""
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
            # The receiving thread must live on: whoever waits next raises the error.
            self.driver.fail(error)

    @staticmethod
    def _is_an_event(data: memoryview) -> bool:
        """Whether a method can observe this frame: a message, or the end of a worker."""
        kind, milestone, *_ = _HEADER.unpack_from(data)
        return kind == _MESSAGE or (kind == _MILESTONE and milestone == 0)

    def _take(self, data: memoryview) -> None:
        kind, to, sender, reply_to, number, length = _HEADER.unpack_from(data)
        if kind == _MILESTONE:
            if reply_to:
                self._leave(sender, reply_to - 1)
            self._milestones[to].reached(sender)
            return
        if kind == _FAILED:
            self.lost(sender)
            return
        if kind == _TAKES_PART:
            self._admit(sender)
            return
        at = _HEADER.size + length
        name = bytes(data[_HEADER.size : at]).decode()
        if kind == _CALL:
            self._calls.serve(name, sender, reply_to, number)
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
            gone = [one for one in self.dies_with(process) if self.members.died(one)]
        if not gone:
            return  # the process has announced it itself
        is_over = self.drained.is_over
        self._fail_lost()
        for one in gone:
            self._tell_servers(one)
        for milestone in self._milestones:
            milestone.consider()
        if not is_over:
            self.on_lost(process)

    # ------------------------------------------------------------------ newcomers

    def joined(self, process: int) -> None:
        """A process can be reached. Whether its worker has a model to take part with, it says."""
        if self._takes_part:
            self._say_that_it_takes_part(process)

    def closed(self, process: int) -> None:
        """Whoever closes its transport has reached all milestones, also where it said so before
        this process came."""
        for milestone in self._milestones:
            milestone.reached(process)
        if self.transport.life:
            # The others need nothing of it any more; a newcomer may have asked it for something.
            self._closed.add(process)
            self._fail_lost()

    def take_part(self) -> None:
        """The worker of this process has its model: the others may count on it."""
        self._takes_part = True
        for process in sorted(frozenset(range(self.addresses.size)) - {self.rank}):
            if process not in self.transport.lost:
                self._say_that_it_takes_part(process)

    def _say_that_it_takes_part(self, process: int) -> None:
        with suppress(PeerLost):
            self.transport.send(
                process, [_HEADER.pack(_TAKES_PART, process, self.rank, 0, _NO_NUMBER, 0)]
            )

    def _admit(self, rank: int) -> None:
        with self._lock:
            if not self.members.joined(rank):
                return
            for milestone in self._milestones:
                milestone.forget(rank)
        for milestone in self._milestones:
            if milestone.has_reached(self.rank):
                left = self.members.left.get(self.rank, -1) + 1 if milestone is self.ended else 0
                frame = self._milestone_frame(milestone, left)
                with suppress(PeerLost):
                    self.transport.send(rank, [frame])
        self.on_joined(rank)

    def _leave(self, rank: int, steps: int) -> None:
        with self._lock:
            self.members.left_loop(rank, steps)
        self._fail_lost()

    def _fail_lost(self) -> None:
        for mailbox in self.mailboxes.values():
            mailbox.fail_lost(self._why_lost)

    # ------------------------------------------------------------------ the end of a worker

    def announce_leaving(self, steps: int) -> None:
        """The worker of this process has left its loop after so many steps. The others must not
        wait for further steps; the worker goes on answering."""
        self._leave(self.rank, steps)
        self.transport.leave_sums()
        self.announce_end(steps)

    def announce_death(self) -> None:
        """The worker of this process has failed. To the others it is dead, although its process may
        live on."""
        header = _HEADER.pack(_FAILED, 0, self.rank, 0, _NO_NUMBER, 0)
        self._send_to_all(header)
        self.transport.leave_sums()

    def announce_end(self, steps: int | None = None) -> None:
        """The worker of this process has made its last step; it goes on answering."""
        for end in range(self.addresses.size, self.addresses.ends):
            if self.addresses.process_of(end) != self.rank and self.addresses.serves(
                end, self.rank
            ):
                try:
                    # Like the end of a connection, it arrives after earlier pushes.
                    self.post(end, INBOX, Message(self.rank, Left()))
                except PeerLost:
                    pass  # the server has died, too
        self._tell_servers(self.rank)
        self._announce(self.ended, 0 if steps is None else steps + 1)

    def settle(self) -> None:
        """After the end of all workers: wait until the servers have dealt with all updates.

        It is not enough that all workers have ended: a third worker may hear of an end before the
        last update of that worker reaches its server.
        """
        if not self.addresses.slices:
            return
        hosts = {
            self.addresses.process_of(end)
            for end in range(self.addresses.size, self.addresses.ends)
        }
        for process in sorted(hosts & self.live):
            # The answer comes after everything that was sent there before, or the process dies.
            self.driver.wait(self.call(process, "flush"), "flush", is_booked=False)
        self._announce(self.settled)
        self.settled.wait()

    def _servers_are_quiet(self) -> Pending[None]:
        servers = [mailbox for end, mailbox in self.mailboxes.items() if end >= self.addresses.size]
        quiet: Pending[None] = Pending("flush")
        handled = gather([mailbox.quiet() for mailbox in servers])

        def handed_out() -> None:
            others = gather([also() for also in self.also_quiet])
            others.when_done(lambda: quiet.resolve(None))

        handled.when_done(handed_out)
        return quiet

    def announce_drained(self) -> None:
        """This process needs nothing from the others any more."""
        self._announce(self.drained)

    def _announce(self, milestone: Milestone, left: int = 0) -> None:
        """`left` is 0, or 1 more than the number of steps after which its worker left its loop."""
        milestone.reached(self.rank)
        self._send_to_all(self._milestone_frame(milestone, left))

    def _milestone_frame(self, milestone: Milestone, left: int) -> bytes:
        number = self._milestones.index(milestone)
        return _HEADER.pack(_MILESTONE, number, self.rank, left, _NO_NUMBER, 0)

    def _send_to_all(self, frame: bytes) -> None:
        for process in sorted(self.live - {self.rank}):
            try:
                self.transport.send(process, [frame])
            except PeerLost:
                pass

    def _tell_servers(self, rank: int) -> None:
        for end, mailbox in self.mailboxes.items():
            if end >= self.addresses.size and self.addresses.serves(end, rank):
                mailbox.deliver(INBOX, Message(rank, Left()))

    # ------------------------------------------------------------------ remote calls

    def _answer(self, caller: int, number: int, answer: Any) -> None:
        try:
            self.post(caller, ("answer", number), Message(self.rank, answer), kind=_ANSWER)
        except PeerLost:
            pass  # the caller has died

    def ask(self, process: int, service: str, reason: str) -> Any:
        """Call a service and wait for its answer; the table of waits shows the reason."""
        answer = self.call(process, service)
        self.driver.wait(answer, reason)
        return answer.result()

    def call(self, process: int, service: str, about: int = 0) -> Pending[Any]:
        """Ask a process for something that its receiving thread can give. The service is told the
        number `about`, unless that is 0."""
        if process == self.rank:
            return self._calls.ask(service, about)
        number = self.next_request()
        answer = Reply(service, process)
        self.receive(self.rank, ("answer", number), answer)
        label = service.encode()
        header = _HEADER.pack(_CALL, process, self.rank, number, about, len(label))
        try:
            self.transport.send(process, [header + label])
        except PeerLost:
            answer.fail(PeerLost(process))
        return answer


class RemoteCalls:
    """What other processes may ask this one for, by name.

    Others may be open already, and call, while this process is still opening: early calls wait.
    """

    def __init__(self, answer: Callable[[int, int, Any], None]) -> None:
        self._answer = answer
        self._known: dict[str, Callable[..., Any]] = {}
        self._early: list[tuple[str, int, int, int]] = []
        self._lock = threading.Lock()

    def ask(self, service: str, about: int = 0) -> Pending[Any]:
        """A service whose answer takes time returns a `Pending` itself."""
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


class Milestone:
    """A point that every living worker reaches, each at its own time."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.is_over = False
        self._there: set[int] = set()
        self._everyone = threading.Event()

    def reached(self, rank: int) -> None:
        self._there.add(rank)
        self.consider()

    def has_reached(self, rank: int) -> bool:
        return rank in self._there

    def forget(self, rank: int) -> None:
        """The worker has come again. Once everybody has been there, that is over for good."""
        self._there.discard(rank)

    def consider(self) -> None:
        if self._router.live <= self._there:
            self.is_over = True
            self._everyone.set()

    def wait(self) -> None:
        """Wait for all living workers; this process goes on answering meanwhile."""
        while not self._everyone.wait(StopToken.patience):
            self._router.driver.check()
