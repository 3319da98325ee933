"""A mean that is made once for all: the same bits whoever makes which part of it, dead or alive."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from gossamer.real.transports.shm import making, means
from gossamer.real.transports.shm.board import Board
from gossamer.real.transports.shm.layout import lay_out
from gossamer.real.transports.shm.making import Making
from gossamer.real.transports.shm.memory import Memory
from gossamer.real.transports.shm.operation import Kind, Operation
from gossamer.real.transports.shm.segments import Control
from gossamer.rules import mean_in_order

MEMBERS = (0, 1, 2)


class Register:
    """Who takes no part in sums any more, as the control memory would say."""

    def __init__(self) -> None:
        self.out_of_sums: set[int] = set()

    def is_out_of_sums(self, process: int) -> bool:
        return process in self.out_of_sums


class Group:
    """Three processes that have all posted, in this one."""

    def __init__(self, count: int, files: list[int]) -> None:
        layouts = [lay_out(rank, len(MEMBERS), {}) for rank in MEMBERS]
        self.boards = {rank: Board(Memory(files[rank], layouts[rank].total), layouts[rank])
                       for rank in MEMBERS}  # fmt: skip
        self.register = Register()
        self.values = [torch.randn(count) for _ in MEMBERS]
        self.operations: list[Operation] = []
        self.makings: list[Making] = []
        for rank in MEMBERS:
            board, value = self.boards[rank], self.values[rank]
            operation = Operation(Kind(MEMBERS, rank, count, value.dtype), 0, value)
            operation.cell = 5
            board.offsets[5] = layouts[rank].reductions
            board.memory.tensor(board.offsets[5], count, value.dtype).copy_(value)
            operation.found = dict.fromkeys(MEMBERS, 5)
            self.operations.append(operation)
            self.makings.append(Making(rank, self.boards, cast(Control, self.register)))

    def make(self, rank: int, *, is_last: bool = False) -> bool:
        return self.makings[rank].make(self.operations[rank], is_last=is_last)

    def is_over(self, rank: int) -> bool:
        return self.makings[rank].is_over(self.operations[rank])

    def check(self) -> None:
        """Everybody finds the whole mean, to the bit."""
        expected = mean_in_order(self.values)
        for rank in MEMBERS:
            assert self.is_over(rank)
            assert torch.equal(self.result(rank), expected)

    def result(self, rank: int) -> torch.Tensor:
        """Behind what the first contributor put in."""
        operation, memory = self.operations[rank], self.boards[MEMBERS[0]].memory
        place = Making.result_at(operation, self.boards[MEMBERS[0]].offsets[5])
        return memory.tensor(place, operation.kind.count, operation.kind.dtype)


@pytest.fixture(params=[1, 2, 3, 8])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(making, "_PARTS", request.param)
    monkeypatch.setattr(making, "_ALL", (1 << request.param) - 1)
    return request.param


@pytest.fixture
def files() -> Iterator[list[int]]:
    found = [os.memfd_create("test") for _ in MEMBERS]
    for file in found:
        os.ftruncate(file, lay_out(0, len(MEMBERS), {}).total)
    yield found
    for file in found:
        os.close(file)


@pytest.mark.parametrize("count", [1, 1000, 5000, 30_001])
def test_one_that_is_alone_makes_all(count: int, parts: int, files: list[int]) -> None:
    group = Group(count, files)
    assert not any(group.is_over(rank) for rank in MEMBERS)
    assert group.make(2, is_last=True)
    group.check()
    assert not group.make(0), "there is nothing left to make"


def test_who_waits_begins_elsewhere_than_who_came_last(parts: int, files: list[int]) -> None:
    group = Group(20_000, files)
    orders = [group.makings[rank]._order for rank in MEMBERS]
    for order in orders:
        assert sorted(order) == list(range(parts))
        assert order[-1] == 0
    if parts > len(MEMBERS):
        assert len({order[0] for order in orders}) == len(MEMBERS), "each begins at another"


def test_what_somebody_alive_is_at_is_left_to_it(parts: int, files: list[int]) -> None:
    group = Group(20_000, files)
    group.boards[1].working[5] = 1
    assert group.make(0) == (parts > 1)
    assert not group.is_over(0)
    group.makings[1]._make_part(group.operations[1], 0)
    group.boards[1].published[5] = 1
    group.check()


def test_what_a_dead_one_was_at_is_made_by_another(parts: int, files: list[int]) -> None:
    """And what it had made stays made, in its memory too."""
    group = Group(20_000, files)
    first: Any = group.makings[0]
    first._make_part(group.operations[0], 0)
    group.boards[0].published[5] = 1
    group.boards[0].working[5] = making._ALL
    assert group.make(1) is False
    group.register.out_of_sums.add(0)
    assert group.make(1) == (parts > 1)
    group.check()


def test_a_part_made_by_two_has_the_same_bits(parts: int, files: list[int]) -> None:
    group = Group(20_000, files)
    for rank in MEMBERS:
        for part in range(parts):
            group.makings[rank]._make_part(group.operations[rank], part)
        group.boards[rank].published[5] = making._ALL
    group.check()


def test_who_makes_a_part_again_changes_nothing_of_it(files: list[int]) -> None:
    """Two may take it at once; the one who is first says that it is there, and all read it while
    the other is still at it."""
    group = Group(100_000, files)
    group.make(0, is_last=True)
    expected, result = mean_in_order(group.values), group.result(0)
    is_over = threading.Event()

    def make_again() -> None:
        while not is_over.is_set():
            for part in range(making._PARTS):
                group.makings[1]._make_part(group.operations[1], part)

    others = [threading.Thread(target=make_again) for _ in range(2)]
    for other in others:
        other.start()
    wrong = sum(not torch.equal(result, expected) for _ in range(1000))
    is_over.set()
    for other in others:
        other.join()
    assert wrong == 0
    group.check()


@pytest.mark.parametrize("divisor", [1.0, 0.25, 0.5, 3.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_at_once_or_in_place_it_is_the_same_mean(count: int, divisor: float) -> None:
    """Also of one who is left, and had halved what it put in for two."""
    values = [torch.randn(150_000) for _ in range(count)]
    expected, result = torch.empty(150_000), torch.empty(150_000)
    means.mean(values, expected, divisor)
    means.mean_at_once(values, result, divisor)
    assert torch.equal(result, expected)


def test_who_fails_at_a_part_leaves_it_to_others(
    files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(20_000, files)
    with monkeypatch.context() as patch:
        patch.setattr(making, "mean_at_once", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            group.make(0)
    assert group.make(1)
    group.check()
