"""When a real run ends and which batches are whose: samples, not steps, are counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gossamer.real.transport import Store
from gossamer.tasks.split import Order, OwnSampler, Sampler

Indices = npt.NDArray[np.int64]
_LEASE = 4
"""Batches taken from the shared order at a time: a few, so that the end is shared fairly."""


class Rounds:
    """Synchronous methods step in rounds of everyone alive."""

    def __init__(
        self, samples: int, batch: int, data_size: int,
        live_at: Callable[[int], frozenset[int]], sampler: Sampler, rank: int,
        workers: int,
    ) -> None:  # fmt: skip
        self.epoch = 0.0
        self.expected_steps = max(1, -(-samples // (batch * workers)))
        self._samples, self._batch, self._data_size = samples, batch, data_size
        self._claimed = 0
        self._live_at = live_at
        self._sampler = sampler
        self._rank = rank

    def open_step(self, step: int) -> bool:
        """Everyone comes to the same answer: the living of a round are agreed on."""
        if self._claimed >= self._samples:
            return False
        self.epoch = self._claimed / self._data_size
        self._claimed += self._batch * len(self._live_at(step))
        return True

    def next_batch(self) -> Indices:
        return self._sampler.next(self._rank)


class Leases:
    """Asynchronous methods: whoever is ready takes the next batches of one shared order."""

    def __init__(
        self, samples: int, batch: int, data_size: int, store: Store,
        order: Order | OwnSampler, rank: int, workers: int,
    ) -> None:  # fmt: skip
        self.epoch = 0.0
        self.expected_steps = max(1, -(-samples // (batch * workers)))
        self._last = -(-samples // batch)
        """How many batches the run has."""
        self._batch, self._data_size = batch, data_size
        self._store = store
        self._order = order
        self._rank = rank
        self._leased = range(0)

    def open_step(self, step: int) -> bool:
        if not self._leased:
            end = self._store.add("batches", _LEASE)
            self._leased = range(end - _LEASE, min(end, self._last))
        if not self._leased:
            return False
        self.epoch = self._leased[0] * self._batch / self._data_size
        return True

    def next_batch(self) -> Indices:
        position, self._leased = self._leased[0], self._leased[1:]
        if isinstance(self._order, OwnSampler):
            return self._order.next(self._rank)
        return self._order.lookup(position * self._batch, self._batch)
