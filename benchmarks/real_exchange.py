"""Moving one replica of 45 MB, beside the fastest that the engine underneath can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from real_loops import get, own_window
from real_models import REPLICA_NUMEL
from timing import synchronise

from gossamer.pending import Pending
from gossamer.real.driver import Driver
from gossamer.real.join.joined_worker import JoinedWorker
from gossamer.real.transports.transport import StopToken


def exchange_times(worker: JoinedWorker, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of worker 0, by what was done, in rounds that do each once.

    The other worker's program does nothing meanwhile, except for its part of the raw exchange.
    """
    coupling = worker.coupling
    assert coupling is not None
    driver = Driver(StopToken())
    transport, replica = coupling.session.transport, coupling.replica
    mine, theirs = (torch.ones(REPLICA_NUMEL, device=replica.window.device) for _ in range(2))

    def done(pending: Pending[Any]) -> Any:
        driver.wait(pending)
        return pending.result()

    of_both = _raw(transport.name, worker.rank, mine, theirs)
    works: dict[str, Callable[[], object]] = {
        "lerp": lambda: mine.lerp_(theirs, 0.5),
        "read": lambda: done(transport.read(1)),
        "pull": lambda: replica.mix_(done(transport.read(1)), 0.5),
        "average": lambda: done(transport.average(0, 1)),
    }
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, (by_first, by_second) in of_both.items():
            taken = _milliseconds(by_first if worker.rank == 0 else by_second)
            if number > 0:
                found.setdefault(name, []).append(taken)
        if worker.rank == 0:
            for name, work in works.items():
                taken = _milliseconds(work)
                if number > 0:
                    found.setdefault(name, []).append(taken)
    return found


def _milliseconds(work: Callable[[], object]) -> float:
    synchronise()
    began = time.perf_counter_ns()
    work()
    synchronise()
    return (time.perf_counter_ns() - began) / 1e6


def _nothing() -> None:
    pass


Both = dict[str, tuple[Callable[[], object], Callable[[], object]]]


def _raw(engine: str, rank: int, mine: torch.Tensor, theirs: torch.Tensor) -> Both:
    """What the engine does bare, as calls of worker 0 and of worker 1."""
    if engine == "mpi":
        from mpi4py import MPI

        window, _ = own_window(MPI, REPLICA_NUMEL)
        return {"raw": (lambda: get(MPI, window, theirs, 1), _nothing)}
    if engine != "torch":
        return {}
    dist.init_process_group("gloo", rank=rank, world_size=2)

    def both_ways() -> None:
        sent = dist.isend(mine, 1 - rank)
        dist.recv(theirs, 1 - rank)
        assert sent is not None
        sent.wait()

    return {
        "raw": (lambda: dist.recv(theirs, 1), lambda: dist.send(mine, 0)),
        "raw_both_ways": (both_ways, both_ways),
    }
