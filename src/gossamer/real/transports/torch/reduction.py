"""Means over processes by messages, the same bits as in the simulator, that survive deaths.

Every member owns a part of the vector. All send it their pieces of that part, it adds them in
order of rank, and sends the mean of each piece to all as soon as it is there; so adding and both
directions of the traffic overlap. A short vector has one owner, another one each time.

A death makes a new epoch (`Losses`). Open sums that the dead process belongs to are stopped, and
the survivors tell each other what they have finished: a mean that anyone has is given to the
others, and what nobody has is done again with the contributions that everybody kept.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.pending import Pending
from gossamer.real.transports.torch.departures import Loss, Losses
from gossamer.real.transports.torch.finished import Finished, decode_finished, encode_finished
from gossamer.real.transports.torch.reduction_state import (
    Group,
    Order,
    Sum,
    contributors_of,
    key_of,
)
from gossamer.real.transports.torch.wire import Stream, Wire, host_copy, raw

CONTRIBUTION, MEAN, STATE, RESULT = range(32, 36)
KINDS = range(32, 48)
_HEAD = struct.Struct("<QIII")  # group, number, attempt, finished by the sender


class Engine(Protocol):
    """Other means to make sums."""

    is_on_gpu: bool
    """It is for values that lie there; all others go by messages."""

    def __call__(self, order: Order) -> None:
        """Begin to make a mean; the order says whom to tell when it is there."""
        ...


class Reduction:
    """The sums that this process takes part in."""

    def __init__(self, wire: Wire, losses: Losses, engine: Engine | None = None) -> None:
        self._wire = wire
        self._losses = losses
        self._engine = engine
        self._lock = threading.RLock()
        self._groups: dict[int, Group] = {}
        self._states: dict[int, tuple[int, Finished]] = {}
        self._needed = 0
        """The last epoch that wants the states of all survivors."""
        self._settled = 0

    def start(self, value: Tensor, members: Sequence[int]) -> Pending[Tensor]:
        pending: Pending[Tensor] = Pending("all_reduce")
        ranks = tuple(sorted(members))
        engine = self._engine
        if engine is not None and engine.is_on_gpu and not value.is_cuda:
            engine = None
        if len(ranks) == 1 or value.numel() == 0:
            pending.resolve(value.detach().clone())
            return pending
        with self._lock:
            group = self._group(key_of(ranks))
            group.members = ranks
            own = self._sum(group, group.started)
            group.started += 1
            if own.attempt != 0:
                engine = None
            own.begin(value, pending, stays=engine is not None and engine.is_on_gpu)
            finished = partial(self._by_engine, own)
            order = Order(ranks, own.value, own.kept, own.is_first_attempt, own.landed, finished)
        if engine is not None:
            engine(order)
        else:
            self._contribute(own)
        return pending

    def farewell(self) -> tuple[bool, Mapping[str, int]]:
        """Whether no sum is open here, and how many of each group are finished."""
        with self._lock:
            groups = self._groups.values()
            is_clean = not any(own.is_started for group in groups for own in group.open.values())
            return is_clean, {str(group.key): group.low for group in groups}

    def say_farewell(self, epoch: int) -> None:
        """Tell the others of the line by which this process has left the sums."""
        body = encode_finished(epoch, {})
        for peer in self._alive():
            self._try(peer, STATE, b"", body)

    def lost(self, epoch: int, loss: Loss) -> None:
        """A line of the list of losses: stop what it touches, then do it again."""
        again: list[Sum] = []
        state: Finished = {}
        with self._lock:
            for group in self._groups.values():
                for own in group.open.values():
                    if self._renew(own) and own.is_started:
                        own.is_stopped = own.is_stopped or not loss.is_clean
                        again.append(own)
                state[group.key] = (group.low, frozenset(group.done))
            if not loss.is_clean:
                self._needed = epoch
                self._states[self._wire.rank] = (epoch, state)
        if not loss.is_clean:
            body = encode_finished(epoch, state)
            for peer in self._alive():
                if peer != self._wire.rank:
                    self._try(peer, STATE, b"", body)
        for own in again:
            self._contribute(own)
        self._go_on()

    # --- receiving

    def place(self, source: int, kind: int, head: bytes, length: int) -> Tensor | None:
        own = self._current(head) if kind == MEAN else None
        if own is None:
            return None
        with own.lock:
            if own.attempt != _HEAD.unpack(head)[2]:
                return None
            return raw(own.kept[own.parts[source]])

    def piece(self, source: int, kind: int, head: bytes, start: int, data: Tensor) -> None:
        if kind == STATE:
            self._told(source, data)
            return
        own = self._current(head)
        if own is None:
            return
        attempt = _HEAD.unpack(head)[2]
        if kind == CONTRIBUTION:
            with own.lock:
                own.pieces.setdefault((attempt, start), {})[source] = data
            self._advance(own)
        else:
            own.land(attempt, source if kind == MEAN else None, start, data)

    def end(self, source: int, kind: int, head: bytes) -> None:
        if kind == STATE:
            return
        key, _, attempt, low = _HEAD.unpack(head)
        own = None if kind == CONTRIBUTION else self._current(head)
        if own is not None and own.has_landed(attempt, source if kind == MEAN else None):
            self._finish(own, attempt)
        with self._lock:
            self._group(key).heard(source, low, self._wire.rank, self._gone())

    # --- inside

    def _group(self, key: int) -> Group:
        return self._groups.setdefault(key, Group(key))

    def _gone(self) -> frozenset[int]:
        return frozenset(loss.process for loss in self._losses.known)

    def _alive(self) -> list[int]:
        gone = self._gone()
        return [process for process in range(self._wire.size) if process not in gone]

    def _sum(self, group: Group, number: int) -> Sum:
        own = group.open.get(number)
        if own is None:
            own = group.open[number] = Sum(group, number, self._wire.rank)
            self._renew(own)
        elif not own.is_started:
            self._renew(own)  # pieces came before this process knew the group
        return own

    def _renew(self, own: Sum) -> bool:
        """Whether the losses known by now change who contributes."""
        members, attempt = contributors_of(own.group, own.number, self._losses.known)
        return own.renew(members, attempt)

    def _current(self, head: bytes) -> Sum | None:
        """The sum that a message belongs to, unless it is finished here."""
        key, number, attempt, _ = _HEAD.unpack(head)
        if attempt > self._losses.epoch:
            self._losses.catch_up(attempt)
        with self._lock:
            group = self._group(key)
            return None if group.has_finished(number) else self._sum(group, number)

    def _contribute(self, own: Sum) -> None:
        with own.lock:
            if own.is_stopped or own.contributed == own.attempt:
                return
            if self._wire.rank not in own.members:
                return  # it has left the sums, and this one to the others
            own.contributed = own.attempt
            head, bodies = self._head(own), list(own.contributions())
        for owner, body in bodies:
            self._try(owner, CONTRIBUTION, head, body)
        self._advance(own)

    def _advance(self, own: Sum) -> None:
        """Add the pieces of our part that are complete, in order, and pass their means on."""
        with own.lock:
            if own.is_finished or own.contributed != own.attempt:
                return
            if own.is_stopped or self._wire.rank not in own.parts:
                return
            attempt, head, length = own.attempt, self._head(own), own.own_bytes
            is_complete = own.add_up(lambda peer: self._begin(peer, head, length))
        if is_complete:
            self._finish(own, attempt)

    def _by_engine(self, own: Sum, error: BaseException | None) -> None:
        if error is None:
            self._finish(own, 0, is_by_engine=True)
            return
        # Not in the middle of `lost`: who asks next whether a later sum is wanted must be told no.
        with self._lock:
            is_failed = own.is_first_attempt()  # else somebody died: it is done again by messages
        if is_failed:
            own.fail(error)

    def _finish(self, own: Sum, attempt: int, *, is_by_engine: bool = False) -> None:
        """All of that attempt is there. A death may have come in between: the others then know
        that this sum is open here, and count on this process to do it again with them."""
        with self._lock, own.lock:
            if own.is_finished or own.attempt != attempt:
                return
            own.is_finished = True
            own.group.finish(own, self._gone(), is_by_engine=is_by_engine)
        own.resolve()

    # --- after a death

    def _told(self, source: int, body: Tensor) -> None:
        epoch, state = decode_finished(body)
        self._losses.catch_up(epoch)
        with self._lock:
            if epoch > self._states.get(source, (0, state))[0]:
                self._states[source] = (epoch, state)
        self._go_on()

    def _go_on(self) -> None:
        """Once all survivors have said what they finished: share that, and redo the rest."""
        again: list[Sum] = []
        gifts: list[tuple[int, bytes, Tensor]] = []
        with self._lock:
            alive = self._alive()
            said = {peer: self._states[peer] for peer in alive if peer in self._states}
            waits = any(peer not in said or said[peer][0] < self._needed for peer in alive)
            if waits or self._settled == self._needed:
                return
            self._settled = self._needed
            for group in self._groups.values():
                for own in group.open.values():
                    if own.is_stopped and not self._holders(group.key, own.number, alive):
                        own.is_stopped = False
                        again.append(own)
                for number, mean in group.kept.items():
                    gifts += self._gifts(group, number, mean, alive)
        for peer, head, body in gifts:
            self._try(peer, RESULT, head, body)
        for own in again:
            self._contribute(own)

    def _holders(self, key: int, number: int, alive: Sequence[int]) -> list[int]:
        found: list[int] = []
        for peer in alive:
            low, done = self._states[peer][1].get(key, (0, frozenset[int]()))
            if number < low or number in done:
                found.append(peer)
        return found

    def _gifts(
        self, group: Group, number: int, mean: Tensor, alive: Sequence[int]
    ) -> list[tuple[int, bytes, Tensor]]:
        """Whom this process, as the first who has a mean, gives it to."""
        holders = self._holders(group.key, number, alive)
        if not holders or holders[0] != self._wire.rank:
            return []
        # Copied: buffers of means are used again once everybody has them.
        _, attempt = contributors_of(group, number, self._losses.known)
        head, body = _HEAD.pack(group.key, number, attempt, group.low), raw(host_copy(mean))
        lacking = [peer for peer in group.members if peer in alive and peer not in holders]
        return [(peer, head, body) for peer in lacking]

    # --- sending

    def _head(self, own: Sum) -> bytes:
        return _HEAD.pack(own.group.key, own.number, own.attempt, own.group.low)

    def _try(self, to: int, kind: int, head: bytes, body: Tensor) -> None:
        try:
            self._wire.post(to, kind, head, body)
        except PeerLost:
            pass  # its death makes the next epoch

    def _begin(self, to: int, head: bytes, length: int) -> Stream:
        try:
            return _Outlasting(self._wire.begin(to, MEAN, head, length))
        except PeerLost:
            return _Outlasting(None)


class _Outlasting:
    """A stream to somebody who may die meanwhile, or is dead: that makes the next epoch."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def push(self, piece: Tensor) -> None:
        if self._stream is not None:
            with suppress(PeerLost):
                self._stream.push(piece)

    def abandon(self) -> None:
        if self._stream is not None:
            with suppress(PeerLost):
                self._stream.abandon()
