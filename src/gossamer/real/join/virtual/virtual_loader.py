"""Which batches of a loader are this worker's in virtual time.

Synchronous methods have equal shares, as on real workers. With asynchronous ones the coordinator
assigns the next batch of the pass at the virtual start of a step. So a loader reads nothing ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, Protocol, TypeVar, cast

from torch.utils.data import DataLoader

from gossamer.real.join.loader import Coupled, Passes, Positions, shard_of

T = TypeVar("T")


class BatchTaker(Coupled, Protocol):
    """A coupled loop that is told its batches one by one."""

    def take(self, epoch: str) -> int:
        """The position of the next batch in this pass."""
        ...

    def took(self, samples: int, of: int) -> None:
        """A batch of so many samples, in a pass of so many, is the loop's."""
        ...


class VirtualPositions(Positions):
    """This worker's positions in an epoch."""

    def __init__(self, coupled: BatchTaker, samples: int) -> None:
        super().__init__(coupled)
        self._taker = coupled
        self._samples = samples

    def rounds(self, epoch: str) -> Iterator[int]:
        if self.coupled.group:
            yield from super().rounds(epoch)
        while True:
            yield self._taker.take(epoch)

    def within(self, epoch: str, batches: int | None) -> Iterator[int]:
        for position in super().within(epoch, batches):
            self._taker.took(self._samples, (batches or 0) * self._samples)
            yield position


class VirtualPasses(Passes):
    """How often a loop has gone over each of its loaders."""

    def positions(self, loader: Iterable[Any], coupled: Coupled) -> Positions:
        samples = getattr(loader, "batch_size", None)
        known = samples if isinstance(samples, int) else 1
        return VirtualPositions(cast(BatchTaker, coupled), known)


def virtual_shard(loader: Iterable[T], coupled: BatchTaker, seed: int, passes: Passes) -> Any:
    """This worker's part of a loader's batches."""
    own = shard_of(loader, coupled, seed, passes)
    if coupled.is_synchronous or not isinstance(own, DataLoader):
        return own
    return _without_prefetching(cast("DataLoader[Any]", own))


def _without_prefetching(loader: DataLoader[Any]) -> DataLoader[Any]:
    """What it would read ahead now is not its own yet."""
    own = copy(loader)
    ahead = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    if "num_workers" in vars(own):
        vars(own).update(ahead)
    for key, value in vars(loader).items():
        if isinstance(value, DataLoader):
            vars(own)[key] = _without_prefetching(cast("DataLoader[Any]", value))
    return own
