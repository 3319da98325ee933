"""How training samples are dealt to workers, and in which order.

By default there is one seeded order of the whole training set. Asynchronous methods take the next
batch of it whoever asks (`SharedSampler`); synchronous methods take equal slices of it round by
round (`ShardedSampler`); with one worker the two are the same. In the other splits each worker owns
a share and cycles through it (`OwnSampler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.specs import bind, check_range, parse_spec
from gossamer.tasks.keyed import key_of

Indices = npt.NDArray[np.int64]

SPLITS: dict[str, str] = {
    "shuffled": "one shared order; nobody owns a sample",
    "sharded": "each worker owns an equal random share",
    "dirichlet": "each worker owns a share whose classes are drawn from Dirichlet(alpha)",
    "by_class": "each worker owns a few classes",
}


_FOR_SHARES, _FOR_ORDER = 0, 1


def _generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    """A generator of its own for each purpose, so that one draw more here shifts nothing there."""
    return np.random.default_rng(key_of(seed, purpose, number) % 2**64)


class Order:
    """One seeded order of a training set: a new permutation each epoch, cut into batches.

    A batch may span two epochs. Nothing is drawn ahead: an epoch's permutation is a function of
    (seed, epoch), so any part of the order can be looked up.
    """

    def __init__(self, samples: int, seed: int, batch: int) -> None:
        """`drawn` counts the samples handed out, less those given back."""
        check_range("samples in the training set", samples, 1)
        check_range("batch", batch, 1)
        self.samples = samples
        self.seed = seed
        self.batch = batch
        self.drawn = 0
        self.kept_epochs = 2
        self._position = 0
        self._returned: deque[Indices] = deque()
        self._epochs: dict[int, Indices] = {}

    def next_batch(self) -> Indices:
        """The next `batch` samples; those given back come first."""
        if self._returned:
            indices = self._returned.popleft()
        else:
            indices = self.lookup(self._position, self.batch)
            self._position += self.batch
        self.drawn += len(indices)
        return indices

    def give_back(self, indices: Indices) -> None:
        """Return a batch that nobody processed (its holder died) to the front."""
        self._returned.appendleft(indices)
        self.drawn -= len(indices)

    def skip(self, batches: int) -> None:
        """Go on behind so many batches more, which another run has processed."""
        self._position += batches * self.batch
        self.drawn += batches * self.batch

    def lookup(self, start: int, length: int) -> Indices:
        """The `length` samples of the endless order from position `start` on."""
        parts = list[Indices]()
        while length > 0:
            epoch, offset = divmod(start, self.samples)
            part = self._permutation(epoch)[offset : offset + length]
            parts.append(part)
            start += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permutation(self, epoch: int) -> Indices:
        if epoch not in self._epochs:
            # These serve the workers of a round that spans epochs; an older one is made again.
            while len(self._epochs) >= self.kept_epochs:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = _generator(self.seed, _FOR_ORDER, epoch).permutation(self.samples)
        return self._epochs[epoch]


class Sampler(Protocol):
    """Says which samples a worker processes next."""

    def next(self, worker: int) -> Indices:
        """The worker's next batch."""
        ...

    def give_back(self, worker: int, indices: Indices) -> None:
        """Take back a batch that the worker did not process."""
        ...

    def resume(self, worker: int, batches: int) -> None:
        """Go on as if the worker had asked so many times; where all share, the sum counts."""
        ...

    def begin(self, worker: int, step: int) -> None:
        """The worker takes part from this step on; it has made none of those before."""
        ...


class SharedSampler:
    """Whoever asks gets the next batch of the shared order."""

    def __init__(self, order: Order) -> None:
        """All workers draw from `order`."""
        self._order = order

    def next(self, worker: int) -> Indices:
        """The next batch, whoever asks."""
        return self._order.next_batch()

    def give_back(self, worker: int, indices: Indices) -> None:
        """The batch goes to whoever asks next."""
        self._order.give_back(indices)

    def resume(self, worker: int, batches: int) -> None:
        """The order goes on behind those batches."""
        self._order.skip(batches)

    def begin(self, worker: int, step: int) -> None:
        """Nobody has a part of the order."""


class ShardedSampler:
    """In round t, worker i gets the i-th slice of the t-th global batch of the shared order.

    That does not depend on who asks first. A batch given back goes to whoever asks next; the
    slices of later rounds that a dead worker never asks for are skipped until the next epoch.
    """

    def __init__(self, order: Order, workers: int) -> None:
        """A global batch is `workers` batches of the order."""
        self._order = order
        order.kept_epochs = 2 + workers * order.batch // order.samples
        self._rounds = [0] * workers
        self._returned: deque[Indices] = deque()

    def next(self, worker: int) -> Indices:
        """The worker's slice of its next round."""
        if self._returned:
            return self._returned.popleft()
        slot = self._rounds[worker] * len(self._rounds) + worker
        self._rounds[worker] += 1
        return self._order.lookup(slot * self._order.batch, self._order.batch)

    def give_back(self, worker: int, indices: Indices) -> None:
        """The batch goes to whoever asks next."""
        self._returned.appendleft(indices)

    def resume(self, worker: int, batches: int) -> None:
        """So many rounds have been."""
        self._rounds[worker] = batches

    def begin(self, worker: int, step: int) -> None:
        """Its slices of earlier rounds are skipped."""
        self._rounds[worker] = step


class BalancedSampler:
    """In round t, worker i gets its share of the t-th global batch of the shared order.

    Where all shares are equal and all workers live, this deals what `ShardedSampler` deals. What a
    dead worker has not processed goes, cut to the size that is needed, to whoever asks next.
    """

    def __init__(
        self, order: Order, workers: int, shares_of: Callable[[int], Mapping[int, int]]
    ) -> None:
        """`shares_of` says, for a round that has begun, how many samples each worker gets."""
        self._order = order
        self._rounds = [0] * workers
        self._shares_of = shares_of
        self._returned = np.empty(0, np.int64)

    def next(self, worker: int) -> Indices:
        """The worker's share of its next round."""
        number = self._rounds[worker]
        shares = self._shares_of(number)
        self._rounds[worker] += 1
        start = number * len(self._rounds) * self._order.batch
        start += sum(samples for rank, samples in shares.items() if rank < worker)
        again, self._returned = np.split(self._returned, [shares[worker]])
        if len(again) == shares[worker]:
            return again
        return np.concatenate([again, self._order.lookup(start, shares[worker] - len(again))])

    def give_back(self, worker: int, indices: Indices) -> None:
        """The samples go to whoever asks next."""
        self._returned = np.concatenate([indices, self._returned])

    def resume(self, worker: int, batches: int) -> None:
        """So many rounds have been."""
        self._rounds[worker] = batches

    def begin(self, worker: int, step: int) -> None:
        """Its slices of earlier rounds are skipped."""
        self._rounds[worker] = step


class OwnSampler:
    """Each worker cycles through its own share, in an order of its own."""

    def __init__(self, shares: list[Indices], batch: int, seed: int) -> None:
        """`shares` holds one sorted array of samples for each worker."""
        self._shares = shares
        self._orders = [
            Order(len(share), key_of(seed, worker, 0), batch) for worker, share in enumerate(shares)
        ]

    def next(self, worker: int) -> Indices:
        """The next batch of the worker's share."""
        return self._shares[worker][self._orders[worker].next_batch()]

    def give_back(self, worker: int, indices: Indices) -> None:
        """The batch stays with its owner: nobody else may hold these samples."""
        self._orders[worker].give_back(np.searchsorted(self._shares[worker], indices))

    def resume(self, worker: int, batches: int) -> None:
        """The worker's own order goes on behind those batches."""
        self._orders[worker].skip(batches)

    def begin(self, worker: int, step: int) -> None:
        """Its share waited for it."""


def _labels(targets: Tensor) -> Indices:
    if targets.dim() != 1 or targets.is_floating_point():
        raise ConfigurationError(
            f"a split by classes needs one class for each sample, got targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}; use the split shuffled or sharded"
        )
    return targets.cpu().numpy().astype(np.int64)


def _equal(targets: Tensor, workers: int, generator: np.random.Generator) -> list[Indices]:
    return np.array_split(generator.permutation(len(targets)), workers)


def _by_class(targets: Tensor, workers: int, generator: np.random.Generator) -> list[Indices]:
    labels = _labels(targets)
    # Shuffled first, so that workers which share a class do not share its oldest samples.
    shuffled = generator.permutation(len(labels))
    return np.array_split(shuffled[np.argsort(labels[shuffled], kind="stable")], workers)


def _dirichlet(
    targets: Tensor, workers: int, generator: np.random.Generator, *, alpha: float = 0.3
) -> list[Indices]:
    # Far below this numpy's draws underflow, and each class has had one owner for long.
    check_range("dirichlet: alpha", alpha, 1e-3)
    labels = _labels(targets)
    parts = [list[Indices]() for _ in range(workers)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        proportions = generator.dirichlet(np.full(workers, alpha))
        cuts = np.round(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    dealt = [np.concatenate(part) for part in parts]
    for worker in range(workers):
        if len(dealt[worker]) == 0:
            richest = max(range(workers), key=lambda other: len(dealt[other]))
            dealt[worker], dealt[richest] = dealt[richest][:1], dealt[richest][1:]
    return dealt


_DEALERS: dict[str, Callable[..., list[Indices]]] = {
    "shuffled": _equal,
    "sharded": _equal,
    "dirichlet": _dirichlet,
    "by_class": _by_class,
}


def shares(targets: Tensor, workers: int, split: str, seed: int) -> list[Indices]:
    """Deal the samples to the workers: every sample once, nobody empty, each share sorted."""
    name, given = parse_spec(split, "split")
    if name not in SPLITS:
        raise unknown_name("split", name, SPLITS)
    options = bind("split", name, _DEALERS[name], given)
    check_range("workers", workers, 1)
    if workers > len(targets) and name != "shuffled":
        raise ConfigurationError(
            f"split {name} cannot give each of {workers} workers a sample, got {len(targets)} "
            "samples; use fewer workers"
        )
    generator = _generator(seed, _FOR_SHARES, 0)
    return [np.sort(share) for share in _DEALERS[name](targets, workers, generator, **options)]


def make_sampler(
    targets: Tensor, workers: int, batch: int, split: str, seed: int, synchronous: bool,
    shares_of: Callable[[int], Mapping[int, int]] | None = None,
) -> Sampler:  # fmt: skip
    """The sampler of a run; `synchronous` methods work in rounds, perhaps of unequal shares."""
    if parse_spec(split, "split")[0] != "shuffled":
        return OwnSampler(shares(targets, workers, split, seed), batch, seed)
    order = Order(len(targets), seed, batch)
    if shares_of is not None:
        return BalancedSampler(order, workers, shares_of)
    return ShardedSampler(order, workers) if synchronous else SharedSampler(order)
