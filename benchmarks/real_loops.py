"""The loops that are compared: nothing between them differs but how the workers are coupled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from real_models import Problem
from torch import Tensor, nn

from gossamer.real.join.joined_worker import JoinedWorker


class Plain:
    """No communication; also the base of the others."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        self.problem.optimizer.step()

    @property
    def exchanges(self) -> int:
        """Started by this worker so far."""
        return 0

    def agree(self, is_over: bool) -> bool:
        """What the workers of a synchronous loop must decide alike."""
        return is_over


class Joined(Plain):
    """Coupled by Gossamer."""

    def __init__(self, problem: Problem, worker: JoinedWorker) -> None:
        super().__init__(problem)
        self.worker = worker

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        self.worker.step()

    @property
    def exchanges(self) -> int:
        coupling = self.worker.coupling
        return 0 if coupling is None else coupling.session.metrics.exchanges


class Counted(Plain):
    """Loops with one exchange in each step."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.count = 0

    @property
    def exchanges(self) -> int:
        return self.count


class Ddp(Counted):
    """torch's DistributedDataParallel over Gloo."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._module = nn.parallel.DistributedDataParallel(problem.module)

    def step(self) -> None:
        self.problem.backward(self._module)
        self.problem.optimizer.step()
        self.count += 1

    def agree(self, is_over: bool) -> bool:
        verdict = torch.tensor([float(is_over)])
        dist.broadcast(verdict, 0)
        return bool(verdict.item())


class BareGet(Counted):
    """Pull gossip as a script on MPI: get a peer's window, take the mean."""

    def __init__(self, problem: Problem, mpi: Any) -> None:
        super().__init__(problem)
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self._window, self._flat = own_window(mpi, sum(p.numel() for p in parameters_of(problem)))
        self._theirs = torch.empty_like(self._flat)
        for parameter, view in zip(
            parameters_of(problem), views_of(problem, self._flat), strict=True
        ):
            view.copy_(parameter.data)
            parameter.data = view

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        self.problem.optimizer.step()
        # Peers in turn: as random as it takes, at no cost.
        other = 1 + self.count % (self._world.size - 1)
        get(self._mpi, self._window, self._theirs, (self._world.rank + other) % self._world.size)
        self._flat.lerp_(self._theirs, 0.5)
        self.count += 1


class BareAllReduce(Counted):
    """Synchronous SGD as a script on MPI: gradients in one buffer, one Allreduce."""

    def __init__(self, problem: Problem, mpi: Any) -> None:
        super().__init__(problem)
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self._flat = torch.zeros(sum(p.numel() for p in parameters_of(problem)))
        self._views = views_of(problem, self._flat)

    def step(self) -> None:
        problem = self.problem
        problem.backward(problem.module)
        torch.cat([p.grad.reshape(-1) for p in parameters_of(problem) if p.grad is not None],
                  out=self._flat)  # fmt: skip
        self._world.Allreduce(self._mpi.IN_PLACE, self._flat.numpy())
        self._flat.div_(self._world.size)
        for parameter, view in zip(parameters_of(problem), self._views, strict=True):
            parameter.grad = view
        problem.optimizer.step()
        self.count += 1


def own_window(mpi: Any, numel: int) -> tuple[Any, Tensor]:
    """Memory of this process that others may get and put."""
    window = mpi.Win.Allocate(4 * numel, 4, comm=mpi.COMM_WORLD)
    return window, torch.frombuffer(window.tomemory(), dtype=torch.float32)


def get(mpi: Any, window: Any, into: Tensor, rank: int) -> None:
    window.Lock(rank, mpi.LOCK_SHARED)
    window.Get(into.numpy(), rank)
    window.Unlock(rank)


def parameters_of(problem: Problem) -> list[nn.Parameter]:
    return list(problem.module.parameters())


def views_of(problem: Problem, flat: Tensor) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters_of(problem)]
    pieces = flat.split(sizes)
    return [
        piece.view_as(parameter)
        for piece, parameter in zip(pieces, parameters_of(problem), strict=True)
    ]


BARE: dict[str, Callable[[Problem, Any], Plain]] = {"get": BareGet, "all_reduce": BareAllReduce}
