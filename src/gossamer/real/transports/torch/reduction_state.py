"""The state of one mean over processes, and of the groups that take means.

Nothing here sends or receives; `reduction` does.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.buffers import take_elements
from gossamer.real.transports.torch.departures import Loss
from gossamer.real.transports.torch.wire import (
    PIECE,
    Stream,
    finish_stream,
    host_copy,
    host_empty,
    raw,
)

_SHORT = 1 << 14
"""Bytes up to which a vector has one owner: dividing it would cost more messages than it saves."""
_FEW, _BY_EACH = 8, 1 << 16
"""Members up to which, and bytes to receive up to which, all add up everything by themselves."""
_BY_BOTH = 1 << 20
"""Bytes up to which two do: beyond it adding up takes longer than waiting for the other's half."""
_BLOCK = 1 << 16
"""Elements that a second pass finds in the cache."""


UNDER_WAY = 32 << 20
"""A sum is begun only when those before it that this process has not finished weigh no more."""
_LEAST_WEIGHT = UNDER_WAY >> 6


class Order(NamedTuple):
    """A mean that an engine is to make."""

    members: tuple[int, ...]
    value: Tensor
    """What this process puts in; it stays as it is."""
    target: Tensor
    is_wanted: Callable[[], bool]
    """False once a death has changed the sum. It must not be begun then: what an engine begins
    says to the others that this process has finished most of what their engines made before."""
    landed: Callable[[slice], None]
    """To be told which part of the mean stands in the target now."""
    finished: Callable[[BaseException | None], None]
    """To be called at the end, with an error where there is none."""


def weight_of(nbytes: int) -> int:
    """Of a sum under way; short ones are not to be many either."""
    return max(nbytes, _LEAST_WEIGHT)


def key_of(members: Sequence[int]) -> int:
    """A number for a group that every process works out alike."""
    text = ",".join(map(str, members)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def contributors_of(
    group: Group, number: int, losses: Sequence[Loss]
) -> tuple[tuple[int, ...], int]:
    """Who takes part in a sum, and the epoch that last changed it: the name of the attempt.

    Who left after finishing the sum stays in it, as its share has been sent; but not in a new
    attempt, to which it can give nothing any more.
    """
    present, left, attempt = set(group.members), set[int](), 0
    for epoch, loss in enumerate(losses, start=1):
        if loss.process not in present:
            continue
        if not loss.is_dead and loss.taken.get(str(group.key), 0) > number:
            left.add(loss.process)
            continue
        present -= left | {loss.process}
        left.clear()
        attempt = epoch
    return tuple(sorted(present)), attempt


def is_by_each(nbytes: int, members: int) -> bool:
    """Whether everybody sends its whole value to everybody: one way instead of there and back.

    Two have to send as many bytes either way, but each adds up everything; more would send the more
    the more they are.
    """
    if members == 2:
        return nbytes <= _BY_BOTH
    return members <= _FEW and (members - 1) * nbytes <= _BY_EACH


def parts_of(length: int, size: int, members: Sequence[int], turn: int) -> dict[int, slice]:
    """Which elements each member adds up."""
    if length * size <= _SHORT:
        return {members[turn % len(members)]: slice(0, length)}
    share = -(-length // len(members))
    parts: dict[int, slice] = {}
    for place, member in enumerate(members):
        if place * share < length:
            parts[member] = slice(place * share, min(length, (place + 1) * share))
    return parts


def mean_into(target: Tensor, values: Sequence[Tensor]) -> None:
    """`rules.mean_in_order`, the same bits, into memory that is there."""
    if len(values) == 1:
        target.copy_(values[0])
        return
    if target.numel() > _BLOCK:
        for start in range(0, target.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            mean_into(target[block], [value[block] for value in values])
        return
    torch.add(values[0], values[1], out=target)
    for value in values[2:]:
        target.add_(value)
    target.div_(len(values))


class Group:
    """A set of members and the sums that they take one after the other."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.members: tuple[int, ...] = ()
        self.started = 0
        self.low = 0
        """All sums below this number are finished here."""
        self.done: set[int] = set()
        """Those above that are finished all the same."""
        self.open: dict[int, Sum] = {}
        self.kept: dict[int, Tensor] = {}
        """Means that another member may still lack."""
        self._heard: dict[int, int] = {}
        self._by_engine: deque[tuple[int, int]] = deque()
        """The last sums that an engine made, each with its weight."""

    def has_finished(self, number: int) -> bool:
        return number < self.low or number in self.done

    def finish(self, own: Sum, gone: frozenset[int], *, is_by_engine: bool) -> None:
        self.done.add(own.number)
        while self.low in self.done:
            self.done.remove(self.low)
            self.low += 1
        del self.open[own.number]
        self.kept[own.number] = own.kept
        if is_by_engine:
            self._by_engine.append((own.number, weight_of(own.kept.nbytes)))
            self._forget_engines()
        self._forget(own.rank, gone)

    def _forget_engines(self) -> None:
        """All have begun the last one, and so have finished what was more than `UNDER_WAY` before
        it; though perhaps not what went by messages."""
        before = sum(weight for _, weight in self._by_engine) - self._by_engine[-1][1]
        while before > UNDER_WAY:
            number, weight = self._by_engine.popleft()
            self.kept.pop(number, None)
            before -= weight

    def heard(self, source: int, low: int, rank: int, gone: frozenset[int]) -> None:
        """Another member has finished everything below `low`."""
        if low > self._heard.get(source, 0):
            self._heard[source] = low
            self._forget(rank, gone)

    def _forget(self, rank: int, gone: frozenset[int]) -> None:
        others = [member for member in self.members if member != rank and member not in gone]
        floor = min((self._heard.get(member, 0) for member in others), default=self.low)
        for number in [number for number in self.kept if number < floor]:
            del self.kept[number]


class Sum:
    """One mean: what this process put in, what has arrived, and what came out."""

    def __init__(self, group: Group, number: int, rank: int) -> None:
        self.group = group
        self.number = number
        self.rank = rank
        self.lock = threading.Lock()
        self.members: tuple[int, ...] = ()
        self.attempt = 0
        self.contributed = -1
        """The attempt that our contribution was sent for."""
        self.is_started = False
        self.is_stopped = False
        self.is_finished = False
        self.value: Tensor
        self.kept: Tensor
        self.parts: dict[int, slice] = {}
        self._is_by_each = False
        self.streams: dict[int, Stream] = {}
        self.pieces: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._result: Tensor | None = None
        """A copy of what is kept, for a caller that may change its own."""
        self._shape: Sequence[int] = ()
        self._home = torch.device("cpu")
        self._pending: Pending[Tensor]
        self._missing = 0
        self._position = 0

    def begin(self, value: Tensor, pending: Pending[Tensor], *, stays: bool = False) -> None:
        """Take this process's contribution; the value is the caller's again afterwards.

        One that `stays` on its GPU goes to the host only if its sum has to be done again, after a
        death; its copies are complete when this returns, so that every stream may use them.
        """
        self._pending = pending
        self._shape, self._home = value.shape, value.device
        if stays:
            self.value = value.detach().reshape(-1).clone()
            self.kept = torch.empty_like(self.value)
            self._result = torch.empty_like(self.value)
            finish_stream(self.value)
        else:
            self.value = host_copy(value)
            self.kept, self._result = self._like_value(), host_empty(value.detach())
        self.is_started = True
        self._lay_out()

    def _like_value(self) -> Tensor:
        return take_elements(self.value.numel(), self.value.dtype)

    def renew(self, members: tuple[int, ...], attempt: int) -> bool:
        """Other contributors: begin again, in other memory, as old pieces may still be landing."""
        with self.lock:
            changed = attempt != self.attempt
            self.members, self.attempt = members, attempt
            if changed and self.is_started:
                for stream in self.streams.values():
                    stream.abandon()
                if self.value.is_cuda:
                    on_gpu = self.value
                    self.value, self._result = host_copy(on_gpu), host_empty(on_gpu)
                self.kept = self._like_value()
                self._lay_out()
            return changed

    def _lay_out(self) -> None:
        length, size = self.value.numel(), self.value.element_size()
        self._is_by_each = is_by_each(length * size, len(self.members))
        if self._is_by_each:
            self.parts = {self.rank: slice(0, length)}
        else:
            self.parts = parts_of(length, size, self.members, self.number)
        self.streams = {}
        self._missing = length
        self._position = 0

    def contributions(self) -> Iterator[tuple[int, Tensor]]:
        """What each other owner is to add up."""
        if self._is_by_each:
            yield from ((peer, raw(self.value)) for peer in self.members if peer != self.rank)
            return
        for owner, part in self.parts.items():
            if owner != self.rank:
                yield owner, raw(self.value[part])

    @property
    def own_bytes(self) -> int:
        part = self.parts[self.rank]
        return (part.stop - part.start) * self.value.element_size()

    def add_up(self, begin: Callable[[int], Stream]) -> bool:
        """Add the pieces of our own part as far as they are complete; whether all is there now.

        `begin` opens the way to another member once there is something to tell it: from then on
        it is known to have started this sum, too.
        """
        others = [member for member in self.members if member != self.rank]
        mine, length = raw(self.value[self.parts[self.rank]]), self.own_bytes
        while self._position < length:
            start = self._position
            arrived = self.pieces.get((self.attempt, start), {})
            if any(member not in arrived for member in others):
                break
            arrived[self.rank] = mine[start : start + PIECE]
            self.pieces.pop((self.attempt, start), None)
            at = self.parts[self.rank].start + start // self.value.element_size()
            mean = self.kept[at : at + arrived[self.rank].numel() // self.value.element_size()]
            mean_into(mean, [arrived[member].view(mean.dtype) for member in self.members])
            self._take(at, mean)
            self._missing -= mean.numel()
            for member in () if self._is_by_each else others:
                if member not in self.streams:
                    self.streams[member] = begin(member)
                self.streams[member].push(raw(mean))
            self._position += PIECE
        return self._missing == 0

    def land(self, attempt: int, owner: int | None, start: int, data: Tensor) -> None:
        """A piece of the mean from its owner, or of all of it, as a gift: from nobody."""
        with self.lock:
            if self._expects(attempt, owner):
                first = 0 if owner is None else self.parts[owner].start
                mean = data.view(self.value.dtype)
                self._take(first + start // mean.element_size(), mean)

    def has_landed(self, attempt: int, owner: int | None) -> bool:
        """Its last piece was there; whether everything is there now.

        Only now it counts: an owner that learns of a death breaks off, with pieces of no meaning.
        """
        with self.lock:
            if not self._expects(attempt, owner):
                return False
            if owner is not None:
                part = self.parts[owner]
                self._missing -= part.stop - part.start
            return owner is None or self._missing == 0

    def _expects(self, attempt: int, owner: int | None) -> bool:
        # A gift is for those who were stopped; others may be getting the same piece by piece.
        is_due = owner is not None or self.is_stopped
        return is_due and attempt == self.attempt and not self.is_finished

    def is_first_attempt(self) -> bool:
        with self.lock:
            return self.attempt == 0

    def landed(self, part: slice) -> None:
        """The engine has put that part of the mean into `kept`."""
        with self.lock:
            # Else somebody died, and the sum is done again by messages.
            if self.attempt == 0 and self._result is not None:
                self._result[part].copy_(self.kept[part])
                finish_stream(self._result)

    def fail(self, error: BaseException) -> None:
        self._pending.fail(error)

    def _take(self, at: int, mean: Tensor) -> None:
        kept = self.kept[at : at + mean.numel()]
        if kept.data_ptr() != mean.data_ptr():
            kept.copy_(mean)
        if self._result is not None:
            self._result[at : at + mean.numel()].copy_(mean)

    def resolve(self) -> None:
        """Hand out the result."""
        self.pieces.clear()
        if self._result is not None:
            self._pending.resolve(self._result.reshape(self._shape).to(self._home))
