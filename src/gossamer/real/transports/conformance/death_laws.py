"""The laws in which processes die or stop. Each needs a group of processes of its own.

A victim ends by SIGKILL, as `Scenario.victims` announces. The harness expects that, and reports it
to the transport as a launcher would.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import PeerLost
from gossamer.real.transports.conformance.tools import (
    WIDTH,
    Tools,
    mean_of,
    raises,
    scenario,
    values_of,
)
from gossamer.real.transports.transport import Stopped, Transport
from gossamer.rules import mean_in_order

VICTIM = 1
SURVIVORS = (0, 2)


def check_mean(mean: Tensor, count: int, operation: int) -> None:
    """The mean must be that of all processes or that of the survivors."""
    survivors = mean_in_order([values_of(member, count, operation) for member in SURVIVORS])
    everybody = mean_in_order([values_of(member, count, operation) for member in range(3)])
    assert torch.equal(mean, survivors) or torch.equal(mean, everybody)


def survivors_reduce(transport: Transport, rank: int, tools: Tools, first: int) -> None:
    """Further all-reduces over all processes must give the mean of the survivors."""
    for operation in range(first, first + 3):
        count = 1 + 999 * (operation % 2)
        mean = tools.wait(mean_of(transport, values_of(rank, count, operation), range(3)))
        theirs = [values_of(member, count, operation) for member in SURVIVORS]
        assert torch.equal(mean, mean_in_order(theirs))
    tools.barrier("survived", len(SURVIVORS))


@scenario(victims=[VICTIM])
def scenario_a_death_is_noticed_and_survived(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """All hear of a death once and soon. Sends to the dead fail, and sends to the living arrive."""
    tools.wait(mean_of(transport, values_of(rank, 10), range(size)))
    if rank == VICTIM:
        tools.die()
    tools.notices_death(VICTIM)
    with raises(PeerLost):
        transport.send(VICTIM, [b"anybody there?"])
    other = 2 - rank
    transport.send(other, [b"still here"])
    assert tools.recorder.take(other) == b"still here"
    survivors_reduce(transport, rank, tools, first=1)


@scenario(victims=[VICTIM])
def scenario_a_death_while_others_wait_in_an_all_reduce(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Processes that wait for a dead one go on without it."""
    if rank == VICTIM:
        tools.wait_for_arrivals("waiting", len(SURVIVORS))
        tools.die()
    pending = mean_of(transport, values_of(rank, 50_000), range(size))
    tools.arrive("waiting")
    mean = tools.wait(pending)
    assert torch.equal(mean, mean_in_order([values_of(member, 50_000) for member in SURVIVORS]))
    tools.notices_death(VICTIM)
    survivors_reduce(transport, rank, tools, first=1)


@scenario(victims=[VICTIM])
def scenario_a_death_between_starting_and_finishing_an_all_reduce(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The contribution of the dead process counts for all survivors or for none."""
    if rank == 0:  # the last to start, so that nobody can have finished before the death
        tools.notices_death(VICTIM)
    pending = mean_of(transport, values_of(rank, 50_000), range(size))
    if rank == VICTIM:
        tools.die()
    mean = tools.wait(pending)
    check_mean(mean, 50_000, 0)
    tools.everybody_agrees("mean", mean)
    tools.notices_death(VICTIM)
    survivors_reduce(transport, rank, tools, first=1)


@scenario(victims=[VICTIM])
def scenario_a_death_at_any_moment_of_many_all_reduces(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """In every operation all survivors get the same bits, with or without the dead one's share."""
    if rank == VICTIM:
        threading.Timer(0.05, tools.die).start()
    counts = [(1, 20_000, 333)[number % 3] for number in range(100)]
    for first in range(0, len(counts), 2):
        started = {
            number: mean_of(transport, values_of(rank, counts[number], number), range(size))
            for number in (first, first + 1)
        }
        for number, pending in started.items():
            mean = tools.wait(pending)
            check_mean(mean, counts[number], number)
            tools.everybody_agrees(f"mean {number}", mean)
    if rank == VICTIM:
        tools.die()
    tools.notices_death(VICTIM)
    survivors_reduce(transport, rank, tools, first=len(counts))


@scenario(victims=[VICTIM])
def scenario_a_death_inside_guard_blocks_nobody(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The others can use the window of the dead process or learn that it is lost. All other windows
    work as before."""
    if rank == VICTIM:
        with transport.guard(VICTIM):
            transport.window(VICTIM)[: WIDTH // 2].add_(1.0)
            tools.die()
    tools.notices_death(VICTIM)
    try:
        tools.wait(transport.accumulate(VICTIM, torch.ones(WIDTH)))
        tools.wait(transport.average(rank, VICTIM))
    except PeerLost:
        pass  # in this transport windows die with their process
    tools.barrier("tried", len(SURVIVORS))
    with transport.guard(rank):
        transport.window(rank).zero_()
    tools.barrier("cleared", len(SURVIVORS))
    for end in SURVIVORS:
        tools.wait(transport.accumulate(end, torch.ones(WIDTH)))
    tools.barrier("added", len(SURVIVORS))
    for end in SURVIVORS:
        assert torch.equal(tools.wait(transport.read(end)), torch.full((WIDTH,), 2.0))
    tools.barrier("read", len(SURVIVORS))


class Deadly(Tensor):
    """A tensor that kills the process which adds it to something."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "add_":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__torch_function__(function, types, args, kwargs)


@scenario(victims=[VICTIM])
def scenario_a_death_inside_accumulate_blocks_nobody(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A process dies within an addition to shared memory; the others go on adding there."""
    if rank == VICTIM:
        transport.store.agree(tools.key("death"), repr(time.monotonic()))
        transport.accumulate(0, torch.ones(WIDTH).as_subclass(Deadly))
        tools.die()
    tools.notices_death(VICTIM)
    for _ in range(10):
        tools.wait(transport.accumulate(0, torch.ones(WIDTH)))
    tools.barrier("added", len(SURVIVORS))
    seen = tools.wait(transport.read(0)).clone()
    assert bool(((seen == 20.0) | (seen == 21.0)).all())  # each element without or with its share
    # In shared memory the addition was interrupted, and exactly one process noticed.
    torn = sum(tools.exchange("torn", rank, transport.torn_updates, SURVIVORS))
    assert torn == (transport.name == "shm")
    tools.barrier("read", len(SURVIVORS))


@scenario(victims=[VICTIM])
def scenario_a_death_amid_additions_loses_nothing_of_the_others(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A process dies while all processes add to one window again and again."""
    if rank == VICTIM:
        threading.Timer(0.05, tools.die).start()
    mine = 0
    while rank == VICTIM or mine % 10 or transport.lost == frozenset():
        tools.wait(transport.accumulate(0, torch.ones(WIDTH)))
        mine += 1
    added = sum(tools.exchange("added", rank, mine, SURVIVORS))
    seen = tools.wait(transport.read(0)).clone()
    assert bool((seen >= added).all())
    assert float(seen.max() - seen.min()) <= 1.0  # at most one addition stopped half-way
    tools.barrier("read", len(SURVIVORS))


@scenario(victims=[VICTIM])
def scenario_a_frame_cut_short_by_death_is_never_delivered(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """All frames of the dead process that arrive are whole. Frames of others arrive as before."""
    length, frames = 3_000_000, 8
    arrived: list[tuple[int, bool]] = []

    def remember(source: int, content: bytes) -> bool:
        if source != VICTIM:
            return False
        arrived.append((content[0], content == content[:1] * length))
        if len(arrived) == 1 and rank == 0:
            transport.send(VICTIM, [b"the first is here"])
        return True

    if rank != VICTIM:
        tools.recorder.answer = remember
    tools.barrier("ready")
    if rank == VICTIM:
        for number in range(frames):
            for to in SURVIVORS:
                transport.send(to, [bytes([number]) * length])
        tools.recorder.take(0)
        tools.die()
    tools.notices_death(VICTIM)
    transport.send(2 - rank, [b"after"])
    assert tools.recorder.take(2 - rank) == b"after"
    assert arrived == [(number, True) for number in range(len(arrived))]
    tools.barrier("heard", len(SURVIVORS))


@scenario(size=2, apart=True)
def scenario_a_process_that_closes_is_gone_but_not_dead(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The last frames of a closed process arrive, no process is reported lost, and a second `close`
    does nothing."""
    if rank == 1:
        transport.send(0, [bytes(2_000_000)])
        transport.close()
    else:
        assert tools.recorder.take(1) == bytes(2_000_000)
        assert transport.lost == frozenset()
        assert tools.recorder.reports == []
    tools.barrier("said")
    transport.close()


@scenario(size=2, apart=True)
def scenario_a_stop_ends_a_wait_in_an_all_reduce(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A wait raises `Stopped` soon after the token is set."""
    if rank == 0:
        pending = mean_of(transport, torch.ones(1000), range(size))
        threading.Timer(0.05, tools.stop.set).start()
        started = time.monotonic()
        with raises(Stopped):
            tools.wait(pending)
        assert time.monotonic() - started < 1.05
        tools.arrive("stopped")
    else:
        tools.wait_for_arrivals("stopped", 1)


@scenario(size=2, apart=True)
def scenario_a_stop_ends_a_wait_for_a_window(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A wait for a window that its owner guards ends soon after the token is set."""
    if rank == 1:
        with transport.guard(1):
            tools.arrive("guarded")
            tools.wait_for_arrivals("stopped", 1)
        return
    tools.wait_for_arrivals("guarded", 1)
    threading.Timer(0.05, tools.stop.set).start()
    started = time.monotonic()
    with raises(Stopped):
        tools.wait(transport.accumulate(1, torch.ones(WIDTH)))
    assert time.monotonic() - started < 1.05
    tools.arrive("stopped")
