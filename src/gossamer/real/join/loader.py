"""Shares the batches of a user's loader out among the workers."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count, islice
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gossamer.errors import ConfigurationError
from gossamer.real.join.elastic.batch_accounts import LEASE, BatchAccounts
from gossamer.real.transports.checked_values import numbers_from
from gossamer.real.transports.transport import Store

T = TypeVar("T")
_MOST_UNCOUNTED = 1 << 20
"""A sampler without a length that gives more batches than this is taken to have no end."""


class Coupled(Protocol):
    """What sharding needs to know of a session."""

    rank: int
    size: int
    group: tuple[int, ...]
    """This worker and those it computes with, step by step; empty without groups."""
    is_synchronous: bool

    @property
    def store(self) -> Store: ...


class Positions:
    """This worker's positions in an epoch of so many batches."""

    _orders = 0

    def __init__(self, coupled: Coupled, accounts: BatchAccounts | None = None) -> None:
        """With accounts, what a worker leased before its death is given again."""
        self.coupled = coupled
        self._accounts = accounts
        # All workers shard their loaders in the same order, so a number identifies each.
        Positions._orders += 1
        self.name = f"order {Positions._orders}"
        self.epoch = -1

    def next_epoch(self) -> str:
        """A name that all workers have for this pass over this loader."""
        self.epoch += 1
        return f"{self.name} epoch {self.epoch}"

    def within(self, epoch: str, batches: int | None) -> Iterator[int]:
        coupled = self.coupled
        if coupled.is_synchronous:
            # All get equally many batches, because a round needs everybody.
            stop = None if batches is None else self.share(batches) * coupled.size
            position = coupled.rank
            while stop is None or position < stop:
                yield position
                position += coupled.size
            return
        if self._accounts is not None and batches is not None:
            yield from self._accounts.leased(epoch, batches)
            return
        for first in self.rounds(epoch):
            if batches is not None and first + self.width > batches:
                return  # positions grow, so no later one fits
            yield first + self.place

    @property
    def width(self) -> int:
        """How many batches are taken together: the members of a group step together."""
        return max(1, len(self.coupled.group))

    @property
    def place(self) -> int:
        """The place of this worker's batch among those taken together."""
        return self.coupled.group.index(self.coupled.rank) if self.coupled.group else 0

    def dealt(self, epoch: str, every: Sequence[Any]) -> Iterator[Any]:
        """This worker's part of all batches of an epoch."""
        for position in self.within(epoch, len(every)):
            yield every[position]

    def rounds(self, epoch: str) -> Iterator[int]:
        """The first position of each set of batches that are taken together, without end."""
        store, group = self.coupled.store, self.coupled.group
        while not group:
            end = store.add(epoch, LEASE)
            yield from range(end - LEASE, end)
        mine, start = f"{group[0]} {self.width}", 0
        for lease in count():
            # The first member of a group to come claims the lease for all, and nobody waits.
            key = f"{epoch} lease {lease}"
            claim = store.agree(key, mine)
            width = numbers_from(key, claim, " ")[-1]
            if claim == mine:
                yield from range(start, start + LEASE * width, width)
            start += LEASE * width

    def expected(self, batches: int) -> int:
        """How many of so many batches this worker may expect. With an asynchronous method that is
        its part if all workers are equally fast, which nobody knows beforehand."""
        if self.coupled.is_synchronous:
            return self.share(batches)
        return -(-batches // self.coupled.size)

    def share(self, batches: int) -> int:
        """How many batches each worker of a synchronous method gets."""
        if batches < self.coupled.size:
            raise ConfigurationError(
                f"the loader has {batches} batches for {self.coupled.size} workers, and each needs "
                "one; make the batches smaller"
            )
        return batches // self.coupled.size

    def state(self) -> Any:
        """What a checkpoint keeps: how often the loop has gone over the loader."""
        return self.epoch + 1

    def resume(self, state: Any) -> None:
        self.epoch = int(state) - 1


class Passes:
    """How often a loop has gone over each of its loaders: a resumed one shuffles as it would have.

    Other iterables are made anew for every pass, so they cannot be recognised.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[DataLoader[Any], Positions]] = {}
        self.before: list[Any] = []
        """The states of a checkpoint, in the order in which the loaders were first shared out."""
        self.accounts: BatchAccounts | None = None
        """What becomes of each batch, where workers may come and go."""

    def state(self) -> list[Any]:
        now = [positions.state() for _, positions in self._of.values()]
        return now + self.before[len(now) :]

    def over(self, loader: Iterable[Any], coupled: Coupled) -> Positions:
        if not isinstance(loader, DataLoader):
            return self.positions(loader, coupled)
        known = cast("DataLoader[Any]", loader)
        if id(known) not in self._of:
            positions, number = self.positions(known, coupled), len(self._of)
            if number < len(self.before):
                positions.resume(self.before[number])
            # The loader is kept alive, so that no other one gets its id.
            self._of[id(known)] = (known, positions)
        return self._of[id(known)][1]

    def positions(self, loader: Iterable[Any], coupled: Coupled) -> Positions:
        return Positions(coupled, self.accounts)


class OwnBatches:
    """A batch sampler that yields only this worker's part of another one; or a sampler, where
    samples are not batched."""

    def __init__(self, batches: Iterable[Any], positions: Positions, seed: int) -> None:
        self._batches = batches
        self._positions = positions
        self._seed = seed

    def __len__(self) -> int:
        return self._positions.expected(len(cast(Any, self._batches)))

    def __iter__(self) -> Iterator[Any]:
        epoch = self._positions.next_epoch()
        drawing = (self._batches, getattr(self._batches, "sampler", None))
        with _same_everywhere(f"{self._seed}/{epoch}", drawing, self._positions.epoch):
            every = self._all()
        yield from self._positions.dealt(epoch, every)

    def _is_counted(self) -> bool:
        try:
            return len(cast(Any, self._batches)) >= 0
        except (TypeError, AttributeError, NotImplementedError):
            return False

    def _all(self) -> list[Any]:
        if self._is_counted():
            return list(self._batches)
        every = list(islice(self._batches, _MOST_UNCOUNTED + 1))
        if len(every) > _MOST_UNCOUNTED:
            raise ConfigurationError(
                f"the loader's sampler has no length and gave more than {_MOST_UNCOUNTED} batches, "
                "perhaps without end; give it a length, or an end to each pass"
            )
        return every


@contextmanager
def _same_everywhere(key: str, drawing: Sequence[Any], epoch: int) -> Generator[None]:
    """Inside, all workers shuffle alike, and differently in every epoch, whether a sampler draws
    from a generator of its own or from torch's, Python's or numpy's common one. Afterwards the
    loop's random numbers go on as before."""
    seed = random.Random(key).getrandbits(62)
    state, state_of_numpy = random.getstate(), np.random.get_state()
    given = [(one, getattr(one, "generator", None)) for one in drawing]
    own = [(one, known) for one, known in given if isinstance(known, torch.Generator)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        for one, _ in own:
            one.generator = torch.Generator().manual_seed(seed)
        for one in drawing:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(state_of_numpy)
            for one, known in own:
                one.generator = known


def shard_of(
    loader: Iterable[T], coupled: Coupled | None, seed: int, passes: Passes
) -> Iterable[T]:
    """The same loader over this worker's batches only; alone, the loader itself."""
    if coupled is None:
        return loader
    positions = passes.over(loader, coupled)
    if isinstance(loader, DataLoader):
        known = cast("DataLoader[Any]", loader)
        samplers = (known.sampler, getattr(known.batch_sampler, "sampler", None))
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ConfigurationError(
                "the loader's DistributedSampler shares the data out already; use worker.shard() "
                "with a plain sampler, or the loader as it is"
            )
        if not isinstance(known.dataset, IterableDataset):
            return cast(Iterable[T], _with_own_batches(known, positions, seed))
    return _Selected(loader, positions)


def _with_own_batches(
    loader: DataLoader[Any], positions: Positions, seed: int
) -> DataLoader[Any]:  # fmt: skip
    """A copy of the loader, which keeps its class, perhaps the user's own, and its settings."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = copy(loader)
    if name in vars(loader):
        # A loader refuses another sampler once it is made, so its dictionary is changed.
        vars(own)[name] = OwnBatches(vars(loader)[name], positions, seed)
        vars(own)["_iterator"] = None
        return own
    inner = {key: value for key, value in vars(loader).items() if isinstance(value, DataLoader)}
    if not inner:
        raise ConfigurationError(
            f"the loader is a {type(loader).__name__} that has no {name} of its own, nor another"
            " loader that has one; use worker.shard() with the plain DataLoader"
        )
    for key, value in inner.items():  # the loader wraps another one, as Accelerate's does
        vars(own)[key] = _with_own_batches(value, positions, seed)
    return own


class _Selected:
    """This worker's part of an iterable that cannot be indexed: all workers read all of it."""

    def __init__(self, batches: Iterable[Any], positions: Positions) -> None:
        self._batches = batches
        self._positions = positions

    def __len__(self) -> int:
        batches, coupled = len(cast(Any, self._batches)), self._positions.coupled
        if coupled.is_synchronous:
            return batches // coupled.size
        return self._positions.expected(batches)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._positions.next_epoch()
        if self._positions.coupled.is_synchronous:
            return self._in_rounds()
        return self._in_leases(epoch)

    def _in_rounds(self) -> Iterator[Any]:
        """A round counts only when there is a batch for everybody, so that nobody waits for one."""
        rank, size = self._positions.coupled.rank, self._positions.coupled.size
        own: Any = None
        for number, batch in enumerate(self._batches):
            if number % size == rank:
                own = batch
            if number % size == size - 1:
                yield own

    def _in_leases(self, epoch: str) -> Iterator[Any]:
        place, width = self._positions.place, self._positions.width
        rounds = self._positions.rounds(epoch)
        first, own = next(rounds), None
        for number, batch in enumerate(self._batches):
            if number == first + place:
                own = batch
            if number == first + width - 1:
                yield own
                first = next(rounds)
