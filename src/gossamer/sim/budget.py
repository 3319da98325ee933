"""When a run ends: when all workers together have processed its samples.

Never a fixed number of steps per worker: a slow worker must not set the end of an asynchronous
run. Synchronous methods step in rounds, and a round that was opened is open to everybody.
"""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Samples processed so far, and what they say about the next step."""

    def __init__(
        self,
        samples: int,
        batch: int,
        data_size: int,
        *,
        synchronous: bool,
        living: Callable[[], int],
    ) -> None:
        self.samples = samples
        self.batch = batch
        self.processed = 0
        self.is_synchronous = synchronous
        self._claimed = 0
        self._data_size = data_size
        self._living = living
        self._is_closed = False
        self._rounds: list[float] = []
        """For each round opened, the epoch at which it was."""

    @property
    def epochs(self) -> float:
        return self.processed / self._data_size

    @property
    def is_spent(self) -> bool:
        return self.processed >= self.samples

    def open_step(self, step: int) -> float | None:
        """The epoch at which this step begins, or None when the run is over."""
        if not self.is_synchronous:
            return None if self.is_spent else self.epochs
        if step == len(self._rounds):
            if self._is_closed or self._claimed >= self.samples:
                # A round needs everybody: once one worker was told the end, none opens any more.
                self._is_closed = True
                return None
            self._rounds.append(self._claimed / self._data_size)
            self._claimed += self.batch * self._living()
        return self._rounds[step]

    def give_back(self, steps: int) -> None:
        """A worker left after so many steps: a later round makes up for what it owed.

        That is its share of the rounds that were opened, by itself or by others ahead of it.
        """
        self._claimed -= self.batch * max(0, len(self._rounds) - steps)
