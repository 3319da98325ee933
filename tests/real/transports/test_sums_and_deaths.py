"""Means by messages, and deaths at chosen moments, over a network that the test moves by hand."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.pending import Pending
from gossamer.real.transports.local import LocalStore
from gossamer.real.transports.torch.departures import Losses
from gossamer.real.transports.torch.engine import GroupEngine
from gossamer.real.transports.torch.pipeline import Making
from gossamer.real.transports.torch.reduction import MEAN, RESULT, Reduction
from gossamer.real.transports.torch.reduction_state import UNDER_WAY, Order, weight_of
from gossamer.real.transports.torch.wire import PIECE
from gossamer.real.transports.transport import StopToken
from gossamer.rules import mean_in_order

pytestmark = pytest.mark.timeout(20)

SHORT = 10
LONG = 9 * PIECE // 4
"""Elements of which each of three owners has three pieces."""


@dataclass
class Message:
    """On its way, or being received: nothing behind it passes before its last byte has come."""

    kind: int
    head: bytes
    length: int
    pieces: deque[Tensor] = field(default_factory=deque)
    received: int = 0
    pushed: int = 0
    is_broken_off: bool = False

    def push(self, piece: Tensor) -> None:
        self.pieces.append(piece)
        self.pushed += piece.numel()

    def abandon(self) -> None:
        self.is_broken_off = self.pushed < self.length
        while self.pushed < self.length:
            self.push(torch.zeros(min(PIECE, self.length - self.pushed), dtype=torch.uint8))


class Process:
    """One process's sums and its list of losses; what it sends stays until it is moved."""

    def __init__(self, network: Network, rank: int, engine: Any) -> None:
        self.rank = rank
        self.size = network.size
        self.lines = {peer: deque[Message]() for peer in range(self.size)}
        self.losses = Losses(
            network.store, lambda epoch, loss: self.sums.lost(epoch, loss), self.size, StopToken()
        )
        self.sums = Reduction(self, self.losses, engine)

    def begin(self, to: int, kind: int, head: bytes, length: int) -> Message:
        message = Message(kind, head, length)
        self.lines[to].append(message)
        return message

    def post(self, to: int, kind: int, head: bytes, body: Tensor | None = None) -> None:
        assert body is not None
        message = self.begin(to, kind, head, body.numel())
        for piece in body.split(PIECE):
            message.push(piece)


class Network:
    """Processes, and messages that move when they are told to."""

    def __init__(self, size: int = 3, engine: Any = None) -> None:
        self.size = size
        self.store = LocalStore()
        self.processes = [Process(self, rank, engine) for rank in range(size)]
        self.dead: set[int] = set()

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def start(self, number: int = 0, length: int = SHORT) -> list[Pending[Tensor]]:
        everybody = range(self.size)
        return [
            self[rank].sums.start(value_of(rank, length, number), everybody) for rank in everybody
        ]

    def move(self, source: int, to: int) -> bool:
        """The next piece or end of that line, if there is any to be had."""
        line, sums = self[source].lines[to], self[to].sums
        if to in self.dead or not line:
            return False
        message = line[0]
        if message.received < message.length:
            if not message.pieces:
                return False  # the rest was announced, and is being waited for
            piece = message.pieces.popleft().clone()
            place = sums.place(source, message.kind, message.head, message.length)
            if place is not None and message.received == 0 and len(place) == len(piece):
                piece = place.copy_(piece)
            sums.piece(source, message.kind, message.head, message.received, piece)
            message.received += piece.numel()
            return True
        line.popleft()
        if not message.is_broken_off:
            sums.end(source, message.kind, message.head)
        return True

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
        self[noticed_by].losses.died(rank)


def value_of(rank: int, length: int, number: int = 0) -> Tensor:
    return torch.full((length,), float(3**rank + number))


def mean_of(ranks: Sequence[int], length: int = SHORT, number: int = 0) -> Tensor:
    return mean_in_order([value_of(rank, length, number) for rank in ranks])


def with_a_death_before_its_end(process: Process, die: Callable[[], None]) -> None:
    """What another receiving thread can do between the last piece of a sum and its end."""
    finish = process.sums._finish

    def late(*arguments: Any, **options: Any) -> None:
        process.sums._finish = finish
        die()
        finish(*arguments, **options)

    process.sums._finish = late


@pytest.mark.parametrize("knows", [False, True], ids=["who is late", "who knows"])
def test_an_owner_that_breaks_off_blocks_nobody_and_gives_no_wrong_mean(knows: bool) -> None:
    """A member died with one of its three pieces sent: what was announced of the means comes to
    its end, or everything behind it would be waited for; and whoever does not know of the death yet
    takes nothing of it."""
    network = Network()
    results = network.start(length=LONG)
    pieces = network[2].lines[0][0].pieces
    while len(pieces) > 1:
        pieces.pop()
    network[2].lines[1].clear()
    network.move_all()
    announced = network[0].lines[1][0]
    assert (announced.kind, announced.received, announced.length) == (MEAN, PIECE, 3 * PIECE)
    network.kill(2, noticed_by=0)
    if knows:
        network[1].losses.catch_up(1)
    while network[0].lines[1][0] is announced:
        assert network.move(0, 1)
    assert not results[1].done
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1], LONG))


def test_a_sum_that_a_death_overtakes_is_done_again_with_the_others() -> None:
    """Process 1 has all pieces, hears of the death and says that the sum is open here: then it may
    not end it by itself, as process 0 counts on its share."""
    network = Network()
    with_a_death_before_its_end(network[1], lambda: network.kill(2, noticed_by=1))
    results = network.start()
    network.move_all(but=[(2, 0)])
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1]))


def test_a_sum_of_an_engine_that_a_death_overtakes_is_done_again() -> None:
    """The engine's last word comes when the others have been told that the sum is open here."""
    orders: list[Order] = []
    network = Network(engine=Engine(orders))
    with_a_death_before_its_end(network[1], lambda: network.kill(2, noticed_by=1))
    results = network.start()
    fulfil(orders[1], mean_of([0, 1, 2]))
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1]))
    fulfil(orders[0], mean_of([0, 1, 2]))
    assert torch.equal(results[0].result(), mean_of([0, 1]))


def test_a_mean_that_one_survivor_has_goes_to_the_others() -> None:
    """They all have the dead one's share in it, or none."""
    network = Network()
    results = network.start()
    network.move_all(but=[(2, 0)])
    assert results[1].done
    network.kill(2, noticed_by=0)
    network.move_all()
    assert torch.equal(results[0].result(), mean_of([0, 1, 2]))


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_a_gift_whose_giver_dies_counts_for_nothing(length: int) -> None:
    """The one survivor who had the mean dies while it gives it away: what came of it, before and
    after its death is known, is not counted, and the rest do the sum without it."""
    network = Network(size=4)
    results = network.start(length=length)
    if length == LONG:  # else everybody adds up for itself
        for to in (0, 1):
            while network[3].lines[to]:
                network.move(3, to)
    network.move_all(but=[(3, 0), (3, 1)])
    assert [result.done for result in results[:3]] == [False, False, True]
    network.kill(3, noticed_by=0)
    while not any(message.kind == RESULT for message in network[2].lines[0]):
        assert any(network.move(a, b) for a in range(3) for b in range(3) if (a, b) != (2, 0))
    while network[2].lines[0][0].kind != RESULT:
        network.move(2, 0)
    network.move(2, 0)
    late = list(network[2].lines[0])
    network.kill(2, noticed_by=1)
    network[0].losses.catch_up(2)
    network[2].lines[0].extend(late)  # it was in the receiver's buffers by then
    while network.move(2, 0):
        pass
    network.move_all()
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1], length))


class Engine:
    """Keeps orders, so that the test makes their means when it likes."""

    is_on_gpu = False

    def __init__(self, orders: list[Order]) -> None:
        self._orders = orders

    def __call__(self, order: Order) -> None:
        self._orders.append(order)


def fulfil(order: Order, mean: Tensor) -> None:
    order.target.copy_(mean)
    order.landed(slice(0, len(mean)))
    order.finished(None)


def test_pieces_that_an_engine_lands_after_a_death_change_nothing() -> None:
    """Its memory is not the renewed sum's, and neither is the result."""
    orders: list[Order] = []
    network = Network(engine=Engine(orders))
    results = network.start()
    network.kill(2, noticed_by=0)
    orders[0].target.fill_(7.0)
    orders[0].landed(slice(0, SHORT))
    network.move_all()
    orders[0].finished(None)
    for result in results[:2]:
        assert torch.equal(result.result(), mean_of([0, 1]))


def test_an_engine_does_not_begin_what_a_death_has_changed() -> None:
    """The others conclude from what it begins that everything before is finished here, and forget
    those means; process 1, which did not finish the first, would never get it."""
    orders: list[Order] = []
    network = Network(engine=Engine(orders))
    first, second = network.start(number=0), network.start(number=1)
    fulfil(orders[0], mean_of([0, 1, 2]))
    network[1].losses.died(2)
    made, over = SimpleQueue[Order](), SimpleQueue[bool]()

    def make(group: None, order: Order) -> Making:
        made.put(order)
        yield

    engine = GroupEngine("Test", lambda members: None, make, is_on_gpu=False)
    for order in (orders[1], orders[4]):
        engine(order)
    engine(orders[1]._replace(is_wanted=lambda: True, finished=over.put))
    over.get(timeout=10)
    assert made.qsize() == 1
    network.dead.add(2)
    network.move_all()
    assert torch.equal(first[1].result(), mean_of([0, 1, 2]))
    assert torch.equal(second[1].result(), mean_of([0, 1], number=1))


def test_what_went_by_messages_is_kept_though_an_engine_has_gone_on() -> None:
    """Its order says nothing about them: process 0 lacks the first mean, of a value that the engine
    was not for, when all have finished the second."""
    orders: list[Order] = []
    engine = Engine(orders)
    network = Network(engine=engine)
    engine.is_on_gpu = True
    first = network.start(number=0)
    network.move_all(but=[(2, 0)])
    engine.is_on_gpu = False
    network.start(number=1)
    for order in orders:
        fulfil(order, mean_of([0, 1, 2], number=1))
    network.kill(2, noticed_by=0)
    network.move_all()
    assert torch.equal(first[0].result(), mean_of([0, 1, 2]))


def test_of_an_engines_means_those_are_kept_that_another_may_still_be_making() -> None:
    """All have begun the last one: before it only so much can be unfinished anywhere."""
    orders: list[Order] = []
    network = Network(engine=Engine(orders))
    count = 3 + UNDER_WAY // weight_of(SHORT)
    for number in range(count):
        network.start(number=number)
    for place, order in enumerate(orders):
        fulfil(order, mean_of([0, 1, 2], number=place // 3))
    (group,) = network[0].sums._groups.values()
    assert list(group.kept) == list(range(2, count))


class Connections:
    """A group of an engine."""


def test_an_engine_lets_go_of_the_groups_of_the_dead() -> None:
    """Others may wait for it there; groups of the living stay until it is closed."""
    made: dict[tuple[int, ...], weakref.ref[Connections]] = {}
    over = SimpleQueue[BaseException | None]()

    def make(members: tuple[int, ...]) -> Connections:
        group = Connections()
        made[members] = weakref.ref(group)
        return group

    def fulfil(group: Connections, order: Order) -> Making:
        yield

    engine = GroupEngine("Test", make, fulfil, is_on_gpu=False)
    nothing, groups = torch.zeros(1), [(0, 1), (0, 1, 2)]
    for members in groups:
        engine(Order(members, nothing, nothing, lambda: True, lambda part: None, over.put))
        assert over.get(timeout=10) is None
    engine.lost(2)
    engine._groups[0, 1, 2].join(time.monotonic() + 10)
    assert [made[members]() is None for members in groups] == [False, True]
    engine.close(10)
    assert made[0, 1]() is None
