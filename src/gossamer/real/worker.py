"""One worker's (or server's) view of a real run (the `Worker` protocol)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gossamer.errors import Late, PeerLost, ProtocolError
from gossamer.groups import Grouping, mapped
from gossamer.mailbox import Receive, Reply
from gossamer.observe.observer import Observer, end_name
from gossamer.payload import tensor_bytes
from gossamer.pending import Gathered, Pending
from gossamer.real.router import Router
from gossamer.real.silent_peers import Silence
from gossamer.real.transports.buffers import joined
from gossamer.real.transports.transport import StopToken, Transport
from gossamer.replica import Fragment, Layout, Replica
from gossamer.worker import Gradient, Left, Lesson, Message, Tag, check_idle

T = TypeVar("T")
MakeGradient = Callable[[Tensor | Replica, Tensor | None, Lesson | None], Gradient]
Reduce = Callable[[Tensor, Sequence[int]], Pending[Tensor]]
"""Makes the mean of a tensor over some workers."""
_SENT = Pending.resolved("send", None)


class Pace(Protocol):
    """Which step comes next, and when the run is over."""

    @property
    def expected_steps(self) -> int: ...

    def open_step(self, step: int) -> bool:
        """Whether this step is to be made."""
        ...


class LoopPace:
    """The pace of a user's loop, which decides itself when it is over."""

    def __init__(self, expected_steps: int) -> None:
        self.expected_steps = expected_steps

    def open_step(self, step: int) -> bool:
        return True


class RealWorker:
    """What a method may touch, on real processes."""

    def __init__(
        self, router: Router, end: int, *, seed: int, pace: Pace, observer: Observer,
        gradient: MakeGradient | None = None,
        grouping: Grouping | None = None, forgets_leavers: bool = False,
        reduce: Reduce | None = None,
    ) -> None:  # fmt: skip
        """`forgets_leavers` says that workers which have left their loops count as dead here;
        `reduce` makes all-reduces, without it on a copy."""
        self._reduce = reduce or partial(reduced_copy, router.transport)
        self._forgets_leavers = forgets_leavers
        self._workers = router.addresses.size
        self._grouping = grouping or Grouping(router.rank, router.addresses.size)
        self.rank = end
        is_worker = end < self._workers
        # A server knows only the workers that push for themselves.
        self.size = self._workers if is_worker else self._grouping.ends
        self._inside = self._grouping.group if is_worker and self._grouping.groups else ()
        self.rng = random.Random(f"{seed}/worker/{end}")
        self._router = router
        self._pace = pace
        self._observer = observer
        self._gradient = gradient
        self._silence = Silence(router.driver.stop)
        self._peers_of: tuple[frozenset[int], frozenset[int]] | None = None
        self._peers: list[int] = []
        self._left: set[int] = set()
        self._collectives: dict[tuple[int, ...], int] = {}
        self._tasks = 0
        self._under_way: list[Pending[None]] = []
        """Averages and adds that have not ended yet."""
        self._updates = self._updates_read = 0
        """Updates made without `descend_`, and how many there were when the last gradient began."""
        self._is_finished = False
        self._starting = threading.Lock()
        self.step = 0
        self._idle = 0

    @property
    def peers(self) -> Sequence[int]:
        live, silent, known = self.live, self._silence.silent, self._peers_of
        if known is None or live is not known[0] or silent is not known[1]:
            self._peers_of = (live, silent)
            self._peers = sorted(live - silent - {self.rank})
        return self._peers

    def answering(self, peers: Sequence[int]) -> Sequence[int]:
        return self._silence.answering(peers)

    @property
    def live(self) -> frozenset[int]:
        if self.rank < self._workers:
            members = self._router.members
            return members.training if self._forgets_leavers else members.live
        live = self._grouping.speaking(self._router.live)
        # As far as the server has read its inbox, like its clients.
        return live - self._left if self._forgets_leavers else live

    def live_at(self, step: int) -> frozenset[int]:
        return self._router.live_at(step)

    @property
    def servers(self) -> Sequence[int]:
        return self._router.addresses.servers

    @property
    def slices(self) -> Sequence[slice]:
        return self._router.addresses.slices

    @property
    def layout(self) -> Layout:
        return self._router.addresses.layout

    @property
    def clients(self) -> frozenset[int]:
        """A server learns of the end of a client when it reads so in its inbox, not earlier."""
        return self.live - self._left

    @property
    def expected_steps(self) -> int:
        return self._pace.expected_steps

    @property
    def over(self) -> bool:
        return self._router.ended.is_over

    def observe(self, what: str, value: float = 1.0) -> None:
        if what == "update":
            missed, self._updates = self._updates - self._updates_read, self._updates + 1
            self._observer.stale(self.rank, missed, time.monotonic_ns())
        elif what != "shared update":  # counting those of all workers would take messages
            self._observer.observed(self.rank, what, value, time.monotonic_ns())

    def now(self) -> float:
        return time.monotonic()

    def steps(self) -> Iterator[int]:
        while self._pace.open_step(self.step):
            self._observer.began_step(self.rank, time.monotonic_ns())
            self._idle += 1
            yield self.step
            check_idle(self.rank, self._idle)
            self.step += 1
        self._observer.began_step(self.rank, time.monotonic_ns())

    def gradient(
        self, at: Tensor | Replica, batch: Tensor | None = None, *, lesson: Lesson | None = None
    ) -> Gradient:
        if self._gradient is None:
            raise ProtocolError("a server computes no gradients")
        self._updates_read = self._updates
        self._idle = 0
        return self._gradient(at, batch, lesson)

    # ------------------------------------------------------------------ messages

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        message = Message(self.rank, payload)
        if to == self.rank:
            # A message between loops of this very worker leaves no trace elsewhere.
            self._router.mailboxes[to].deliver(tag, message)
            return _SENT
        return self._post(to, message, tag)

    def _post(self, to: int, message: Message, tag: Tag) -> Pending[None]:
        gone: Pending[None] = Pending("send", to)
        try:
            self._router.post(to, tag, message)
            gone.resolve(None)
        except PeerLost as lost:
            gone.fail(PeerLost(to, lost.args[0]) if lost.peer != to else lost)
        return gone

    def _tell_exchange(self, source: int, payload: object) -> None:
        """Tell of what another worker or server has sent; an empty message is no exchange."""
        if source >= self._workers:
            # A part of a model counts as that part of an exchange.
            share = tensor_bytes(payload) / max(1, self._router.window_bytes[self.rank])
            self._observer.exchanged(self.rank, None, time.monotonic_ns(), share=share)
        elif payload is not None and source != self.rank and source not in self._inside:
            # What comes from inside the group is a part of computing a gradient.
            self._observer.exchanged(self.rank, source, time.monotonic_ns())

    def _tell_once_there(self, source: int, pending: Pending[Any]) -> None:
        def done() -> None:
            try:
                self._tell_exchange(source, pending.result())
            except (PeerLost, ProtocolError):
                pass  # nothing came; the method gets the error when it awaits

        pending.when_done(done)

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        pending = Receive("receive", source)
        pending.when_done(lambda: self._received(pending))
        self._router.receive(self.rank, tag, pending)
        return pending

    def _received(self, pending: Pending[Message]) -> None:
        try:
            message = pending.result()
        except (PeerLost, ProtocolError):
            return  # nothing came; the method gets the error when it awaits
        if self.rank < self._workers:
            self._tell_exchange(message.source, message.payload)
        elif isinstance(message.payload, Left):
            self._left.add(message.source)
        elif message.source in self._left:
            self._left.discard(message.source)  # it has died, and has come back

    def collect(self, tag: Tag) -> list[Message]:
        messages = self._router.mailboxes[self.rank].collect(tag)
        for message in messages:
            self._tell_exchange(message.source, message.payload)
        return messages

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        number = self._router.next_request()
        answer = Reply("reply", to)
        self._router.receive(self.rank, ("reply", number), answer)
        try:
            self._router.post(to, tag, Message(self.rank, payload, reply_to=number))
        except PeerLost:
            answer.fail(PeerLost(to))
        self._tell_once_there(to, answer)
        return answer

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        answer = Message(self.rank, payload)
        return self._post(message.source, answer, ("reply", message.reply_to))

    # ------------------------------------------------------------------ collectives

    def all_reduce(
        self, value: Tensor, *, over: Sequence[int] | None = None,
        reference: Tensor | None = None, part: Fragment | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        members = range(self.size) if over is None else over
        is_inside = bool(self._inside) and tuple(members) == self._inside
        # The buckets of a gradient are one exchange, and a group's mean is none.
        if not is_inside and getattr(value, "is_first", True):
            self._observer.exchanged(self.rank, None, time.monotonic_ns())
        share = 2 * (len(members) - 1) / len(members)
        self._router.bytes_sent += round(share * value.nbytes)
        return self._reduce(value, members)

    def _tag(self, kind: str, members: Sequence[int]) -> Tag:
        """All members make their collectives in the same order, so a number identifies each."""
        key = tuple(members)
        number = self._collectives[key] = self._collectives.get(key, 0) + 1
        return (f"{kind} {','.join(map(str, key))}", number)

    def broadcast(self, value: Tensor | None, *, root: int, over: Sequence[int]) -> Pending[Tensor]:
        tag = self._tag("broadcast", over)
        if self.rank != root:
            message = self.receive(tag, source=root)
            return mapped(message, lambda message: message.payload, "broadcast")
        if value is None:
            raise ProtocolError("the root of a broadcast gives the value")
        for member in over:
            if member != root and member in self._router.live:
                self.send(member, value, tag=tag)
        return Pending.resolved("broadcast", value, root)

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        members = list(range(self.size)) if over is None else list(over)
        tag = self._tag("all_gather", members)
        for member in members:
            if member != self.rank and member in self._router.live:
                self.send(member, value, tag=tag)

        async def collect() -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            for member in members:
                try:
                    found[member] = (
                        value if member == self.rank
                        else (await self.receive(tag, source=member)).payload
                    )  # fmt: skip
                except PeerLost:
                    pass  # the dead are left out
            return found

        return self.start(collect())

    # ------------------------------------------------------------------ one-sided

    def _is_alive(self, end: int) -> bool:
        return self._router.addresses.process_of(end) in self._router.live

    def read(self, peer: int) -> Pending[Tensor]:
        if not self._is_alive(peer):
            return Pending.failed("read", PeerLost(peer), peer)
        self._router.bytes_sent += self._router.window_bytes[peer]
        value = self._router.transport.read(peer)
        if peer < self._workers:  # a server's answer is needed, however long it takes
            value = self._silence.bounded(peer, value)
        self._tell_once_there(peer, value)
        return value

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        if not self._is_alive(peer):
            return Pending.failed("accumulate", PeerLost(peer), peer)
        self._router.bytes_sent += delta.numel() * delta.element_size()
        started = self._router.transport.accumulate(peer, delta, start)
        if not started.done:
            with self._starting:
                self._remember(started)
        return started

    def average(self, peer: int) -> Pending[None]:
        # A side loop may run in another thread than the main one, which ends it.
        with self._starting:
            if self._is_finished:
                # Nobody needs this average any more; the side loop waits until it is dropped.
                return Pending("average", peer)
            if peer not in self._router.live:
                return Pending.failed("average", PeerLost(peer), peer)
            self._router.bytes_sent += 2 * self._router.window_bytes[peer]
            started = self._router.transport.average(self.rank, peer)
            if not started.done:
                self._remember(started)
        started.when_done(lambda: self._tell_average(peer, started))
        # If it is left out for now, it is made later at both ends, so the sum is kept.
        return self._silence.bounded(peer, started)

    def _tell_average(self, peer: int, ended: Pending[None]) -> None:
        """Both workers have exchanged models, and only this one knows, so it counts for both."""
        try:
            ended.result()
        except (PeerLost, ProtocolError):
            return
        self._observer.exchanged(self.rank, peer, time.monotonic_ns())
        self._observer.exchanged(peer, self.rank, time.monotonic_ns())

    def _remember(self, started: Pending[None]) -> None:
        self._under_way = [one for one in (*self._under_way, started) if not one.done]

    def finish(self) -> None:
        """Begin no more averages, and wait until those under way, and the adds, have ended at both
        ends: models that are read afterwards do not change any more."""
        with self._starting:
            self._is_finished = True
        for pending in self._under_way:
            self._router.driver.wait(pending, "averaging")

    # ------------------------------------------------------------------ time and tasks

    def sleep(self, seconds: float) -> Pending[None]:
        pending: Pending[None] = Pending("sleep")
        until = time.monotonic() + seconds

        def settle() -> None:
            while (left := until - time.monotonic()) > 0 and not pending.done:
                self._router.driver.check()
                time.sleep(min(left, StopToken.patience))
            pending.resolve(None)

        pending.settle = settle
        return pending

    def within(self, seconds: float, pending: Pending[T]) -> Pending[T]:
        until = time.monotonic() + seconds
        late = Late(f"{pending.label} did not end within {seconds:g} s")
        is_computed = _is_computed(pending)

        def in_time(value: T) -> T:
            if is_computed and time.monotonic() > until:
                raise late
            return value

        bounded = mapped(pending, in_time)
        if is_computed:
            # Nothing interrupts a gradient, and a second thread would be in its way: its awaiter
            # computes it and looks at the clock afterwards.
            bounded.settle = pending.settle
            return bounded

        def end() -> None:
            # A receive that stayed posted would take the next message, which would be lost.
            pending.cancel()
            if pending.cancelled:  # otherwise the operation has just ended
                bounded.fail(late)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        pending.when_done(timer.cancel)
        for part in pending.parts if isinstance(pending, Gathered) else (pending,):
            if part.settle is not None and not part.done:
                self._router.driver.settle_elsewhere(part, f"{self.rank}: within {seconds:g} s")
        return bounded

    def start(self, task: Coroutine[Any, Any, T]) -> Pending[T]:
        self._tasks += 1
        return self._router.driver.start(task, f"{self.rank}: {task.__qualname__} {self._tasks}")

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        for task in side:
            self.start(task)
        return await main


def reduced_copy(
    transport: Transport, value: Tensor, members: Sequence[int]
) -> Pending[Tensor]:  # fmt: skip
    """An all-reduce that leaves the value itself as it is."""
    own = joined([value.detach().reshape(-1)]).view(value.shape)
    reduced = transport.all_reduce([own], members)
    mean = mapped(reduced, lambda _: own, "all_reduce")
    mean.settle = reduced.settle
    return mean


def _is_computed(pending: Pending[Any]) -> bool:
    """Whether this is a gradient that the awaiting thread computes."""
    return isinstance(pending, Gradient) and pending.settle is not None


_WAYS = {
    "send": "to", "request": "to", "reply": "to", "broadcast": "from", "all_gather": "",
    "all_reduce": "", "read": "from", "accumulate": "to", "average": "with",
}  # fmt: skip
"""The operations that move a model or a message, and how their peer is named."""


def tell_operations(worker: RealWorker, observer: Observer) -> None:
    """Tell how long each call of an operation takes the thread that this is called in.

    Other threads make such calls too, for side loops and servers, while this one computes or waits.
    A call inside another, as of `send` in `broadcast`, is a part of it.
    """
    thread, is_inside = threading.get_ident(), False

    def timed(what: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal is_inside
            if is_inside or threading.get_ident() != thread:
                return operation(*arguments, **named)
            peer = named.get("root", arguments[0])
            peer = peer.source if isinstance(peer, Message) else peer
            whom = "" if isinstance(peer, Tensor) else end_name(peer, worker.size, _WAYS[what])
            is_inside, began = True, time.monotonic_ns()
            try:
                return operation(*arguments, **named)
            finally:
                is_inside = False
                observer.communicated(worker.rank, what + whom, (began, time.monotonic_ns()))

        return call

    for what in _WAYS:
        setattr(worker, what, timed(what, getattr(worker, what)))
