"""One process of the benchmark: does what the conductor says and tells how long it took."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from real_exchange import exchange_times
from real_hand import HAND
from real_loops import BARE, Ddp, Joined, Plain
from real_models import Flat, Problem
from timing import synchronise

from gossamer.real.join.joined_worker import JoinedWorker, join
from gossamer.real.launch.environment import discover

_FEW = 200
"""Steps of one block where single calls are timed."""
_CORES = 4
"""Of a worker that computes on a GPU: for its own thread, that of backward and those of engines."""


class Conductor:
    """The other end of the line: one JSON object per line, each way."""

    def __init__(self, address: str, rank: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._lines = self._socket.makefile("r")
        self.tell({"rank": rank, "pid": os.getpid()})

    def tell(self, what: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(what) + "\n").encode())

    def next(self) -> dict[str, Any]:
        line = self._lines.readline()
        return json.loads(line) if line else {"do": "quit"}

    @property
    def has_spoken(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])


class Worker:
    """A loop, and what can be measured about it."""

    def __init__(self, loop: Plain, rank: int, conductor: Conductor) -> None:
        self._loop = loop
        self._rank = rank
        self._conductor = conductor
        self.orders: dict[str, Callable[..., dict[str, Any]]] = {
            "run": self.run, "train": self.train, "overhead": self.overhead,
        }  # fmt: skip

    def run(
        self, seconds: float = 0.0, steps: int = 0, lead_seconds: float = 0.0, lead_steps: int = 0,
        sleep: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """So many steps, or as many as fit; worker 1 sleeps after each where it is to be slow.

        Before the clock starts come some that do not count: processes that were stopped come back
        with cold caches, and often three of four on one core.
        """
        pause = sleep if self._rank == 1 else 0.0
        self._steps(lead_seconds, lead_steps, pause)
        exchanges = self._loop.exchanges
        synchronise()
        began = time.perf_counter()
        made = self._steps(seconds, steps, pause)
        synchronise()
        taken = time.perf_counter() - began
        return {"steps": made, "seconds": taken, "exchanges": self._loop.exchanges - exchanges}

    def _steps(self, seconds: float, steps: int, pause: float) -> int:
        """How many were made."""
        step = self._loop.step
        made = 0
        until = time.perf_counter() + seconds
        while made < steps or time.perf_counter() < until:
            step()
            made += 1
            if pause:
                time.sleep(pause)
        return made

    def train(self, target: float, every: int, limit: float, sleep: float) -> dict[str, Any]:
        """Until the loss of worker 0's model is small enough; looking at it is not counted."""
        pause = sleep if self._rank == 1 else 0.0
        looking, made, loss = 0.0, 0, float("inf")
        began = time.perf_counter()
        while True:
            self._loop.step()
            made += 1
            if pause:
                time.sleep(pause)
            if made % every:
                continue
            now = time.perf_counter()
            is_over = now - began > limit or self._conductor.has_spoken
            if self._rank == 0:
                loss = self._loop.problem.training_loss()
                is_over = is_over or loss <= target
            looking += time.perf_counter() - now
            if self._loop.agree(is_over):
                seconds = time.perf_counter() - began - looking
                return {"steps": made, "seconds": seconds, "loss": loss}

    def overhead(self, rounds: int) -> dict[str, Any]:
        """What `worker.step()` takes beyond `optimizer.step()`, in microseconds."""
        assert isinstance(self._loop, Joined)
        problem, worker = self._loop.problem, self._loop.worker
        problem.backward(problem.module)
        # A joined optimiser may not step by itself, so a twin of it does, at the same gradients.
        twin = [torch.nn.Parameter(value.detach().clone()) for value in problem.module.parameters()]
        for own, value in zip(twin, problem.module.parameters(), strict=True):
            own.grad = None if value.grad is None else value.grad.clone()
        plain = type(problem.optimizer)(twin, **problem.optimizer.defaults)
        differences: list[float] = []
        for _ in range(rounds):
            alone = _microseconds(plain.step)
            differences.append(_microseconds(worker.step) - alone)
        return {"microseconds": differences}


def _microseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    for _ in range(_FEW):
        work()
    return (time.perf_counter_ns() - began) / _FEW / 1e3


def _serve(conductor: Conductor, orders: dict[str, Callable[..., dict[str, Any]]]) -> None:
    while (order := conductor.next())["do"] != "quit":
        if order["do"] == "stop":
            continue
        answer = orders[order.pop("do")](**order)
        synchronise()
        conductor.tell(answer)


def _keep_to_cores(rank: int, size: int) -> None:
    """Worker 0 of every group to the same cores, and so on.

    Beside a GPU the processor is what a small model waits for, and some cores are twice as fast as
    others, whose siblings work for somebody else: what a group happened to get would be measured.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = min(_CORES, len(cores) // size)
    if share:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def _joined(arguments: argparse.Namespace, module: Any, optimizer: Any) -> JoinedWorker:
    return join(module, optimizer, arguments.method, seed=0, steps=100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("plain", "ddp", "join", "bare", "hand", "exchange"))
    parser.add_argument("conductor")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--method", default="pull_gossip")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rate", type=float, default=0.01)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    here = discover()
    rank = here.rank
    if device.type == "cuda":
        _keep_to_cores(rank, here.size)
    with contextlib.ExitStack() as stack:
        if arguments.kind == "exchange":
            flat = Flat().to(device)
            optimizer = torch.optim.SGD(flat.parameters(), lr=0.0)
            worker = stack.enter_context(_joined(arguments, flat, optimizer))
            conductor = Conductor(arguments.conductor, rank)
            _serve(conductor, {"exchange": lambda **how: exchange_times(worker, **how)})
            return
        problem = Problem(arguments.model, rank, device, arguments.rate)
        loop = Plain(problem)
        if arguments.kind == "ddp":
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
            loop = Ddp(problem)
        elif arguments.kind == "bare":
            from mpi4py import MPI

            loop = BARE[arguments.method](problem, MPI)
        elif arguments.kind == "hand":
            loop = HAND[arguments.method](problem)
        elif arguments.kind == "join":
            worker = _joined(arguments, problem.module, problem.optimizer)
            loop = Joined(problem, stack.enter_context(worker))
        conductor = Conductor(arguments.conductor, rank)
        _serve(conductor, Worker(loop, rank, conductor).orders)


if __name__ == "__main__":
    main()
