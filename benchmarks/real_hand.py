"""The same exchanges by hand, in shared memory with nothing around them: what is left to gain.

No library, no lock, nobody who might die or be told to stop; of the optimiser only SGD's sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from mmap import mmap
from typing import Any, cast

import torch
from real_loops import Counted, parameters_of, views_of
from real_models import Problem
from torch import Tensor

_BLOCK = 1 << 16
_TURNS = 40
"""Places that gradients take turns in: what another has just read is not written again at once."""
_PAGE = 4096


class Shared:
    """Memory of all workers, without a name: `gossamer run` hands it down."""

    def __init__(self, count: int) -> None:
        self.rank, self.size = int(os.environ["GOSSAMER_RANK"]), int(os.environ["GOSSAMER_SIZE"])
        self._stride = -(-count * 4 // _PAGE) * _PAGE
        self._count = count
        length = _PAGE + self.size * _TURNS * self._stride
        file = int(os.environ["GOSSAMER_SHM_FDS"].split(",")[1])
        os.ftruncate(file, length)
        self._memory = mmap(file, length)
        self._words = memoryview(self._memory).cast("Q")
        self._posted = 0

    def vector(self, rank: int, turn: int = 0) -> Tensor:
        offset = _PAGE + (rank * _TURNS + turn) * self._stride
        return torch.frombuffer(self._memory, dtype=torch.float32, offset=offset, count=self._count)

    def wait_for_all(self) -> None:
        """Until everybody has called this as often as this worker."""
        self._posted += 1
        self._words[8 * self.rank] = self._posted
        for rank in range(self.size):
            while self._words[8 * rank] < self._posted:
                os.sched_yield()


class _ByHand(Counted):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.parameters = parameters_of(problem)
        self.rate = -float(problem.optimizer.param_groups[0]["lr"])
        self.shared = Shared(sum(parameter.numel() for parameter in self.parameters))

    def descend(self, places: list[Tensor]) -> None:
        together = cast(Any, torch)
        together._foreach_add_(places, self.gradients(), alpha=self.rate)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def window(self) -> Tensor:
        """This worker's own, holding its parameters; everybody's is there afterwards."""
        own = self.shared.vector(self.shared.rank)
        for parameter, view in zip(self.parameters, views_of(self.problem, own), strict=True):
            view.copy_(parameter.data)
        self.shared.wait_for_all()
        return own


class HandRead(_ByHand):
    """Pull gossip: the mean with a peer's parameters, read where they lie."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._own = self.window()
        self._views = views_of(problem, self._own)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        rank, size = self.shared.rank, self.shared.size
        self._peers = [self.shared.vector((rank + other) % size) for other in range(1, size)]

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        self.descend(self._views)
        self._own.lerp_(self._peers[self.count % len(self._peers)], 0.5)
        self.count += 1


class HandAverage(_ByHand):
    """AD-PSGD: odd workers make both ends their mean; gradients are taken at a private copy."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._window = self.window()
        self._views = views_of(problem, self._window)
        self._private = self._window.clone()
        for parameter, view in zip(self.parameters, views_of(problem, self._private), strict=True):
            parameter.data = view
        size = self.shared.size
        self._is_active = self.shared.rank % 2 == 1
        self._blocks = self._window.split(_BLOCK)
        self._peers = [self.shared.vector(rank).split(_BLOCK) for rank in range(0, size, 2)]

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        self.descend(self._views)
        if self._is_active:
            theirs = self._peers[self.count // 2 % len(self._peers)]
            for some, others in zip(self._blocks, theirs, strict=True):
                some.lerp_(others, 0.5)
                others.copy_(some)
            self.count += 2
        self._private.copy_(self._window)


class HandAllReduce(_ByHand):
    """Everybody posts its share of the mean, and adds up everybody's."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._share = torch.tensor(1.0 / self.shared.size)
        self._places = [parameter.data for parameter in self.parameters]
        self._posts = [
            [views_of(problem, self.shared.vector(rank, turn)) for rank in range(self.shared.size)]
            for turn in range(_TURNS)
        ]

    def step(self) -> None:
        self.problem.backward(self.problem.module)
        gradients, posts = self.gradients(), self._posts[self.count % _TURNS]
        for gradient, place in zip(gradients, posts[self.shared.rank], strict=True):
            torch.mul(gradient, self._share, out=place)
        self.shared.wait_for_all()
        for gradient, first, second, *more in zip(gradients, *posts, strict=True):
            torch.add(first, second, out=gradient)
            for another in more:
                gradient.add_(another)
        self.descend(self._places)
        self.count += 1


HAND: dict[str, Callable[[Problem], Counted]] = {
    "read": HandRead, "average": HandAverage, "all_reduce": HandAllReduce,
}  # fmt: skip
