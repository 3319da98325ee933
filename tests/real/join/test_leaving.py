"""Leaving `with join(...)`: whatever is still on its way then, all workers get one model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.methods import parse_method
from gossamer.pending import Pending
from gossamer.real.join.joined_worker import coupled
from gossamer.real.transports.local import LocalStore, LocalTransport
from gossamer.real.transports.transport import Listener, Parts, StopToken, Window

SIZE = 3
STEPS = 3
LATE = (2, 0)
"""The pair whose last frames are held back until worker 1 has had an answer about the server."""
ABOUT_THE_SERVER = (b"flush", b"output 3")


class Network:
    """Keeps the order of each pair of processes, and nothing else."""

    def __init__(self) -> None:
        self.store = LocalStore()
        self.windows: dict[int, Tensor] = {}
        self.locks: dict[int, threading.RLock] = {}
        self.frames = {
            (source, to): SimpleQueue[bytearray | None]()
            for source in range(SIZE)
            for to in range(SIZE)
        }
        self.together = threading.Barrier(SIZE, timeout=100)
        self.is_holding = False
        self.asked = threading.Event()

    def deliver(self, source: int, to: int, listener: Listener) -> None:
        while (frame := self.frames[source, to].get()) is not None:
            if (source, to) == LATE and self.is_holding:
                self.asked.wait(100)
            listener.frame(source, memoryview(frame))
            if (source, to) == (1, 0) and frame.endswith(ABOUT_THE_SERVER):
                self.asked.set()


class Ordered(LocalTransport):
    """One process's connection to that network."""

    name = "ordered"
    size = SIZE
    torn_updates = 2

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.store = network, rank, network.store

    def open(
        self, windows: Mapping[int, Window], initial: Mapping[int, Tensor], listener: Listener,
        stop: StopToken,
    ) -> None:  # fmt: skip
        for end, value in initial.items():
            self.network.windows[end] = value.clone()
            self.network.locks[end] = threading.RLock()
        for source in range(SIZE):
            threading.Thread(
                target=self.network.deliver, args=(source, self.rank, listener), daemon=True
            ).start()
        self.network.together.wait()

    def send(self, to: int, parts: Parts) -> None:
        self.network.frames[self.rank, to].put(bytearray().join(parts))

    def window(self, end: int) -> Tensor:
        return self.network.windows[end]

    def guard(self, end: int) -> AbstractContextManager[Any]:
        return self.network.locks[end]

    def read(self, end: int) -> Pending[Tensor]:
        return Pending.resolved("read", self.network.windows[end])

    def all_reduce(self, tensors: Sequence[Tensor], members: Sequence[int]) -> Pending[None]:
        self.network.together.wait()
        return Pending.resolved("all_reduce", None)

    def close(self) -> None:
        for source in range(SIZE):
            self.network.frames[source, self.rank].put(None)


def loop(network: Network, rank: int, method: str, found: dict[int, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = Ordered(network, rank)
    with coupled(transport, model, optimizer, parse_method(method), steps=STEPS) as worker:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            if step == STEPS - 1:
                network.together.wait()
                network.is_holding = True
            worker.step()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found[rank] = (parameters, worker.coupling.session.summary())


@pytest.mark.parametrize("method", ["ssp:bound=8", "downpour:n_push=1,n_fetch=8"])
def test_every_worker_leaves_with_what_the_slowest_message_brought(method: str) -> None:
    """The last push of worker 2 reaches its server after all others have heard that worker 2 has
    ended, and after one of them was answered there."""
    network, found = Network(), dict[int, Any]()
    threads = [
        threading.Thread(target=loop, args=(network, rank, method, found), daemon=True)
        for rank in range(SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    first = found[0][0]
    assert all(torch.equal(first, found[rank][0]) for rank in range(SIZE))
    assert [summary["torn_updates"] for _, summary in found.values()] == [2] * SIZE
