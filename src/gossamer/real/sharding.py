"""Which batches of a user's loader are this worker's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from gossamer.real.transport import Store

T = TypeVar("T")
_LEASE = 4
"""Batches taken at a time: small, so that the last ones are shared fairly."""


class Coupled(Protocol):
    """What sharding needs to know of a run."""

    rank: int
    size: int
    is_synchronous: bool

    @property
    def store(self) -> Store: ...


class Positions:
    """This worker's positions in an epoch of so many batches."""

    _orders = 0

    def __init__(self, coupled: Coupled) -> None:
        self._coupled = coupled
        # Loaders are sharded in the same order by everybody, so counting names them.
        Positions._orders += 1
        self._name = f"order {Positions._orders}"
        self._epoch = 0

    def of_epoch(self, batches: int | None) -> Iterator[int]:
        coupled = self._coupled
        epoch, self._epoch = self._epoch, self._epoch + 1
        if coupled.is_synchronous:
            # Equal numbers for all: a round needs everybody.
            stop = None if batches is None else batches - batches % coupled.size
            position = coupled.rank
            while stop is None or position < stop:
                yield position
                position += coupled.size
            return
        while True:
            end = coupled.store.add(f"{self._name} epoch {epoch}", _LEASE)
            if batches is not None and end - _LEASE >= batches:
                return
            for position in range(end - _LEASE, end):
                if batches is None or position < batches:
                    yield position


class OwnBatches:
    """A batch sampler that yields only this worker's batches of another one."""

    def __init__(self, batches: Iterable[list[int]], positions: Positions, seed: int) -> None:
        self._batches = batches
        self._positions = positions
        self._seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        sampler = getattr(self._batches, "sampler", None)
        if isinstance(sampler, RandomSampler):
            # Everybody must shuffle alike, and differently in every epoch.
            sampler.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        elif hasattr(sampler, "set_epoch"):
            cast(Any, sampler).set_epoch(self._epoch)
        self._epoch += 1
        every = list(self._batches)
        for position in self._positions.of_epoch(len(every)):
            yield every[position]


def shard_of(loader: Iterable[T], coupled: Coupled | None, seed: int) -> Iterable[T]:
    """The same loader over this worker's batches only; alone, the loader itself."""
    if coupled is None:
        return loader
    positions = Positions(coupled)
    if isinstance(loader, DataLoader):
        known = cast("DataLoader[Any]", loader)
        if known.batch_sampler is not None and not isinstance(known.dataset, IterableDataset):
            own = OwnBatches(known.batch_sampler, positions, seed)
            return cast(Iterable[T], _like(known, own))
    return _Selected(loader, positions)


def _like(loader: DataLoader[Any], batches: OwnBatches) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=cast(Any, batches),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _Selected:
    """Of an iterable that cannot be indexed everybody reads all and keeps its own."""

    def __init__(self, batches: Iterable[Any], positions: Positions) -> None:
        self._batches = batches
        self._positions = positions

    def __iter__(self) -> Iterator[Any]:
        count = len(cast(Any, self._batches)) if hasattr(self._batches, "__len__") else None
        wanted = self._positions.of_epoch(count)
        position = next(wanted, None)
        for number, batch in enumerate(self._batches):
            if position is None:
                return
            if number == position:
                yield batch
                position = next(wanted, None)
