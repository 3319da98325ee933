"""When a run ends: when all workers together have processed its samples.

Never a fixed number of steps per worker: a slow worker must not set the end of an asynchronous
run. Synchronous methods step in rounds, and a round that was opened is open to everybody.
"""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """Samples claimed so far, and what they say about the next step."""

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
        self.claimed = 0
        self.processed = 0
        self._data_size = data_size
        self._synchronous = synchronous
        self._living = living
        self._rounds: list[float] = []
        """For each round opened, the epoch at which it was."""

    @property
    def epoch(self) -> float:
        """Progress by what has been claimed."""
        return self.claimed / self._data_size

    @property
    def epochs_processed(self) -> float:
        return self.processed / self._data_size

    def open_step(self, step: int, share: int = 1) -> float | None:
        """The epoch at which this step begins, or None when the run is over."""
        if self._synchronous and step < len(self._rounds):
            return self._rounds[step]
        if self.claimed >= self.samples:
            return None
        epoch = self.epoch
        if self._synchronous:
            self._rounds.append(epoch)
            self.claimed += self.batch * self._living()
        else:
            self.claimed += self.batch * share
        return epoch

    def give_back(self, batch: int) -> None:
        """A worker died before its batch was processed: others will do it."""
        self.claimed -= batch
