"""Shares of a round in proportion to speed: `balance=speed`, the same in every world.

A round of n living workers has n batches of samples, however they are shared out. A worker with
b samples scales its gradient by b / batch, so the ordinary mean over the workers is the mean over
all samples of the round: shares change how long a round takes, never what it expects.

Nothing is assumed of how time follows the batch. A worker's speed is the samples per second of its
gradients, at the batch that it has; each settlement shares in proportion to that, and so the times
of a round draw together. A fixed part of the time makes a settlement miss by that part of what it
corrects: with a fifth of a step fixed, each one leaves a fifth of the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

_LEAD = 2
"""A worker tells its speed so many rounds before a settlement, when it is sure to be heard: nobody
is further behind, even where reducing overlaps with the next step."""
_SETTLEMENTS = (5, 10, 20, 40)
_WORTHWHILE = 1.05
"""New shares must shorten a round by this factor; less than that is noise."""


class BatchShares:
    """How many samples each worker computes in a round, from speeds that all workers know."""

    def __init__(self, batch: int, workers: int) -> None:
        """`batch` is the mean over the living workers. All are equally fast to begin with."""
        self.batch = batch
        self.workers = workers
        self.speeds = [1.0] * workers
        """Samples per second; before the first settlement only their ratio means something."""

    def among(self, members: Iterable[int], samples: int | None = None) -> dict[int, int]:
        """The samples of each member in one round, by rank: of a whole round, or of so many."""
        weights = {rank: self.speeds[rank] for rank in sorted(members)}
        total = self.batch * len(weights) if samples is None else samples
        # Batch normalisation needs two samples.
        return apportioned(total, weights, least=min(2, total // len(weights)))

    def settle(self, speeds: Mapping[int, float], members: Iterable[int]) -> None:
        """Go on with these speeds, measured at the members' present shares.

        A member whose speed nobody knows keeps its share.
        """
        present = self.among(members)
        known = [rank for rank in present if rank in speeds]
        if not known:
            return
        seconds = {rank: present[rank] / speeds[rank] for rank in known}
        level = sum(present[rank] for rank in known) / sum(speeds[rank] for rank in known)
        if max(seconds.values()) < _WORTHWHILE * level:
            return
        for rank, samples in present.items():
            self.speeds[rank] = speeds.get(rank, samples / level)

    def weight(self, rank: int, round_: Mapping[int, int], living: Iterable[int]) -> float:
        """What a worker's gradient counts in the mean of those that still live."""
        left = [samples for other, samples in round_.items() if other in living or other == rank]
        return round_[rank] * len(left) / sum(left)


class StepTimes:
    """How fast the steps of one worker were."""

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}

    def add(self, step: int, samples: int, seconds: float) -> None:
        """The gradient of a step took so long."""
        self._speeds[step] = samples / max(seconds, 1e-9)

    def speed(self, settlement: int) -> float | None:
        """What the worker tells for a settlement: its median speed since the one before, so that a
        step that was held up once does not count. The first step of all warms up."""
        first = max(1, previous_settlement(settlement))
        for step in [step for step in self._speeds if step < first]:
            del self._speeds[step]
        found = [s for step, s in self._speeds.items() if step < settlement - _LEAD]
        return median(found) if found else None


def is_settlement(step: int) -> bool:
    """Whether shares are settled anew before this step: soon, then now and then."""
    return step in _SETTLEMENTS or (step > 0 and step % _SETTLEMENTS[-1] == 0)


def previous_settlement(step: int) -> int:
    """The last settlement before this one."""
    earlier = [one for one in _SETTLEMENTS if one < step]
    last = earlier[-1] if earlier else 0
    return max(last, (step - 1) // _SETTLEMENTS[-1] * _SETTLEMENTS[-1])


def told_for(step: int) -> int | None:
    """The settlement for which a worker tells its speed before this step, if there is one."""
    return step + _LEAD if is_settlement(step + _LEAD) else None


def apportioned(total: int, weights: Mapping[int, float], *, least: int) -> dict[int, int]:
    """Share out a whole number in proportion to weights, at least so much for each.

    What rounding down leaves goes to the largest remainders, and of equal ones to the lowest rank.
    """
    held = dict[int, int]()
    while True:
        free = {rank: weight for rank, weight in weights.items() if rank not in held}
        rest, whole = total - sum(held.values()), sum(free.values())
        quotas = {rank: rest * weight / whole for rank, weight in free.items()}
        few = [rank for rank, quota in quotas.items() if quota < least]
        if not few:
            break
        held |= dict.fromkeys(few, least)
    found = {rank: int(quota) for rank, quota in quotas.items()} | held
    left = total - sum(found.values())
    by_remainder = sorted(quotas, key=lambda rank: (found[rank] - quotas[rank], rank))
    for rank in by_remainder[:left]:
        found[rank] += 1
    return {rank: found[rank] for rank in weights}
