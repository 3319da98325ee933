"""One worker's (or server's) view of a real run (the `Worker` protocol)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gossamer.errors import Late, PeerLost, ProtocolError
from gossamer.groups import Grouping, mapped
from gossamer.mailbox import Receive, Reply
from gossamer.pending import Gathered, Pending
from gossamer.real.books import Books
from gossamer.real.callback_dispatcher import Telling
from gossamer.real.router import Router
from gossamer.real.silent_peers import Silence
from gossamer.real.transports.buffers import joined
from gossamer.real.transports.transport import StopToken
from gossamer.replica import Replica
from gossamer.worker import Gradient, Left, Message, Tag

T = TypeVar("T")
_SENT = Pending.resolved("send", None)


class Pace(Protocol):
    """Which step comes next, and when the run is over."""

    @property
    def expected_steps(self) -> int: ...

    def open_step(self, step: int) -> bool:
        """Whether this step is to be made."""
        ...


class RealWorker:
    """What a method may touch, on real processes."""

    def __init__(
        self, hub: Router, end: int, *, seed: int, pace: Pace, books: Books,
        gradient: Callable[[Tensor | Replica, Tensor | None], Gradient] | None = None,
        telling: Telling | None = None, grouping: Grouping | None = None,
        forgets_leavers: bool = False,
    ) -> None:  # fmt: skip
        """`forgets_leavers`: who has left its loop is to this end as one who died."""
        self._forgets_leavers = forgets_leavers
        self._workers = hub.plan.size
        self._grouping = grouping or Grouping(hub.rank, hub.plan.size)
        self.rank = end
        is_worker = end < self._workers
        # A server knows those only who push for themselves.
        self.size = self._workers if is_worker else self._grouping.ends
        self._inside = self._grouping.group if is_worker and self._grouping.groups else ()
        self.rng = random.Random(f"{seed}/worker/{end}")
        self._hub = hub
        self._pace = pace
        self._books = books
        self._gradient = gradient
        self._telling = telling
        self._silence = Silence(hub.driver.stop)
        self._peers_of: tuple[frozenset[int], frozenset[int]] | None = None
        self._peers: list[int] = []
        self._left: set[int] = set()
        self._collectives: dict[tuple[int, ...], int] = {}
        self._tasks = 0
        self._under_way: list[Pending[None]] = []
        """Averages and adds that have not ended yet."""
        self._updates = self._updates_read = 0
        """Made without `descend_`; when the last gradient was begun."""
        self._is_finished = False
        self._starting = threading.Lock()
        self.step = 0

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
            members = self._hub.members
            return members.training if self._forgets_leavers else members.live
        live = self._grouping.speaking(self._hub.live)
        # As of what it has read of its inbox, like its clients.
        return live - self._left if self._forgets_leavers else live

    def live_at(self, step: int) -> frozenset[int]:
        return self._hub.live_at(step)

    @property
    def servers(self) -> Sequence[int]:
        return range(self._workers, self._hub.plan.ends)

    @property
    def slices(self) -> Sequence[slice]:
        return self._hub.plan.slices

    @property
    def clients(self) -> frozenset[int]:
        """What a server knows of its clients keeps step with what it has read of its inbox."""
        return self.live - self._left

    @property
    def expected_steps(self) -> int:
        return self._pace.expected_steps

    @property
    def over(self) -> bool:
        return self._hub.ended.is_over

    def observe(self, what: str, value: float = 1.0) -> None:
        if what == "update":
            missed, self._updates = self._updates - self._updates_read, self._updates + 1
            self._books.stale(missed)
            if self._telling is not None:
                self._telling.stale(self.rank, missed)
            return
        if what == "shared update":
            return  # to count those of all would take a message for each
        self._books.observe(what, value)
        if self._telling is not None and what == "dropped":
            self._telling.dropped(self.rank)

    def now(self) -> float:
        return time.monotonic()

    def steps(self) -> Iterator[int]:
        while self._pace.open_step(self.step):
            self._books.stepped(time.monotonic())
            yield self.step
            self.step += 1
        self._books.stepped(time.monotonic())

    def gradient(self, at: Tensor | Replica, batch: Tensor | None = None) -> Gradient:
        if self._gradient is None:
            raise ProtocolError("a server computes no gradients")
        self._updates_read = self._updates
        return self._gradient(at, batch)

    # ------------------------------------------------------------------ messages

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        message = Message(self.rank, payload)
        if to == self.rank:
            # A word between this end's own loops: nobody else hears of it.
            self._hub.mailboxes[to].deliver(tag, message)
            return _SENT
        return self._post(to, message, tag)

    def _post(self, to: int, message: Message, tag: Tag) -> Pending[None]:
        gone: Pending[None] = Pending("send", to)
        try:
            self._hub.post(to, tag, message)
            if self._is_exchange(to) and message.payload is not None:
                self._books.exchanges += 1
            gone.resolve(None)
        except PeerLost as lost:
            gone.fail(PeerLost(to, lost.args[0]) if lost.peer != to else lost)
        return gone

    def _part_held_by(self, end: int) -> float:
        """Of a model: all of it, or one server's range of it."""
        if end < self._workers:
            return 1.0
        slices = self.slices
        own = slices[end - self._workers]
        return (own.stop - own.start) / max(1, slices[-1].stop)

    def _is_exchange(self, end: int) -> bool:
        """With another worker that speaks for itself; inside a group a gradient is computed."""
        return end < self._workers and end != self.rank and end not in self._inside

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        pending = Receive("receive", source)
        if self.rank >= self._workers:
            pending.when_done(lambda: self._received(pending))
        elif self._telling is not None:
            pending.when_done(lambda: self._tell_received(pending))
        self._hub.receive(self.rank, tag, pending)
        return pending

    def _received(self, pending: Pending[Message]) -> None:
        message = pending.result()
        if isinstance(message.payload, Left):
            self._left.add(message.source)

    def _tell_received(self, pending: Pending[Message]) -> None:
        try:
            self._tell_model(pending.result())
        except (PeerLost, ProtocolError):
            pass  # nothing came; the method hears of it when it awaits

    def _tell_model(self, message: Message) -> None:
        """What another worker sent; bare signals are no exchange."""
        assert self._telling is not None
        if self._is_exchange(message.source) and message.payload is not None:
            self._telling.exchanged(self.rank, message.source)

    def collect(self, tag: Tag) -> list[Message]:
        messages = self._hub.mailboxes[self.rank].collect(tag)
        if self._telling is not None:
            for message in messages:
                self._tell_model(message)
        return messages

    def request(self, to: int, payload: Any, *, tag: Tag) -> Pending[Any]:
        number = self._hub.next_request()
        answer = Reply("reply", to)
        self._hub.receive(self.rank, ("reply", number), answer)
        try:
            self._hub.post(to, tag, Message(self.rank, payload, reply_to=number))
            self._books.exchanges += 0 if to < self._workers else self._part_held_by(to)
        except PeerLost:
            answer.fail(PeerLost(to))
        return answer

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        answer = Message(self.rank, payload)
        return self._post(message.source, answer, ("reply", message.reply_to))

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, value: Tensor, *, over: Sequence[int] | None = None) -> Pending[Tensor]:
        members = range(self.size) if over is None else over
        self._count_sum(members, value.nbytes)
        own = joined([value.detach().reshape(-1)]).view(value.shape)
        reduced = self._hub.transport.all_reduce([own], members)
        mean = mapped(reduced, lambda _: own, "all_reduce")
        mean.settle = reduced.settle
        return mean

    def _count_sum(self, members: Sequence[int], size: int, *, is_first: bool = True) -> None:
        """An all-reduce of that many bytes; `is_first`: it is not the continuation of another."""
        is_inside = bool(self._inside) and tuple(members) == self._inside
        if is_first and not is_inside:
            self._books.exchanges += 1
        self._books.bytes += round(2 * (len(members) - 1) / len(members) * size)

    def _tag(self, kind: str, members: Sequence[int]) -> Tag:
        """Everybody in a group makes its collectives in the same order, so counting names them."""
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
            if member != root and member in self._hub.live:
                self.send(member, value, tag=tag)
        return Pending.resolved("broadcast", value, root)

    def all_gather(
        self, value: Tensor, *, over: Sequence[int] | None = None
    ) -> Pending[dict[int, Tensor]]:
        members = list(range(self.size)) if over is None else list(over)
        tag = self._tag("all_gather", members)
        for member in members:
            if member != self.rank and member in self._hub.live:
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
                    pass  # left out
            return found

        return self.start(collect())

    # ------------------------------------------------------------------ one-sided

    def _is_alive(self, end: int) -> bool:
        return self._hub.plan.process_of(end) in self._hub.live

    def read(self, peer: int) -> Pending[Tensor]:
        if not self._is_alive(peer):
            return Pending.failed("read", PeerLost(peer), peer)
        self._books.exchanges += self._part_held_by(peer)
        self._books.bytes += self._hub.window_bytes[peer]
        value = self._hub.transport.read(peer)
        if peer >= self._workers:
            return value  # a server's is needed, however long it takes
        value = self._silence.bounded(peer, value, self._left_out)
        if self._telling is not None:
            self._telling.exchanged_once_done(value, (self.rank, peer))
        return value

    def _left_out(self) -> None:
        self._books.exchanges -= 1

    def accumulate(self, peer: int, delta: Tensor, *, start: int = 0) -> Pending[None]:
        if not self._is_alive(peer):
            return Pending.failed("accumulate", PeerLost(peer), peer)
        self._books.bytes += delta.numel() * delta.element_size()
        started = self._hub.transport.accumulate(peer, delta, start)
        if not started.done:
            with self._starting:
                self._remember(started)
        return started

    def average(self, peer: int) -> Pending[None]:
        # A side loop may run in another thread than the main one, which ends it.
        with self._starting:
            if self._is_finished:
                # Nobody needs it any more: the side loop waits for ever.
                return Pending("average", peer)
            if peer not in self._hub.live:
                return Pending.failed("average", PeerLost(peer), peer)
            # Both ends have exchanged, and only this one knows.
            self._books.exchanges += 2
            self._books.bytes += 2 * self._hub.window_bytes[peer]
            started = self._hub.transport.average(self.rank, peer)
            if not started.done:
                self._remember(started)
        if self._telling is not None:
            pairs = (self.rank, peer), (peer, self.rank)
            self._telling.exchanged_once_done(started, *pairs)
        # Left out it is made later, at both ends: the sum is kept.
        return self._silence.bounded(peer, started)

    def _remember(self, started: Pending[None]) -> None:
        self._under_way = [one for one in (*self._under_way, started) if not one.done]

    def finish(self) -> None:
        """No average begins here any more, and those under way have ended at both ends, as have
        the adds: who reads the models afterwards reads what stays."""
        with self._starting:
            self._is_finished = True
        for pending in self._under_way:
            self._hub.driver.wait(pending, "averaging")

    # ------------------------------------------------------------------ time and tasks

    def sleep(self, seconds: float) -> Pending[None]:
        pending: Pending[None] = Pending("sleep")
        until = time.monotonic() + seconds

        def settle() -> None:
            while (left := until - time.monotonic()) > 0 and not pending.done:
                self._hub.driver.check()
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
            # A receive that stayed posted would take the next message and lose it.
            pending.cancel()
            if pending.cancelled:  # otherwise it has ended at this very moment
                bounded.fail(late)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        pending.when_done(timer.cancel)
        for part in pending.parts if isinstance(pending, Gathered) else (pending,):
            if part.settle is not None and not part.done:
                self._hub.driver.settle_elsewhere(part, f"{self.rank}: within {seconds:g} s")
        return bounded

    def start(self, task: Coroutine[Any, Any, T]) -> Pending[T]:
        self._tasks += 1
        return self._hub.driver.start(task, f"{self.rank}: {task.__qualname__} {self._tasks}")

    async def together(self, main: Coroutine[Any, Any, T], *side: Coroutine[Any, Any, Any]) -> T:
        for task in side:
            self.start(task)
        return await main


def _is_computed(pending: Pending[Any]) -> bool:
    """Whether it is a gradient that its awaiter computes."""
    return isinstance(pending, Gradient) and pending.settle is not None
