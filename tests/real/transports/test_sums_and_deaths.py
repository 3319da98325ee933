"""Means by messages, and deaths at chosen moments, over a network that the test moves by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.local import LocalStore
from gossamer.real.transports.torch.departures import DepartureLog
from gossamer.real.transports.torch.reduce import CONTRIBUTION, GIFT, MEAN, MessageAllReduce
from gossamer.real.transports.torch.wire import PIECE, SLOT
from gossamer.real.transports.transport import StopToken
from gossamer.rules import mean_in_order

SHORT = 10
LONG = 9 * PIECE // 4
"""Elements of which each of three owners has three pieces."""


@dataclass
class Message:
    """On its way, or being received: nothing behind it passes before its last byte has come."""

    sender: Process
    to: int
    kind: int
    head: bytes
    length: int
    room: int = 0
    pieces: deque[Tensor] = field(default_factory=deque[Tensor])
    received: int = 0
    pushed: int = 0

    def push(self, piece: Tensor) -> None:
        if self.room:
            target = self.sender.network[self.to].rooms[self.room]
            target[self.pushed : self.pushed + piece.numel()].copy_(piece)
        else:
            self.pieces.append(piece)
        self.pushed += piece.numel()
        if self.room and self.pushed == self.length:
            self.sender.lines[self.to].append(self)


class Process:
    """One process's means and its log of departures; what it sends stays until it is moved."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.size = network.size
        self.rooms: dict[int, Tensor] = {}
        self.lines = {peer: deque[Message]() for peer in range(self.size)}
        stop = StopToken()
        self.log = DepartureLog(
            network.store, lambda epoch, gone: self.sums.depart(epoch, gone), self.size, stop
        )
        self.sums = MessageAllReduce(cast(Any, self), self.log, stop)

    def __getitem__(self, peer: int) -> Line:
        return Line(self, peer)


@dataclass
class Line:
    """The link of a process to one of its peers."""

    process: Process
    to: int

    def expect(self, target: Tensor) -> int:
        rooms = self.process.rooms
        if target.numel() <= SLOT:
            return 0
        rooms[len(rooms) + 1] = target
        return len(rooms)

    def begin(self, kind: int, head: bytes, length: int, room: int = 0) -> Message:
        message = Message(self.process, self.to, kind, head, length, room)
        if not room:
            self.process.lines[self.to].append(message)
        return message

    def post(self, kind: int, head: bytes, body: Tensor) -> None:
        message = self.begin(kind, head, body.numel())
        for piece in body.split(PIECE):
            message.push(piece)


@dataclass
class Started:
    """A mean of one process; looking at it awaits it, so it must have been made."""

    tensors: list[Tensor]
    pending: Pending[None]
    sums: MessageAllReduce

    @property
    def is_made(self) -> bool:
        finish: Any = self.pending.settle
        return self.pending.done if finish is None else finish.args[0].done

    def result(self) -> Tensor:
        assert self.is_made
        if self.pending.settle is not None:
            self.pending.settle()
        self.pending.result()
        return torch.cat(self.tensors)


class Network:
    """Processes, and messages that move when they are told to."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        self.store = LocalStore()
        self.processes = [Process(self, rank) for rank in range(size)]
        self.dead: set[int] = set()

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def start_at(self, rank: int, number: int = 0, length: int = SHORT) -> Started:
        tensors = list(value_of(rank, length, number).split([1, length - 1]))
        sums = self[rank].sums
        return Started(tensors, sums.start(tensors, range(self.size)), sums)

    def start(self, number: int = 0, length: int = SHORT) -> list[Started]:
        return [self.start_at(rank, number, length) for rank in range(self.size)]

    def move(self, source: int, to: int) -> bool:
        """The next piece or end of that line, if there is any to be had."""
        line, sums = self[source].lines[to], self[to].sums
        if to in self.dead or not line:
            return False
        message = line[0]
        if not message.room and message.received < message.length:
            if not message.pieces:
                return False  # the rest was announced, and is being waited for
            piece = message.pieces.popleft().clone()
            if message.received == 0:
                self._place(message, source, piece)
            sums.piece(source, message.kind, message.head, message.received, piece)
            message.received += piece.numel()
            return True
        line.popleft()
        sums.end(source, message.kind, message.head)
        return True

    def _place(self, message: Message, source: int, piece: Tensor) -> None:
        sums = self[message.to].sums
        place = sums.place(source, message.kind, message.head, message.length)
        if place is not None:
            rest = [piece, *message.pieces]
            place.copy_(torch.cat(rest))

    def move_all(self, but: Sequence[tuple[int, int]] = ()) -> None:
        """Until nothing moves any more, except on these lines."""
        lines = [(a, b) for a in range(self.size) for b in range(self.size) if (a, b) not in but]
        while any(self.move(source, to) for source, to in lines):
            pass

    def kill(self, rank: int, noticed_by: int) -> None:
        """What it sent is lost, and one process notices."""
        self.dead.add(rank)
        for line in self[rank].lines.values():
            line.clear()
        self[noticed_by].log.died(rank)


def value_of(rank: int, length: int, number: int = 0) -> Tensor:
    return torch.full((length,), float(3**rank + number))


def mean_of(ranks: Sequence[int], length: int = SHORT, number: int = 0) -> Tensor:
    return mean_in_order([value_of(rank, length, number) for rank in ranks])


@pytest.mark.parametrize("knows", [False, True], ids=["who is late", "who knows"])
def test_an_owner_that_breaks_off_blocks_nobody_and_gives_no_wrong_mean(knows: bool) -> None:
    """A member died with one of its three pieces sent: of the mean that an owner has begun nothing
    counts, and nothing behind it waits for the rest; also where the death is not known yet."""
    network = Network()
    results = network.start(length=LONG)
    pieces = network[2].lines[0][0].pieces
    while len(pieces) > 1:
        pieces.pop()
    network[2].lines[1].clear()
    network.move_all()
    assert not any(message.kind == MEAN for message in network[0].lines[1])
    network.kill(2, noticed_by=0)
    if knows:
        network[1].log.catch_up(1)
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1], LONG))


def test_a_mean_that_a_death_overtakes_is_done_again_with_the_others() -> None:
    """Process 1 hears of the death before the last contribution, and says that the mean is open
    here: then it may not end it by itself, as process 0 counts on its contribution."""
    network = Network()
    results = network.start()
    network.move_all(but=[(2, 0), (2, 1)])
    late = list(network[2].lines[1])
    network.kill(2, noticed_by=1)
    network[2].lines[1].extend(late)  # it was in the receiver's buffers by then
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1]))


def test_a_mean_that_one_survivor_has_goes_to_the_others() -> None:
    """They all have the dead one's contribution in it, or none."""
    network = Network()
    results = network.start()
    network.move_all(but=[(2, 0)])
    assert results[1].is_made
    network.kill(2, noticed_by=0)
    network.move_all()
    assert torch.equal(results[0].result(), mean_of([0, 1, 2]))


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_gift_whose_giver_dies_counts_for_nothing(length: int) -> None:
    """The one survivor who had the mean dies while it gives it away: what came of it, before and
    after its death is known, is not counted, and the rest do the mean without it."""
    network = Network(size=4)
    results = network.start(length=length)
    if length == LONG:  # else everybody adds up for itself
        for to in (0, 1):
            while network[3].lines[to]:
                network.move(3, to)
    network.move_all(but=[(3, 0), (3, 1)])
    assert [result.is_made for result in results[:3]] == [False, False, True]
    network.kill(3, noticed_by=0)
    while not any(message.kind == GIFT for message in network[2].lines[0]):
        assert any(network.move(a, b) for a in range(3) for b in range(3) if (a, b) != (2, 0))
    while network[2].lines[0][0].kind != GIFT:
        network.move(2, 0)
    network.move(2, 0)
    late = list(network[2].lines[0])
    network.kill(2, noticed_by=1)
    network[0].log.catch_up(2)
    network[2].lines[0].extend(late)  # it was in the receiver's buffers by then
    while network.move(2, 0):
        pass
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1], length))


def test_what_comes_before_a_process_starts_is_kept() -> None:
    """The others are ahead by a whole mean."""
    network = Network()
    others = [network.start_at(rank) for rank in (0, 1)]
    network.move_all()
    last = network.start_at(2)
    network.move_all()
    for result in (*others, last):
        assert torch.equal(result.result(), mean_of([0, 1, 2]))


def test_what_comes_for_a_later_attempt_is_kept_until_the_death_is_known() -> None:
    """The store has died, so nobody can catch up: each hears of the death by itself."""
    network = Network()
    results = network.start(length=LONG)
    network[1].log._store = network[0].log._store = Gone()
    network.kill(2, noticed_by=0)
    network[0].sums._settle()
    kinds = {message.kind for message in network[0].lines[1]}
    network.move_all()
    assert CONTRIBUTION in kinds
    network[1].log.died(2)
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1], LONG))


class Gone(LocalStore):
    """A store whose host has been killed."""

    def agree(self, key: str, value: str) -> str:
        raise RuntimeError("connection reset by peer")

    def get(self, key: str) -> str | None:
        raise RuntimeError("connection reset by peer")


LENGTHS = [SHORT, SLOT, 1 << 17, 3 * PIECE // 8]
"""By each, by one owner or by parts, in one piece or two."""


@settings(max_examples=150)
@given(
    st.integers(2, 4), st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(1, 6)), max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3)), max_size=2),
)  # fmt: skip
def test_survivors_get_the_same_mean_whenever_members_die(
    size: int, lengths: list[int], moves: list[tuple[int, int, int]],
    deaths: list[tuple[int, int, int]],
) -> None:  # fmt: skip
    """Whatever moves in whatever order, and whoever dies at whatever moment: every survivor ends,
    all with the same bits, which are the mean over the survivors and perhaps some of the dead."""
    network = Network(size)
    started: dict[int, list[Started]] = {rank: [] for rank in range(size)}
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]

    def start_next(rank: int) -> None:
        number = len(started[rank])
        if number < len(lengths) and rank not in network.dead:
            started[rank].append(network.start_at(rank, number, lengths[number]))

    for moment, (which, starter, count) in enumerate([*moves, (0, 0, 0)]):
        start_next(starter % size)
        for _ in range(count):
            network.move(*pairs[which % len(pairs)])
        for when, victim, witness in deaths:
            alive = [rank for rank in range(size) if rank not in network.dead and rank != victim]
            if when == moment and victim < size and victim not in network.dead and alive:
                network.kill(victim, noticed_by=alive[witness % len(alive)])
    survivors = [rank for rank in range(size) if rank not in network.dead]
    for rank in survivors:
        for _ in lengths:
            start_next(rank)
    network.move_all()
    possible = [
        [rank for rank in range(size) if rank in survivors or chosen >> rank & 1]
        for chosen in range(1 << size)
    ]
    for number, length in enumerate(lengths):
        results = [started[rank][number].result() for rank in survivors]
        assert all(torch.equal(result, results[0]) for result in results)
        assert any(torch.equal(results[0], mean_of(who, length, number)) for who in possible)
