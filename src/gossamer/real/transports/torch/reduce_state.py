"""The state of means over processes. Nothing here sends or receives; `reduce` does.

Every member of a mean owns a part of the vector. All send it their pieces of that part, it adds
them in order of rank, and sends the mean of its part to all. A short vector has one owner, another
one each time; of a very short one everybody sends everything to everybody, and nobody answers.

One mean at one process:

    early            Pieces of others may arrive before this process starts the mean.
      |  start
      v
    open             The attempt sends and adds up. A departure that changes the contributors
      |  ^  |        makes another attempt, in other memory: old pieces may still be landing.
      |  |  | a contributor dies, or leaves while it has means open
      |  |  v
      |  |  stopped  Every survivor tells every other one which means it has finished.
      |  |  |   |
      |  +--+   |    Nobody has this mean: the next attempt is opened.
      |         |    Somebody has it: the first who has it gives it to those who lack it.
      v         v
    finished         The mean is kept until all other members say that they have finished it too.

All survivors decide alike, because they read the same departures in the same order: the length of
that list, an epoch, is the name of the attempt that the last of them made necessary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.torch.departures import Departure
from gossamer.real.transports.torch.links import LinkStream
from gossamer.real.transports.torch.wire import PIECE, SLOT, host_copy, host_empty, raw

_FEW, _BY_EACH = 8, 1 << 16
"""Members up to which, and bytes to receive up to which, all add up everything by themselves."""
_BY_BOTH = 1 << 20
"""Bytes up to which two do: beyond it adding up takes longer than waiting for the other's half."""

Gift = tuple[int, "Head", Tensor]
"""A mean for a process that lacks it: to whom, the head of its message, the mean."""
Finished = Mapping[int, tuple[int, frozenset[int]]]
"""Which means a process has finished: in each group all numbers below the first, and the others."""


def key_of(members: Sequence[int]) -> int:
    """A number for a group that every process works out alike."""
    text = ",".join(map(str, members)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def contributors_of(
    key: int, members: Sequence[int], number: int, departures: Sequence[Departure]
) -> tuple[tuple[int, ...], int]:
    """Who takes part in a mean, and the epoch that last changed it.

    Who left after it had finished the mean stays in it, as its contribution has been sent; but not
    in a new attempt, to which it cannot contribute any more.
    """
    present, left, changed = set(members), set[int](), 0
    for epoch, departure in enumerate(departures, start=1):
        if departure.process not in present:
            continue
        if not departure.is_dead and departure.finished.get(str(key), 0) > number:
            left.add(departure.process)
            continue
        present -= left | {departure.process}
        left.clear()
        changed = epoch
    return tuple(sorted(present)), changed


def is_by_each(nbytes: int, members: int) -> bool:
    """Whether everybody sends its whole value to everybody: one way instead of there and back.

    Two have to send as many bytes either way, but each adds up everything. Three or more would send
    more bytes than by owners.
    """
    if members == 2:
        return nbytes <= _BY_BOTH
    return members <= _FEW and (members - 1) * nbytes <= _BY_EACH


def parts_of(length: int, size: int, members: Sequence[int], turn: int) -> dict[int, slice]:
    """Which elements each member adds up; dividing a short vector would cost more messages."""
    if length * size <= SLOT:
        return {members[turn % len(members)]: slice(0, length)}
    share = -(-length // len(members))
    starts = range(0, length, share)
    return {
        member: slice(start, min(length, start + share))
        for member, start in zip(members, starts, strict=False)
    }


class Attempt:
    """One try to make a mean, with certain contributors and in memory of its own."""

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
        """It sends, and adds up."""
        self.streams: dict[int, LinkStream] = {}
        """To whom the mean of our part is on its way."""
        self.rooms: dict[int, int] = {}
        """Where others have made room for the mean of our part."""
        self._rank = rank
        length, size = value.numel(), value.element_size()
        self.is_by_each = is_by_each(length * size, len(contributors))
        self._parts = {rank: slice(0, length)}
        if not self.is_by_each:
            self._parts = parts_of(length, size, contributors, turn)
        self._missing = set(self._parts)
        """The owners whose part of the mean is not here."""
        self._arrived: dict[int, dict[int, Tensor]] = {}
        """Contributions to our part, by first byte and source."""
        self._position = 0
        self._is_adding = False

    def part(self, owner: int, of: Tensor) -> Tensor:
        """The bytes that a member adds up; none where it owns nothing."""
        return raw(of[self._parts.get(owner, slice(0, 0))])

    def contributions(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each other owner what it is to add up, and the place of its part of the mean."""
        owners = self.others if self.is_by_each else self._parts
        for owner in owners:
            if owner != self._rank:
                body = raw(self.value) if self.is_by_each else self.part(owner, self.value)
                yield owner, body, self.part(owner, self.mean)

    def contribution(self, source: int, room: int, start: int, data: Tensor) -> None:
        self.rooms[source] = room
        self._arrived.setdefault(start, {})[source] = data

    def next_addition(self) -> tuple[Tensor, list[Tensor]] | None:
        """What is to be added up next, by the one who asks; he says `added` before anybody is given
        another piece, so pieces come into being in order."""
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
        """All of that owner's part of the mean is here."""
        self._missing.discard(owner)

    @property
    def is_complete(self) -> bool:
        return not self._missing


class Head(NamedTuple):
    """What a message says of the mean that it belongs to."""

    group: int
    number: int
    attempt: int
    low: int
    """Everything below this number is finished at the sender."""
    room: int = 0
    """Made by the sender of a contribution for the receiver's part of the mean."""


class Mean:
    """One mean of a group."""

    def __init__(self, group: MeanGroup, number: int) -> None:
        self.group = group
        self.number = number
        self.result: Pending[Tensor] = Pending("all_reduce")
        """The flat mean, which is only to be read."""
        self.value: Tensor
        """What this process contributes."""
        self.home = torch.device("cpu")
        """Where the caller's tensors are."""
        self.attempt: Attempt | None = None
        self.early: list[tuple[int, Head, int, Tensor]] = []
        self.is_stopped = False


class MeanGroup:
    """A set of members and the means that they take one after the other."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.members: tuple[int, ...] = ()
        self.started = 0
        self.low = 0
        """All means below this number are finished here."""
        self.done: set[int] = set()
        """Those above that are finished all the same."""
        self.open: dict[int, Mean] = {}
        self.kept: dict[int, Tensor] = {}
        """Means that another member may still lack."""
        self.by_nccl = -1
        """The last one that NCCL has made."""
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
            # NCCL makes one mean after the other: all members have begun this one, so they have
            # finished those before it, and have told nobody.
            self.kept.pop(self.by_nccl, None)
            self.by_nccl = number

    def hear(self, source: int, low: int) -> None:
        """Another member has finished everything below `low`."""
        self._heard[source] = max(low, self._heard.get(source, 0))

    def forget(self, others: Sequence[int]) -> None:
        """Let go of the means that all the others have."""
        floor = min((self._heard.get(member, 0) for member in others), default=self.low)
        for number in [number for number in self.kept if number < floor]:
            del self.kept[number]


class ReduceState:
    """All means of one process; to be used by one thread at a time."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._groups: dict[int, MeanGroup] = {}
        self._departures: list[Departure] = []
        self._told: dict[int, tuple[int, Finished]] = {}
        """What each process said last that it has finished, and at which epoch."""
        self._needed = 0
        """The last epoch that wants to know of all survivors what they have finished."""
        self._settled = 0

    @property
    def alive(self) -> list[int]:
        gone = {departure.process for departure in self._departures}
        return [process for process in range(self._size) if process not in gone]

    def head(self, mean: Mean, attempt: Attempt, room: int = 0) -> Head:
        return Head(mean.group.key, mean.number, attempt.epoch, mean.group.low, room)

    # --- what this process does

    def start(self, value: Tensor, home: torch.device, members: tuple[int, ...]) -> Mean:
        """This process's next mean with these members; it does not change the value any more."""
        group = self._group(key_of(members))
        group.members = members
        mean = self._mean(group, group.started)
        group.started += 1
        mean.value, mean.home = value, home
        self._renew(mean)
        return mean

    def opened(self, mean: Mean) -> Attempt | None:
        """The attempt that is to begin now, if it has not, and may."""
        attempt = mean.attempt
        if attempt is None or attempt.is_open or mean.is_stopped:
            return None
        if self._rank not in attempt.contributors:
            return None  # this process has left the sums, and leaves this one to the others
        attempt.is_open = True
        return attempt

    def finish(self, mean: Mean, attempt: Attempt, *, is_by_nccl: bool = False) -> bool:
        """All of that attempt is here; False where a departure has made another one necessary: then
        the others have been told that the mean is open here, and count on this process."""
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
        """A piece of a contribution; the mean that it belongs to, unless that is finished here."""
        mean = self._current(head)
        if mean is not None:
            mean.early.append((source, head, start, data))
            self._take_early(mean)
        return mean

    def place(self, source: int, head: Head, *, is_gift: bool) -> Tensor | None:
        """Where a part of a mean, or all of it, shall land that comes without a room."""
        _, attempt = self._attempt(head, is_gift=is_gift)
        if attempt is None:
            return None
        return raw(attempt.mean) if is_gift else attempt.part(source, attempt.mean)

    def landed(self, source: int, head: Head, *, is_gift: bool) -> Mean | None:
        """It is there; the mean if this finishes it."""
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
        """The next line of the log: which means to open again at once, and what to tell the others
        where it is to be settled first who has finished what."""
        self._departures.append(departure)
        again: list[Mean] = []
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
        """What a process has finished, as it knew that many departures."""
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
        """To whom this process gives a mean, if it is the first who has it."""
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
        """The mean that a message belongs to, unless it is finished here."""
        group = self._group(head.group)
        return None if group.has_finished(head.number) else self._mean(group, head.number)

    def _attempt(self, head: Head, *, is_gift: bool) -> tuple[Mean | None, Attempt | None]:
        """The attempt that a message belongs to, unless it is over.

        A gift is for those who were stopped; others may be getting the same piece by piece.
        """
        mean = self._current(head)
        attempt = None if mean is None else mean.attempt
        is_due = mean is not None and mean.is_stopped == is_gift
        if attempt is None or attempt.epoch != head.attempt or not is_due:
            return mean, None
        return mean, attempt

    def _take_early(self, mean: Mean) -> None:
        """Use what has come for the attempt that stands; keep what is for a later one."""
        attempt, waiting = mean.attempt, mean.early
        if attempt is None:
            return
        mean.early = [message for message in waiting if message[1].attempt > attempt.epoch]
        for source, head, start, data in waiting:
            if head.attempt == attempt.epoch:
                attempt.contribution(source, head.room, start, data)

    def _renew(self, mean: Mean) -> bool:
        """Make the attempt that the departures want; whether it is another one."""
        group, number = mean.group, mean.number
        members, epoch = contributors_of(group.key, group.members, number, self._departures)
        if mean.attempt is not None and mean.attempt.epoch == epoch:
            return False
        if epoch and mean.value.is_cuda:
            mean.value = host_copy([mean.value])  # NCCL was to make it; now it goes by messages
        room = torch.empty_like(mean.value) if mean.value.is_cuda else host_empty(
            mean.value.numel(), mean.value.dtype, mean.home
        )  # fmt: skip
        mean.attempt = Attempt(epoch, members, self._rank, number, mean.value, room)
        self._take_early(mean)
        return True

    def _forget(self, group: MeanGroup) -> None:
        alive = self.alive
        group.forget([peer for peer in group.members if peer in alive and peer != self._rank])
