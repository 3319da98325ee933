"""The state of all-reduces by messages. This module sends and receives nothing; `reduce` does.

Every member of a group owns a part of the vector. All members send the owner their pieces of that
part; the owner adds these in order of rank, and sends the mean of its part to all. A short vector
has a single owner, another one each time. Of a very short vector every member sends everything to
every other, and no answers follow.

One mean at one process:

    early            Pieces of others may arrive before this process starts the mean.
      |  start
      v
    open             The attempt sends and adds up. A departure that changes the contributors
      |  ^  |        begins another attempt, in other memory: old pieces may still be landing.
      |  |  | a contributor dies, or leaves while it has means open
      |  |  v
      |  |  stopped  Every survivor tells every other one which means it has finished.
      |  |  |   |
      |  +--+   |    If no survivor has this mean, the next attempt is opened.
      |         |    Otherwise the first that has it gives it to those that lack it.
      v         v
    finished         The mean is kept until all other members say that they have finished it too.

All survivors decide alike, because they read the same departures in the same order. The number of
departures is an epoch. An attempt is named by the epoch that made it necessary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.torch.departures import Departure
from gossamer.real.transports.torch.links import LinkStream
from gossamer.real.transports.torch.wire import PIECE, SLOT, host_copy, host_empty, raw

_FEW, _BY_EACH = 8, 1 << 16
"""Up to so many members, and so many bytes to receive, every member adds up the whole vector."""
_BY_BOTH = 1 << 20
"""Of two members, each adds up the whole vector up to so many bytes. For a longer vector it is
faster to add up one half and to wait for the other."""

Gift = tuple[int, "Head", Tensor]
"""A mean for a process that lacks it: to whom, the head of its message, the mean."""
Finished = Mapping[int, tuple[int, frozenset[int]]]
"""Which means of each group a process has finished: all below a number, and some others."""


def key_of(members: Sequence[int]) -> int:
    """Return the number of a group, which every process computes alike."""
    text = ",".join(map(str, members)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def contributors_of(
    key: int, members: Sequence[int], number: int, departures: Sequence[Departure]
) -> tuple[tuple[int, ...], int]:
    """Return the contributors to a mean, and the epoch that changed them last.

    A process that left after it had finished the mean remains a contributor, because it has sent
    its contribution. It does not contribute to a new attempt.
    """
    present, left, changed = set(members), set[int](), 0
    for epoch, departure in enumerate(departures, start=1):
        if departure.process not in present or departure.is_arrival:
            continue
        if not departure.is_dead and departure.finished.get(str(key), 0) > number:
            left.add(departure.process)
            continue
        present -= left | {departure.process}
        left.clear()
        changed = epoch
    return tuple(sorted(present)), changed


def is_by_each(nbytes: int, members: int) -> bool:
    """Whether every member sends its whole value to every other, so that no answers are needed.

    Two members send as many bytes either way, but each of them adds up everything. Three or more
    members send more bytes than they would send to owners.
    """
    if members == 2:
        return nbytes <= _BY_BOTH
    return members <= _FEW and (members - 1) * nbytes <= _BY_EACH


def parts_of(length: int, size: int, members: Sequence[int], turn: int) -> dict[int, slice]:
    """Return which elements each owner adds up. A short vector is not divided, to save messages."""
    if length * size <= SLOT:
        return {members[turn % len(members)]: slice(0, length)}
    share = -(-length // len(members))
    starts = range(0, length, share)
    return {
        member: slice(start, min(length, start + share))
        for member, start in zip(members, starts, strict=False)
    }


class Attempt:
    """One attempt to compute a mean, with certain contributors and in memory of its own."""

    def __init__(
        self, epoch: int, contributors: tuple[int, ...], rank: int, turn: int, value: Tensor,
        mean: Tensor,
    ) -> None:  # fmt: skip
        self.epoch = epoch
        self.contributors = contributors
        self.value = value
        self.mean = mean
        self.others = [member for member in contributors if member != rank]
        self.is_open = False
        """Whether this process sends and adds up."""
        self.streams: dict[int, LinkStream] = {}
        """By receiver: the mean of our part on its way."""
        self.rooms: dict[int, int] = {}
        """By receiver: the number of the room that it has made for the mean of our part."""
        self._rank = rank
        length, size = value.numel(), value.element_size()
        self.is_by_each = is_by_each(length * size, len(contributors))
        self._parts = {rank: slice(0, length)}
        if not self.is_by_each:
            self._parts = parts_of(length, size, contributors, turn)
        self._missing = set(self._parts)
        """The owners whose part of the mean has not arrived."""
        self._arrived: dict[int, dict[int, Tensor]] = {}
        """Contributions to our part, by first byte and source."""
        self._position = 0
        self._is_adding = False

    def part(self, owner: int, of: Tensor) -> Tensor:
        """Return the bytes of a vector that a member owns, which may be none."""
        return raw(of[self._parts.get(owner, slice(0, 0))])

    def contributions(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for each other owner our contribution, and the memory for its part of the mean."""
        owners = self.others if self.is_by_each else self._parts
        for owner in owners:
            if owner != self._rank:
                body = raw(self.value) if self.is_by_each else self.part(owner, self.value)
                yield owner, body, self.part(owner, self.mean)

    def contribution(self, source: int, room: int, start: int, data: Tensor) -> None:
        self.rooms[source] = room
        self._arrived.setdefault(start, {})[source] = data

    def next_addition(self) -> tuple[Tensor, list[Tensor]] | None:
        """Return the next piece to add up, as target and values in order of rank, if all of it is
        here. The caller says `added` afterwards, and until then no other caller gets a piece, so
        pieces are made in order."""
        mine = self.part(self._rank, self.value)
        start = self._position
        arrived = self._arrived.get(start, {})
        is_idle = not self.is_open or self._is_adding or start >= mine.numel()
        if is_idle or any(member not in arrived for member in self.others):
            return None
        self._is_adding = True
        self._arrived.pop(start, None)
        arrived[self._rank] = mine[start : start + PIECE]
        target = self.part(self._rank, self.mean)[start : start + PIECE]
        kind = self.mean.dtype
        values = [arrived[member].view(kind) for member in self.contributors]
        return target.view(kind), values

    def added(self) -> None:
        self._is_adding = False
        self._position += PIECE
        if self._position >= self.part(self._rank, self.value).numel():
            self.landed(self._rank)

    def landed(self, owner: int) -> None:
        """That owner's part of the mean has arrived."""
        self._missing.discard(owner)

    @property
    def is_complete(self) -> bool:
        return not self._missing


class Head(NamedTuple):
    """What a message says about the mean that it belongs to."""

    group: int
    number: int
    attempt: int
    low: int
    """The sender has finished all means below this number."""
    room: int = 0
    """The room that the sender of a contribution has made for the receiver's part of the mean."""


class Mean:
    """One mean of a group."""

    def __init__(self, group: MeanGroup, number: int) -> None:
        self.group = group
        self.number = number
        self.result: Pending[Tensor] = Pending("all_reduce")
        """The flat mean, which nobody may change."""
        self.value: Tensor
        """What this process contributes."""
        self.home = torch.device("cpu")
        """The device of the caller's tensors."""
        self.attempt: Attempt | None = None
        self.early: list[tuple[int, Head, int, Tensor]] = []
        self.is_stopped = False


class MeanGroup:
    """A set of members and the means that they compute one after the other."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.members: tuple[int, ...] = ()
        self.started = 0
        self.low = 0
        """This process has finished all means below this number."""
        self.done: set[int] = set()
        """The finished means above that number."""
        self.open: dict[int, Mean] = {}
        self.kept: dict[int, Tensor] = {}
        """Means that another member may still lack."""
        self.by_nccl = -1
        """The last mean that NCCL has computed."""
        self._heard: dict[int, int] = {}

    def has_finished(self, number: int) -> bool:
        return number < self.low or number in self.done

    def finish(self, number: int, mean: Tensor, *, is_by_nccl: bool) -> None:
        del self.open[number]
        self.done.add(number)
        while self.low in self.done:
            self.done.remove(self.low)
            self.low += 1
        self.kept[number] = mean
        if is_by_nccl:
            # NCCL computes one mean after the other. All members have begun this one, so they have
            # finished the one before it, which they do not announce.
            self.kept.pop(self.by_nccl, None)
            self.by_nccl = number

    def hear(self, source: int, low: int) -> None:
        """Another member has finished everything below `low`."""
        self._heard[source] = max(low, self._heard.get(source, 0))

    def forget(self, others: Sequence[int]) -> None:
        """Release the means that all other members have."""
        floor = min((self._heard.get(member, 0) for member in others), default=self.low)
        for number in [number for number in self.kept if number < floor]:
            del self.kept[number]


class ReduceState:
    """All means of one process. One thread at a time may use it."""

    def __init__(self, rank: int, size: int, absent: Iterable[int] = ()) -> None:
        """Those that are absent take part in no mean, also if they come later."""
        self._rank = rank
        self._beginners = sorted(frozenset(range(size)) - frozenset(absent))
        self._groups: dict[int, MeanGroup] = {}
        self._departures: list[Departure] = []
        self._told: dict[int, tuple[int, Finished]] = {}
        """By process: the last epoch at which it said what it has finished, and what it said."""
        self._needed = 0
        """The last epoch for which all survivors must say what they have finished."""
        self._settled = 0

    @property
    def alive(self) -> list[int]:
        gone = {line.process for line in self._departures if not line.is_arrival}
        return [process for process in self._beginners if process not in gone]

    def head(self, mean: Mean, attempt: Attempt, room: int = 0) -> Head:
        return Head(mean.group.key, mean.number, attempt.epoch, mean.group.low, room)

    # --- what this process does

    def start(self, value: Tensor, home: torch.device, members: tuple[int, ...]) -> Mean:
        """Start the next mean with these members. The caller does not change the value any more."""
        group = self._group(key_of(members))
        group.members = members
        mean = self._mean(group, group.started)
        group.started += 1
        mean.value, mean.home = value, home
        self._renew(mean)
        return mean

    def opened(self, mean: Mean) -> Attempt | None:
        """Open the present attempt of a mean and return it, if that is allowed and not done yet."""
        attempt = mean.attempt
        if attempt is None or attempt.is_open or mean.is_stopped:
            return None
        if self._rank not in attempt.contributors:
            return None  # this process has left the sums, so this mean is up to the others
        attempt.is_open = True
        return attempt

    def finish(self, mean: Mean, attempt: Attempt, *, is_by_nccl: bool = False) -> bool:
        """The attempt is complete. Return False if a departure has made another attempt necessary:
        this process has then told the others that its mean is open, and they wait for its part in
        the new attempt."""
        group = mean.group
        if mean.attempt is not attempt or group.has_finished(mean.number):
            return False
        group.finish(mean.number, attempt.mean, is_by_nccl=is_by_nccl)
        self._forget(group)
        return True

    def own_finished(self) -> tuple[bool, Mapping[str, int]]:
        """Whether no mean is open here, and how many of each group are finished."""
        groups = self._groups.values()
        is_clean = all(mean.attempt is None for group in groups for mean in group.open.values())
        return is_clean, {str(group.key): group.low for group in groups}

    # --- what comes from other processes

    def contribution(self, source: int, head: Head, start: int, data: Tensor) -> Mean | None:
        """A piece of a contribution has arrived; return its mean unless that is finished here."""
        mean = self._current(head)
        if mean is not None:
            mean.early.append((source, head, start, data))
            self._take_early(mean)
        return mean

    def place(self, source: int, head: Head, *, is_gift: bool) -> Tensor | None:
        """Return the memory for a part of a mean, or for a gift, that comes without a room."""
        _, attempt = self._attempt(head, is_gift=is_gift)
        if attempt is None:
            return None
        return raw(attempt.mean) if is_gift else attempt.part(source, attempt.mean)

    def landed(self, source: int, head: Head, *, is_gift: bool) -> Mean | None:
        """A part of a mean, or a gift, has arrived; return the mean if that finishes it."""
        mean, attempt = self._attempt(head, is_gift=is_gift)
        if mean is None or attempt is None:
            return None
        attempt.landed(source)
        is_finished = (is_gift or attempt.is_complete) and self.finish(mean, attempt)
        return mean if is_finished else None

    def hear(self, source: int, head: Head) -> None:
        group = self._group(head.group)
        group.hear(source, head.low)
        self._forget(group)

    # --- departures

    def depart(self, departure: Departure) -> tuple[list[Mean], Finished | None]:
        """Apply the next line of the log. Return which means to open again, and what to tell the
        others if the survivors have to settle first which of them has finished what."""
        self._departures.append(departure)
        again: list[Mean] = []
        if departure.is_arrival or departure.process not in self._beginners:
            return again, None
        for group in self._groups.values():
            for mean in group.open.values():
                if mean.attempt is not None and self._renew(mean):
                    mean.is_stopped = mean.is_stopped or not departure.is_clean
                    again.append(mean)
        if departure.is_clean:
            return again, None
        self._needed = len(self._departures)
        finished = {key: (of.low, frozenset(of.done)) for key, of in self._groups.items()}
        self.tell(self._rank, self._needed, finished)
        return again, finished

    def tell(self, source: int, epoch: int, finished: Finished) -> None:
        """A process says what it has finished, at an epoch."""
        if epoch > self._told.get(source, (0, finished))[0]:
            self._told[source] = (epoch, finished)

    def settle(self) -> tuple[list[Mean], list[Gift]]:
        """Once all survivors have told: which means to open again, and which to give away."""
        alive = self.alive
        is_told = all(self._told.get(peer, (0, None))[0] >= self._needed for peer in alive)
        if not is_told or self._settled == self._needed:
            return [], []
        self._settled = self._needed
        again: list[Mean] = []
        gifts: list[Gift] = []
        for group in self._groups.values():
            for mean in group.open.values():
                if mean.is_stopped and not self._holders(group, mean.number, alive):
                    mean.is_stopped = False
                    again.append(mean)
            for number, kept in group.kept.items():
                gifts += self._gifts(group, number, kept, alive)
        return again, gifts

    def _holders(self, group: MeanGroup, number: int, alive: Sequence[int]) -> list[int]:
        found: list[int] = []
        for peer in alive:
            low, done = self._told[peer][1].get(group.key, (0, frozenset[int]()))
            if number < low or number in done:
                found.append(peer)
        return found

    def _gifts(
        self, group: MeanGroup, number: int, mean: Tensor, alive: Sequence[int]
    ) -> list[Gift]:
        """Return the gifts of a mean, if this process is the first that has it."""
        holders = self._holders(group, number, alive)
        if not holders or holders[0] != self._rank:
            return []
        _, epoch = contributors_of(group.key, group.members, number, self._departures)
        head = Head(group.key, number, epoch, group.low)
        lacking = [peer for peer in group.members if peer in alive and peer not in holders]
        return [(peer, head, mean) for peer in lacking]

    # --- inside

    def _group(self, key: int) -> MeanGroup:
        return self._groups.setdefault(key, MeanGroup(key))

    def _mean(self, group: MeanGroup, number: int) -> Mean:
        return group.open.setdefault(number, Mean(group, number))

    def _current(self, head: Head) -> Mean | None:
        """Return the mean that a message belongs to, unless that is finished here."""
        group = self._group(head.group)
        return None if group.has_finished(head.number) else self._mean(group, head.number)

    def _attempt(self, head: Head, *, is_gift: bool) -> tuple[Mean | None, Attempt | None]:
        """Return the mean and the attempt that a message belongs to, unless the attempt is over.

        Only a stopped mean accepts a gift; another one may be receiving the same bytes in pieces.
        """
        mean = self._current(head)
        attempt = None if mean is None else mean.attempt
        is_due = mean is not None and mean.is_stopped == is_gift
        if attempt is None or attempt.epoch != head.attempt or not is_due:
            return mean, None
        return mean, attempt

    def _take_early(self, mean: Mean) -> None:
        """Use the early pieces of the present attempt, and keep those of later ones."""
        attempt, waiting = mean.attempt, mean.early
        if attempt is None:
            return
        mean.early = [message for message in waiting if message[1].attempt > attempt.epoch]
        for source, head, start, data in waiting:
            if head.attempt == attempt.epoch:
                attempt.contribution(source, head.room, start, data)

    def _renew(self, mean: Mean) -> bool:
        """Make the attempt that follows from the departures; return whether it is a new one."""
        group, number = mean.group, mean.number
        members, epoch = contributors_of(group.key, group.members, number, self._departures)
        if mean.attempt is not None and mean.attempt.epoch == epoch:
            return False
        if epoch and mean.value.is_cuda:
            mean.value = host_copy([mean.value])  # NCCL gives up; messages take over
        room = torch.empty_like(mean.value) if mean.value.is_cuda else host_empty(
            mean.value.numel(), mean.value.dtype, mean.home
        )  # fmt: skip
        mean.attempt = Attempt(epoch, members, self._rank, number, mean.value, room)
        self._take_early(mean)
        return True

    def _forget(self, group: MeanGroup) -> None:
        alive = self.alive
        group.forget([peer for peer in group.members if peer in alive and peer != self._rank])
