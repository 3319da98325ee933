"""A combined gradient that is read where it lies: the same step, and nothing moves under it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_shm_parts import NoStore
from torch import Tensor, nn

from gossamer.real.join.binding import Binding
from gossamer.real.join.descent import Descent
from gossamer.real.join.replica import LoopReplica
from gossamer.real.transports.conformance.tools import FrameRecorder
from gossamer.real.transports.shm import ShmTransport, create_segments, operation
from gossamer.real.transports.transport import StopToken, Window
from gossamer.rules import mean_in_order

COUNT = 40_000
MEMBERS = range(3)


class Loop:
    """A model of two parameters whose gradients are random."""

    def __init__(self, seed: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(count: int) -> Tensor:
            return torch.randn(count, generator=generator)

        self.parameters = [nn.Parameter(drawn(COUNT - 10)), nn.Parameter(drawn(10))]
        self.optimizer = optimizer(self.parameters, lr=0.1)
        self.descent = Descent(self.optimizer, self.parameters)
        self.binding = Binding([(str(number), p) for number, p in enumerate(self.parameters)])
        self.window = self.binding.initial()
        self.binding.attach(self.window, is_private=False)
        for parameter in self.parameters:
            parameter.grad = drawn(parameter.numel())

    @property
    def gradient(self) -> Tensor:
        """What the `.grad`s hold."""
        return torch.cat([p.grad for p in self.parameters if p.grad is not None])

    def after_a_step_along(self, gradient: Tensor) -> Tensor:
        """What an optimiser of torch makes of this model."""
        twins = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
        for twin, piece in zip(twins, self.binding.cut(gradient), strict=True):
            twin.grad = piece.clone()
        type(self.optimizer)(twins, lr=0.1).step()  # type: ignore[call-arg]
        return torch.cat([twin.detach() for twin in twins])


class Lender:
    """Somebody's memory, and how often it was given back."""

    def __init__(self, loop: Loop) -> None:
        self.value = torch.randn(COUNT, generator=torch.Generator().manual_seed(9))
        self.returns = 0
        edition = loop.binding.new_gradient().edition
        pieces = loop.binding.cut(self.value)
        assert loop.binding.lend_gradient(edition, pieces, self._take_back)

    def _take_back(self) -> None:
        self.returns += 1


def test_sgd_descends_along_what_is_lent_and_copies_nothing() -> None:
    loop = Loop(1, torch.optim.SGD)
    lender, own = Lender(loop), loop.gradient
    expected, lent = loop.after_a_step_along(lender.value), lender.value.clone()
    loop.binding.descend(loop.descent, nullcontext())
    assert torch.equal(loop.window, expected)
    assert torch.equal(loop.gradient, own)
    assert torch.equal(lender.value, lent)
    assert lender.returns == 0  # until the step is over: a method may look at it again
    loop.binding.let_go()
    loop.binding.new_gradient()
    assert lender.returns == 1


def test_another_optimiser_finds_it_in_the_gradients() -> None:
    loop = Loop(2, torch.optim.Adam)
    lender = Lender(loop)
    expected = loop.after_a_step_along(lender.value)
    loop.binding.descend(loop.descent, nullcontext())
    assert torch.equal(loop.window, expected)
    assert torch.equal(loop.gradient, lender.value)
    assert lender.returns == 1


@pytest.mark.parametrize("has_descended", [False, True])
def test_whoever_looks_at_the_gradient_sees_what_is_lent(has_descended: bool) -> None:
    loop = Loop(3, torch.optim.SGD)
    lender = Lender(loop)
    if has_descended:
        loop.binding.descend(loop.descent, nullcontext())
    assert torch.equal(loop.binding.flat_gradient(), lender.value)
    target = torch.empty(COUNT)
    loop.binding.write_gradient(loop.binding.cut(target), 0.5)
    assert torch.equal(target, lender.value / 2)
    assert lender.returns == 1


def test_what_is_lent_is_clipped_as_if_it_were_the_worker_s_own() -> None:
    loop = Loop(4, torch.optim.SGD)
    lender = Lender(loop)
    replica = LoopReplica(loop.binding, loop.window, loop.optimizer)
    replica.clip = 1.0
    before = loop.window.clone()
    replica.descend_(loop.binding._token)
    assert float((loop.window - before).norm()) == pytest.approx(0.1, rel=1e-4)
    assert float(lender.value.norm()) > 100.0
    assert lender.returns == 1


def test_what_is_lent_for_an_older_gradient_is_not_taken() -> None:
    loop = Loop(5, torch.optim.SGD)
    edition = loop.binding.new_gradient().edition
    loop.binding.new_gradient()
    pieces = loop.binding.cut(torch.zeros(COUNT))
    assert not loop.binding.lend_gradient(edition, pieces, lambda: None)


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ShmTransport]]:
    """Three transports that believe to share one processor."""
    monkeypatch.setattr(operation, "PROCESSORS", 1)
    segments = create_segments(len(MEMBERS))
    fds, segments.fds = segments.fds, ()
    transports = [
        ShmTransport(rank, len(MEMBERS), [os.dup(file) for file in fds], NoStore())
        for rank in MEMBERS
    ]
    for file in fds:
        os.close(file)
    windows = {rank: Window(COUNT, torch.float32, rank) for rank in MEMBERS}

    def open_one(rank: int) -> None:
        transports[rank].open(windows, {rank: torch.zeros(COUNT)}, FrameRecorder(), StopToken())

    in_all(open_one)
    yield transports
    for transport in transports:
        transport.close()


def in_all(action: Callable[[int], Any]) -> None:
    threads = [threading.Thread(target=action, args=(rank,)) for rank in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def reduce(transport: ShmTransport, value: Tensor, members: Any) -> Callable[[], Tensor]:
    """Its result, when it is asked for."""
    pending = transport.all_reduce(value, members)

    def result() -> Tensor:
        assert pending.settle is not None
        pending.settle()
        return pending.result()

    return result


def test_a_mean_that_is_lent_stays_until_it_is_given_back(trio: list[ShmTransport]) -> None:
    """Others may go on meanwhile, and take all places in turn, but not that one."""
    loops = [Loop(10 + rank, torch.optim.SGD) for rank in MEMBERS]
    mean = mean_in_order([loop.gradient for loop in loops])
    results = [reduce(trio[rank], loops[rank].binding.new_gradient(), MEMBERS) for rank in MEMBERS]
    for loop, result in zip(loops, results, strict=True):
        assert result() is loop.binding._token
    for loop in loops[:2]:
        loop.binding.let_go()
    for number in range(200):
        pair = [reduce(trio[rank], torch.full((COUNT,), number + 0.0), (0, 1)) for rank in (0, 1)]
        assert pair[0]()[-1] == pair[1]()[-1] == number
    last = loops[2]
    expected = last.after_a_step_along(mean)
    last.binding.descend(last.descent, nullcontext())
    assert torch.equal(last.window, expected)


def test_a_mean_made_in_another_thread_leaves_the_loop_s_gradients_alone(
    trio: list[ShmTransport],
) -> None:
    """The loop goes on meanwhile (`w.within`), and reads and writes them."""
    loops = [Loop(20 + rank, torch.optim.SGD) for rank in MEMBERS]
    own = [loop.gradient for loop in loops]
    results = [reduce(trio[rank], loops[rank].binding.new_gradient(), MEMBERS) for rank in MEMBERS]
    found: dict[int, Tensor] = {}
    in_all(lambda rank: found.update({rank: results[rank]()}))
    for rank, loop in enumerate(loops):
        assert torch.equal(found[rank], mean_in_order(own))
        assert loop.binding._lent is None
        assert torch.equal(loop.gradient, own[rank])


def test_who_gave_up_on_a_sum_is_out_of_it_before_its_room_is_used_again(
    trio: list[ShmTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trio[0]._reducing
    go_on, is_there, made = threading.Event(), threading.Event(), list[object]()
    wait = first._posts.wait

    def wait_and_linger(operation: Any) -> None:
        wait(operation)
        is_there.set()
        assert go_on.wait(20.0)

    monkeypatch.setattr(first._posts, "wait", wait_and_linger)
    monkeypatch.setattr(first, "_make", lambda *made_of, **_: made.append(made_of))
    pending = trio[0].all_reduce(torch.ones(COUNT), MEMBERS)
    assert pending.settle is not None
    settling = threading.Thread(target=pending.settle)
    settling.start()
    pending.cancel()
    others = [reduce(trio[rank], torch.ones(COUNT), MEMBERS) for rank in (1, 2)]
    assert [float(result().mean()) for result in others] == [1.0, 1.0]
    assert is_there.wait(20.0)
    (operation,) = first._posted
    first._reclaim()
    assert not first._is_finished(operation)
    go_on.set()
    settling.join()
    assert made == []
    first._reclaim()
    assert first._is_finished(operation)
