"""The two ends of a log: the `Worker` of the primary server, and that of its standby."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from gossamer.errors import Error, Late, PeerLost
from gossamer.payload import payload
from gossamer.pending import Pending
from gossamer.worker import INBOX, Left, Message, Tag, Worker

T = TypeVar("T")
_LOG, _BODY, _RECEIPTS = "server log", "logged", "log receipts"
_ANSWERS = 4
"""A worker waits for fewer answers of one server than that."""


@payload
@dataclass(frozen=True, slots=True)
class LogEntry:
    """What the text of a server got from one receive: a message, which follows, or that it came too
    late; when that was, and which workers lived and had not left then (`=`: as before)."""

    number: int
    source: int
    asks: bool
    is_late: bool
    now: float
    live: str
    clients: str


@payload
@dataclass(frozen=True, slots=True)
class LogReceipt:
    """The standby has all entries up to this one."""

    number: int


@payload
@dataclass(frozen=True, slots=True)
class SentAgain:
    """What follows are the sender's messages to this server from this one on."""

    first: int


@dataclass(slots=True)
class _View:
    """What a text knows besides its messages; the same objects until they change."""

    now: float
    live: frozenset[int]
    clients: frozenset[int]

    def moved(self, now: float, live: frozenset[int], clients: frozenset[int]) -> tuple[str, str]:
        """Know this instead; the answer is how a log says so."""
        told = _told(self.live, live), _told(self.clients, clients)
        self.now = now
        self.live = self.live if live == self.live else live
        self.clients = self.clients if clients == self.clients else clients
        return told


class _Arriving(Pending[Message]):
    """A receive of a text: what the server itself awaits for it, and how long at most."""

    __slots__ = ("operation", "seconds")

    def __init__(self) -> None:
        super().__init__("receive")
        self.operation: Pending[Message] | None = None
        self.seconds: float | None = None


class _LoggedServer:
    """The `Worker` of a server whose receives are logged."""

    def __init__(self, inner: Worker, rank: int) -> None:
        self._inner = inner
        self.rank = rank
        # Both begin with nobody, so that the first entry names the members.
        self._view = _View(inner.now(), frozenset(), frozenset())
        self._lock = threading.RLock()
        self._latest = _Arriving()
        """A text has one receive at a time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def live(self) -> frozenset[int]:
        return self._view.live

    @property
    def clients(self) -> frozenset[int]:
        return self._view.clients

    def now(self) -> float:
        """It stands still between two receives, so that both texts read the same clock."""
        return self._view.now

    def receive(self, tag: Tag, *, source: int | None = None) -> Pending[Message]:
        arriving = self._latest = _Arriving()
        self._begin(arriving)
        return arriving

    def within(self, seconds: float, pending: Pending[T]) -> Pending[T]:
        self._latest.seconds = seconds
        self._bound(self._latest)
        return pending

    def _begin(self, arriving: _Arriving) -> None:
        raise NotImplementedError

    def _bound(self, arriving: _Arriving) -> None:
        """Let the receive end after its time, if nothing has come."""
        operation, seconds = arriving.operation, arriving.seconds
        if operation is None or operation.done or seconds is None:
            return
        bounded = self._inner.within(seconds, operation)

        def ended() -> None:
            try:
                bounded.result()
            except Late as late:
                self._came(arriving, late)
            except Error:
                pass  # the receive itself tells

        bounded.when_done(ended)

    def _came(self, arriving: _Arriving, what: Message | Late) -> None:
        raise NotImplementedError

    def _receive_itself(self, arriving: _Arriving) -> None:
        """Await the next message of a worker."""
        operation = arriving.operation = self._inner.receive(INBOX)

        def ended() -> None:
            try:
                message = operation.result()
            except Error as error:
                arriving.fail(error)
            else:
                self._came(arriving, message)

        operation.when_done(ended)
        self._bound(arriving)


class Primary(_LoggedServer):
    """The `Worker` of a server that writes a log for its standby."""

    def __init__(self, inner: Worker, standby: int, bound: int) -> None:
        super().__init__(inner, inner.rank)
        self._standby, self._bound_of_log = standby, bound
        self._written = self._confirmed = 0
        self._is_alone = False
        self._held: deque[tuple[int, _Arriving, Message | Late]] = deque()
        self._until_quiet: list[Pending[None]] = []
        self._hear()

    def _begin(self, arriving: _Arriving) -> None:
        self._receive_itself(arriving)

    def _came(self, arriving: _Arriving, what: Message | Late) -> None:
        inner = self._inner
        with self._lock:
            self._written += 1
            number = self._written
            self._held.append((number, arriving, what))
            told = self._view.moved(inner.now(), inner.live, inner.clients)
        if not self._is_alone:
            is_late = isinstance(what, Late)
            source, asks = (0, False) if is_late else (what.source, what.reply_to != 0)
            entry = LogEntry(number, source, asks, is_late, self._view.now, *told)
            inner.send(self._standby, entry, tag=_LOG)
            if not is_late:
                inner.send(self._standby, _copied(what.payload), tag=(_BODY, number))
        self._release()

    def _release(self) -> None:
        while True:
            with self._lock:
                ahead = self._held[0][0] - self._confirmed if self._held else 0
                if ahead > self._bound_of_log and not self._is_alone:
                    return
                if not self._held:
                    waiting, self._until_quiet = self._until_quiet, []
                    break
                _, arriving, what = self._held.popleft()
            if isinstance(what, Late):
                arriving.fail(what)
            else:
                arriving.resolve(what)
        for one in waiting:
            one.resolve(None)

    def quiet(self) -> Pending[None]:
        """Resolves when the text has got all that has come so far."""
        quiet: Pending[None] = Pending("flush")
        with self._lock:
            if self._held:
                self._until_quiet.append(quiet)
                return quiet
        quiet.resolve(None)
        return quiet

    def _hear(self) -> None:
        receipt = self._inner.receive(_RECEIPTS, source=self._standby)

        def heard() -> None:
            try:
                confirmed = receipt.result().payload.number
            except Error:
                self._is_alone = True  # the standby is dead; what is held need not wait for it
                self._release()
                return
            with self._lock:
                self._confirmed = max(self._confirmed, confirmed)
            self._release()
            self._hear()

        receipt.when_done(heard)


class Standby(_LoggedServer):
    """The `Worker` of a server that follows the log of another, and acts when that one is dead."""

    def __init__(self, inner: Worker, primary: int, on_takeover: Callable[[], None]) -> None:
        super().__init__(inner, primary)
        self.is_acting = False
        self._on_takeover = on_takeover
        self._read: Counter[int] = Counter()
        """How many messages of each worker, in its present life, the text has got."""
        self._lefts: Counter[int] = Counter()
        """The ends of lives that the log had, which also come to the standby itself."""
        self._next: dict[int, int] = {}
        """The number of each worker's next message to this server itself."""
        self._asks = 0
        self._asked: dict[int, tuple[int, int]] = {}
        """For each message that the text may answer, whose it is and which of theirs."""
        self._to_answer: dict[tuple[int, int], Message] = {}
        self._answers: dict[int, dict[int, Any]] = {}

    @property
    def live(self) -> frozenset[int]:
        return self._inner.live if self.is_acting else self._view.live

    @property
    def clients(self) -> frozenset[int]:
        return self._inner.clients if self.is_acting else self._view.clients

    def now(self) -> float:
        return self._inner.now() if self.is_acting else self._view.now

    def observe(self, what: str, value: float = 1.0) -> None:
        if self.is_acting:
            self._inner.observe(what, value)

    def send(self, to: int, payload: Any, *, tag: Tag) -> Pending[None]:
        if self.is_acting:
            return self._inner.send(to, payload, tag=tag)
        return Pending.resolved("send", None, to)

    # ------------------------------------------------------------------ what comes in

    def _begin(self, arriving: _Arriving) -> None:
        if self.is_acting:
            self._receive_itself(arriving)
            return
        self._then(self._inner.receive(_LOG, source=self.rank), arriving, self._entry)

    def _then(
        self, awaited: Pending[Message], arriving: _Arriving,
        then: Callable[[_Arriving, Any], None],
    ) -> None:  # fmt: skip
        """Go on with what the primary has sent, or in its place if it is dead."""

        def ended() -> None:
            try:
                what = awaited.result().payload
            except PeerLost:
                if not self.is_acting:
                    self.is_acting = True
                    self._on_takeover()
                self._receive_itself(arriving)
            except Error as error:
                arriving.fail(error)
            else:
                then(arriving, what)

        awaited.when_done(ended)

    def _entry(self, arriving: _Arriving, entry: LogEntry) -> None:
        if entry.is_late:
            self._confirm(entry)
            arriving.fail(Late("the primary got nothing in time"))
            return

        def with_body(arriving: _Arriving, body: Any) -> None:
            self._confirm(entry)
            arriving.resolve(self._numbered(Message(entry.source, body, int(entry.asks))))

        body = self._inner.receive((_BODY, entry.number), source=self.rank)
        self._then(body, arriving, with_body)

    def _confirm(self, entry: LogEntry) -> None:
        live, clients = (
            _heard(self._view.live, entry.live),
            _heard(self._view.clients, entry.clients),
        )
        self._view.moved(entry.now, live, clients)
        self._inner.send(self.rank, LogReceipt(entry.number), tag=_RECEIPTS)

    def _numbered(self, message: Message) -> Message:
        """The message as the text gets it, with a number of our own that an answer refers to."""
        source = message.source
        if isinstance(message.payload, Left):
            self._lefts[source] += 1
            self._read[source] = 0
            self._answers.pop(source, None)
            return message
        key = (source, self._read[source])
        self._read[source] += 1
        if not message.reply_to:
            return message
        self._asks += 1
        self._asked[self._asks] = key
        return Message(source, message.payload, self._asks)

    def _came(self, arriving: _Arriving, what: Message | Late) -> None:
        """Something has come to this server itself, which acts."""
        if isinstance(what, Late):
            arriving.fail(what)
            return
        source, payload = what.source, what.payload
        if isinstance(payload, Left):
            if self._lefts[source]:
                self._lefts[source] -= 1  # the log had it
                self._receive_itself(arriving)
                return
            self._next.pop(source, None)
        elif isinstance(payload, SentAgain):
            lost = max(0, payload.first - self._read[source])
            if lost:
                self._inner.observe("lost updates", lost)
                self._read[source] = payload.first
            self._next[source] = payload.first
            self._receive_itself(arriving)
            return
        else:
            number = self._next.get(source, self._read[source])
            self._next[source] = number + 1
            if what.reply_to:
                self._to_answer[source, number] = what
            if number < self._read[source]:
                self._repeat((source, number))
                self._receive_itself(arriving)
                return
        arriving.resolve(self._numbered(what))
        if isinstance(payload, Left):
            self._lefts[source] -= 1  # it has come only here

    def _repeat(self, key: tuple[int, int]) -> None:
        """Answer what the text has answered before; what it has not, it will."""
        known = self._answers.get(key[0], {})
        if key in self._to_answer and key[1] in known:
            self._inner.reply(self._to_answer.pop(key), known[key[1]])

    def reply(self, message: Message, payload: Any) -> Pending[None]:
        key = self._asked.pop(message.reply_to)
        if key in self._to_answer:
            return self._inner.reply(self._to_answer.pop(key), payload)
        known = self._answers.setdefault(key[0], {})
        known[key[1]] = payload
        if len(known) > _ANSWERS:
            del known[min(known)]
        return Pending.resolved("reply", None, message.source)


def _told(known: frozenset[int], ranks: frozenset[int]) -> str:
    return "=" if ranks == known else ",".join(map(str, sorted(ranks)))


def _heard(known: frozenset[int], told: str) -> frozenset[int]:
    return known if told == "=" else frozenset(int(rank) for rank in told.split(",") if rank)


def _copied(value: Any) -> Any:
    """The text may change what it gets, and the standby must get it as it came."""
    if isinstance(value, Tensor):
        return value.clone()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    copies = {name: own.clone() for name, own in named.items() if isinstance(own, Tensor)}
    return dataclasses.replace(value, **copies) if copies else value
