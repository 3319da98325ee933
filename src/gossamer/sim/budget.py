"""A run ends when all workers together have processed its samples.

No worker has a fixed number of steps, because a slow worker must not decide when an asynchronous
run ends. Synchronous methods step in rounds; once a round is opened, every worker makes it. The
same holds for the step of a group and its members. Samples are counted in whole batches, rounds
and steps of groups, because batch normalisation cannot use a batch of a few samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np

from gossamer.batch_shares import BatchShares, StepTimes, is_settlement
from gossamer.groups import Groups
from gossamer.optim.schedules import BatchGrowth
from gossamer.tasks.split import Indices


class Budget:
    """Counts the samples and decides whether another step begins."""

    def __init__(
        self,
        samples: int,
        batch: int,
        data_size: int,
        *,
        synchronous: bool,
        working: Set[int],
        groups: Groups = (),
        shares: BatchShares | None = None,
        growth: BatchGrowth | None = None,
    ) -> None:
        """`working` always holds the workers that have neither died nor ended. Rounds are cut into
        equal batches, or by `shares`; batches may grow."""
        self.samples = samples
        self.batch = batch
        self.processed = 0
        self.is_synchronous = synchronous
        self._data_size = data_size
        self._working = working
        self._groups = {group[0]: group for group in groups}
        self._leader = {rank: group[0] for group in groups for rank in group}
        self._owing: dict[int, set[int]] = {}
        """For each leader, the members of its group that owe a gradient in the present step."""
        self._owed = 0
        """How many gradients they owe in all."""
        self._is_closed = False
        self._claimed = 0
        self._rounds: list[float] = []
        """The epoch at which each round was opened."""
        self._growth = growth
        self._multiples: list[int] = []
        """For each opened round, how many ordinary batches each worker computes."""
        self._shares = shares
        self._shares_of: list[dict[int, int]] = []
        """For each opened round, the samples of each worker."""
        self._times = {rank: StepTimes() for rank in working} if shares else {}
        self._claims: list[int] = []
        """For each opened round, the samples of all rounds up to its end."""

    @property
    def epochs(self) -> float:
        return self.epochs_of(self.processed)

    def epochs_of(self, samples: int) -> float:
        return samples / self._data_size

    @property
    def rounds(self) -> int:
        """How many rounds have been opened."""
        return len(self._rounds)

    @property
    def is_spent(self) -> bool:
        return self.processed >= self.samples

    @property
    def promises(self) -> bool:
        """Whether others must complete what a worker begins, so that a death may leave work."""
        return self.is_synchronous or bool(self._groups)

    @property
    def _is_promised(self) -> bool:
        """Whether every sample is processed or owed by somebody."""
        return self.processed + self.batch * self._owed >= self.samples

    def open_step(self, step: int) -> float | None:
        """The epoch at which this step begins, or None when the run is over."""
        if not self.is_synchronous:
            return None if self._is_promised else self.epochs
        if step == len(self._rounds):
            if self._is_closed or self._claimed >= self.samples:
                # A round needs all workers, so once one has been told the end none may open.
                self._is_closed = True
                return None
            self._rounds.append(self.epochs_of(self._claimed))
            self._share_out(step)
            self._multiples.append(self._multiple_at(self._rounds[step]))
            self._claimed += self.batch * self._multiples[step] * len(self._working)
            self._claims.append(self._claimed)
        return self._rounds[step]

    def _multiple_at(self, epoch: float) -> int:
        return 1 if self._growth is None else self._growth.at(epoch)

    def multiple(self, step: int) -> int:
        """How many ordinary batches a gradient has that begins now, in this step."""
        return self._multiples[step] if self.is_synchronous else self._multiple_at(self.epochs)

    def ordinary(self, batch: Indices) -> list[Indices]:
        """A batch as the ordinary ones that it was made of."""
        if self._growth is None or len(batch) <= self.batch:
            return [batch]
        return np.split(batch, range(self.batch, len(batch), self.batch))

    def expected_steps(self, workers: int) -> int:
        """About how many steps each worker makes."""
        ordinary = max(1, -(-self.samples // (self.batch * workers)))
        share = 1.0 if self._growth is None else self._growth.step_share
        return ordinary if share == 1.0 else max(1, round(ordinary * share))

    def _share_out(self, step: int) -> None:
        if self._shares is None:
            return
        if is_settlement(step):
            told = {rank: own.speed(step) for rank, own in self._times.items()}
            known = {rank: speed for rank, speed in told.items() if speed is not None}
            self._shares.settle(known, self._shares_of[-1])
        self._shares_of.append(self._shares.among(self._working))

    def shares_of(self, step: int) -> Mapping[int, int]:
        """The samples of each worker in a balanced round that has been opened."""
        return self._shares_of[step]

    def weight(self, rank: int, step: int, living: Set[int]) -> float:
        """The factor of a gradient, with which the mean is one over samples."""
        if self._shares is None:
            return 1.0
        return self._shares.weight(rank, self._shares_of[step], living)

    def samples_after(self, step: int) -> int:
        """The samples of all rounds up to the end of this round, if nobody dies in it."""
        return self._claims[step]

    def begin(self, rank: int) -> bool:
        """Whether this worker may begin a gradient; nobody computes one that is not needed."""
        if self.is_synchronous:
            return True
        group = self._groups.get(rank)
        if group is None:
            return bool(self._groups) or not self.is_spent
        if self._is_promised:
            return False
        self._owed -= len(self._owing.get(rank, ()))
        self._owing[rank] = set(group) & self._working
        self._owed += len(self._owing[rank])
        return True

    def deliver(self, rank: int, samples: int, step: int, seconds: float) -> None:
        """A worker has the gradient of a step, which took so long."""
        self.processed += samples
        if self._shares is not None:
            self._times[rank].add(step, samples, seconds)
        self._owe_no_more(rank)

    def give_back(self, rank: int, steps: int) -> None:
        """A worker left after this many steps, and others process what it owed: its share of the
        rounds that it or others had opened."""
        if self._shares is None:
            self._claimed -= self.batch * sum(self._multiples[steps:])
        else:
            self._claimed -= sum(shares.get(rank, 0) for shares in self._shares_of[steps:])
        self._owe_no_more(rank)
        self._owed -= len(self._owing.pop(rank, ()))

    def _owe_no_more(self, rank: int) -> None:
        owing = self._owing.get(self._leader.get(rank, -1), set[int]())
        self._owed -= rank in owing
        owing.discard(rank)

    def reopen(self) -> bool:
        """All workers have reached the end. Returns whether a dead worker has left samples."""
        self._is_closed = False
        if self.is_synchronous:
            return self._claimed < self.samples
        return not self._is_promised
