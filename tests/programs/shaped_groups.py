"""Runs groups of processes whose links are shaped, over shared memory and over Gloo; prints JSON.

    python tests/programs/shaped_groups.py '[["shm", "quick", 3, ["scenario_a", "scenario_b"]]]'

Beside the laws of every transport it knows those about time. The answer is one object per group:
how each process ended, and what it wrote. Started by `test_shaping.py`, which never imports this:
its scenarios would be everybody's.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import shm_groups
import torch_groups
from gossamer.config.faults import Fault
from gossamer.real.faults.fault_plan import FaultPlan
from gossamer.real.faults.shaped_links import ShapedTransport
from gossamer.real.transports.conformance.tools import (
    SERVER_WIDTH,
    WIDTH,
    Tools,
    mean_of,
    scenario,
    values_of,
)
from gossamer.real.transports.shm import ShmTransport
from gossamer.real.transports.torch import TorchTransport
from gossamer.real.transports.transport import Stopped, Transport
from gossamer.rules import mean_in_order
from programs import tell_groups

BYTES_S = 4e6
LATENCY_S = 0.02
SLOW = 1
"""The worker whose card is slow."""
LINKS = {
    "quick": FaultPlan(bandwidth=2e9, latency=1e-4),
    "slow": FaultPlan((Fault("slow-link", worker=SLOW, amount=100.0),), 100 * BYTES_S, LATENCY_S),
    "late": FaultPlan(latency=60.0),
}
SERVER_S = SERVER_WIDTH * 8 / BYTES_S
"""What the window of a server takes on the slow card."""


class Shaped:
    """Stands in for a transport's class."""

    def __init__(self, kind: type[ShmTransport] | type[TorchTransport], links: FaultPlan) -> None:
        self._kind = kind
        self._links = links

    def from_environment(self) -> ShapedTransport:
        return ShapedTransport(self._kind.from_environment(), self._links)


@scenario()
def scenario_a_slow_card_slows_its_own_reads_only(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A read takes two latencies and the bytes' time; one from elsewhere is there before it."""
    if rank == 0:
        began = time.monotonic()
        slow, quick = transport.read(size + SLOW), transport.read(size + 2)
        tools.wait(quick)
        assert not slow.done
        tools.wait(slow)
        assert time.monotonic() - began >= 2 * LATENCY_S + SERVER_S


@scenario()
def scenario_messages_of_one_worker_queue_on_its_card(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """The second of two, to another worker, comes after the time of both; small ones pass."""
    content = bytes(SERVER_WIDTH * 4)
    if rank == SLOW:
        stamp = repr(time.monotonic()).ljust(32).encode()
        for to in (0, 2, 0):
            transport.send(to, [stamp, content])
        transport.send(2, [stamp])
    else:
        for number in (1, 3) if rank == 0 else (2,):
            sent = float(tools.recorder.take(SLOW)[:32])
            took = time.monotonic() - sent
            assert took >= LATENCY_S + number * len(content) / BYTES_S
        if rank == 2:
            assert len(tools.recorder.take(SLOW)) == 32


@scenario()
def scenario_what_others_add_queues_on_the_card_it_comes_to(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Two workers add to a window at once: the later one is done after the time of both."""
    began = time.monotonic_ns()
    firsts = tools.exchange("began", rank, began, range(size))
    if rank != SLOW:
        ones = torch.ones(SERVER_WIDTH, dtype=torch.float64)
        adding = transport.accumulate(size + SLOW, ones)
        ones.zero_()  # the caller may reuse its memory at once
        tools.wait(adding)
    ended = tools.exchange("ended", rank, time.monotonic_ns(), range(size))
    assert (max(ended) - min(firsts)) * 1e-9 >= LATENCY_S + 2 * SERVER_S
    if rank == SLOW:
        assert torch.equal(transport.window(size + SLOW), torch.full((SERVER_WIDTH,), 2.0))
        transport.window(size + SLOW).zero_()


@scenario()
def scenario_an_average_goes_there_and_back(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    transport.window(rank).fill_(float(rank))
    tools.barrier("filled")
    if rank == 0:
        began = time.monotonic()
        tools.wait(transport.average(0, SLOW))
        assert time.monotonic() - began >= 2 * (LATENCY_S + WIDTH * 4 / BYTES_S)
        assert torch.equal(tools.wait(transport.read(SLOW)), torch.full((WIDTH,), 0.5))
    tools.barrier("averaged")


@scenario()
def scenario_a_sum_takes_the_time_of_a_ring(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """Of the slowest card among its members; the next one begins when it is done."""
    count = 60_000
    began = time.monotonic()
    started = [mean_of(transport, values_of(rank, count, op), range(size)) for op in range(2)]
    ring_s = 4 * (LATENCY_S + count * 4 / size / BYTES_S)
    for number, pending in enumerate(started):
        mean = tools.wait(pending)
        assert time.monotonic() - began >= (number + 1) * ring_s
        theirs = [values_of(member, count, number) for member in range(size)]
        assert torch.equal(mean, mean_in_order(theirs))


@scenario(apart=True)
def scenario_stopping_ends_all_waiting(
    transport: Transport, rank: int, size: int, tools: Tools
) -> None:
    """A read, an addition and a sum are minutes from their end, and nobody waits for it."""
    peer = (rank + 1) % size
    started = [
        transport.read(peer),
        transport.accumulate(peer, torch.ones(WIDTH)),
        mean_of(transport, torch.ones(10), range(size)),
    ]
    tools.barrier("begun")
    threading.Timer(0.1, tools.stop.set).start()
    for pending in started:
        with pytest.raises(Stopped):
            tools.wait(pending)


def run(kind: str, links: str, size: int, names: list[str], folder: Path) -> dict[str, object]:
    if kind == "shm":
        shm_groups.ShmTransport = Shaped(ShmTransport, LINKS[links])
        return shm_groups.run(size, names, folder)
    torch_groups.TorchTransport = Shaped(TorchTransport, LINKS[links])
    return torch_groups.run(size, names, {}, folder)


if __name__ == "__main__":
    tell_groups(run)
