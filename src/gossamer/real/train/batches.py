"""Which worker computes which batch, and when a real run ends: it counts samples, not steps.

What a worker was to process when it died is processed by others. Synchronous methods agree on the
members of each round. Asynchronous methods lease a few batches at a time; the states of one lease:

    ┌──────┐  a worker counts up  ┌───────┐  it writes its name  ┌──────┐  all batches  ┌──────┐
    │ free │─────────────────────▶│ given │─────────────────────▶│ held │──────────────▶│ done │
    └──────┘                      └───────┘                      └──────┘               └──────┘
                                      │ the worker dies           │    ▲
                                      │                           ▼    │ another writes its name
                                      │                      ┌───────────┐
                                      └─────────────────────▶│ left over │
                                                             └───────────┘

Whether a lease is done is known to its holder alone. So the last lease of a dead worker counts as
left over: once the order is used up somebody else holds it again, and processes all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.batch_shares import BatchShares, StepTimes, is_settlement, told_for
from gossamer.config.settings import Settings
from gossamer.groups import Grouping
from gossamer.optim.schedules import BatchGrowth
from gossamer.real.router import BLOCK
from gossamer.real.transports.checked_values import broken_value, number_from
from gossamer.real.transports.transport import Store
from gossamer.tasks.split import BalancedSampler, Order, OwnSampler, Sampler, make_sampler

State = dict[str, Any]
"""What a checkpoint keeps of one worker: plain values."""
Indices = npt.NDArray[np.int64]
LEASE = 4
"""Batches taken from the shared order at a time: a few, so that the end is shared fairly."""


class RoundBatches:
    """The batches of a synchronous method, which steps in rounds of everyone alive."""

    def __init__(
        self, samples: int, batch: int, data_size: int,
        live_at: Callable[[int], frozenset[int]], sampler: Sampler, rank: int,
        workers: int, growth: AgreedGrowth | None = None,
    ) -> None:  # fmt: skip
        self.epoch = 0.0
        self.expected_steps = max(1, -(-samples // (batch * workers)))
        self._growth, self._multiple = growth, 1
        if growth is not None:
            self.expected_steps = max(1, round(self.expected_steps * growth.growth.step_share))
        self._samples, self._batch, self._data_size = samples, batch, data_size
        self._claimed = self._drawn = 0
        self._live_at = live_at
        self._sampler = sampler
        self._rank = rank
        self._members: frozenset[int] | None = None
        self._block = 0
        self._owed = [Counter[int](), Counter[int]()]
        """The samples of each member in the block before this one, and in this one so far."""

    def open_step(self, step: int) -> bool:
        """Everyone gets the same answer, because the members of a round are agreed on."""
        block = step // BLOCK
        if self._members is None or block != self._block:
            self._keep(self._live_at(step))
            self._block = block
            self._owed = [self._owed[1], Counter[int]()]
        if self._claimed >= self._samples:
            # Workers known by now to have died have not processed what was counted for them.
            self._keep(self._live_at((block + 1) * BLOCK))
        self.epoch = self._claimed / self._data_size
        if self._claimed >= self._samples:
            return False
        if self._growth is not None:
            self._multiple = self._growth.at(step, self.epoch)
        shares = self._round(self._members or frozenset())
        self._claimed += sum(shares.values())
        self._owed[1].update(shares)
        return True

    def _round(self, members: frozenset[int]) -> Mapping[int, int]:
        """The samples of each member in the round that opens."""
        return dict.fromkeys(members, self._batch * self._multiple)

    def _keep(self, live: frozenset[int]) -> None:
        """Go on with these members. The rounds of this block and of the one before no longer count
        for members that are gone; they must have made the earlier ones."""
        if self._members is not None:
            gone = self._members - live
            self._claimed -= sum(owed[rank] for owed in self._owed for rank in gone)
            live = live & self._members
        self._members = live

    def next_batch(self) -> Indices:
        self._drawn += self._multiple
        parts = [self._sampler.next(self._rank) for _ in range(self._multiple)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def state(self) -> State:
        return {"claimed": self._claimed, "drawn": self._drawn, "multiple": self._multiple}

    def resume(self, own: State, everyone: Sequence[State]) -> None:
        """All workers count the same rounds, so each one's own count is enough."""
        self._claimed, self._drawn = own["claimed"], own["drawn"]
        if self._growth is not None:
            self._growth.growth.now = self._multiple = own["multiple"]
        self.epoch = self._claimed / self._data_size
        self._sampler.resume(self._rank, self._drawn)


class AgreedGrowth:
    """Batches that grow alike at all workers of a synchronous run.

    An epoch is the same for all. What the noise of gradients says differs from worker to worker; so
    every few rounds the first to come proposes a size, and everyone takes what it proposed.
    """

    EVERY = 8

    def __init__(self, growth: BatchGrowth, store: Store, most: int, *, by_noise: bool) -> None:
        """`most` is the largest multiple that anybody may propose."""
        self.growth = growth
        self._store, self._most, self._by_noise = store, most, by_noise

    def at(self, step: int, epoch: float) -> int:
        """How many ordinary batches each worker computes in this round."""
        if not self._by_noise:
            return self.growth.at(epoch)
        if step % self.EVERY == 0:
            key, before = f"growth/{step}", self.growth.now
            agreed = self._store.get(key)
            if agreed is None:
                agreed = self._store.agree(key, str(self.growth.at(epoch)))
            self.growth.now = max(before, number_from(key, agreed, self._most + 1))
        return self.growth.now


class BalancedBatches(RoundBatches):
    """Rounds in which each worker has a share in proportion to its speed (`balance=speed`).

    Before shares are settled each worker writes its measured speed into the store. At the
    settlement the first worker to come proposes the list of all speeds, and everyone reads what it
    proposed. The members of a round are agreed on too, so all know the same shares at each step.
    """

    def __init__(
        self, samples: int, order: Order, store: Store, rank: int, workers: int,
        live_at: Callable[[int], frozenset[int]], live: Callable[[], frozenset[int]],
    ) -> None:  # fmt: skip
        """`live_at` is agreed on by all; `live` is what this worker knows now."""
        self._plan = BatchShares(order.batch, workers)
        self._present: dict[int, int] = {}
        sampler = BalancedSampler(order, workers, lambda number: self._present)
        super().__init__(samples, order.batch, order.samples, live_at, sampler, rank, workers)
        self._store, self._live = store, live
        self._times = StepTimes()
        self._step = 0

    def open_step(self, step: int) -> bool:
        if (settlement := told_for(step)) is not None:
            speed = self._times.speed(settlement)
            if speed is not None:
                self._store.agree(f"speed/{settlement}/{self._rank}", repr(speed))
        if is_settlement(step) and self._members is not None:
            self._plan.settle(self._agreed(step, self._members), self._members)
        self._step = step
        return super().open_step(step)

    def _round(self, members: frozenset[int]) -> Mapping[int, int]:
        self._present = self._plan.among(members)
        return self._present

    def computed(self, samples: int, seconds: float) -> None:
        """This worker's gradient took so long."""
        self._times.add(self._step, samples, seconds)

    @property
    def weight(self) -> float:
        """The factor of this worker's gradient, with which the mean is one over samples."""
        return self._plan.weight(self._rank, self._present, self._live())

    def _agreed(self, step: int, members: frozenset[int]) -> dict[int, float]:
        """The speeds for a settlement, as the first worker found them."""
        key = f"speeds/{step}"
        agreed = self._store.get(key)
        if agreed is None:
            told = {rank: self._store.get(f"speed/{step}/{rank}") for rank in sorted(members)}
            found = [f"{rank}={text}" for rank, text in told.items() if text is not None]
            agreed = self._store.agree(key, " ".join(found))
        try:
            pairs = [part.split("=") for part in agreed.split()]
            speeds = {int(rank): float(speed) for rank, speed in pairs}
        except ValueError:
            speeds = {-1: 0.0}
        if not all(r in range(self._plan.workers) and 0 < s < 1e18 for r, s in speeds.items()):
            raise broken_value(key, agreed, "the speeds of workers")
        return speeds

    def state(self) -> State:
        return super().state() | {"speeds": list(self._plan.speeds)}

    def resume(self, own: State, everyone: Sequence[State]) -> None:
        super().resume(own, everyone)
        self._plan.speeds = list(own["speeds"])


class LeasedBatches:
    """The batches of an asynchronous method: whoever is ready leases the next of one shared order.

    The holder of a lease is written down in the store before its first batch.
    """

    def __init__(
        self, samples: int, batch: int, data_size: int, store: Store,
        order: Order | OwnSampler, rank: int, workers: int,
        live: Callable[[], frozenset[int]] | None = None,
        on_repeat: Callable[[int], None] = lambda samples: None, lease: int = LEASE,
        growth: BatchGrowth | None = None,
    ) -> None:  # fmt: skip
        """`lease` is how many batches are taken at a time."""
        self.epoch = 0.0
        self.expected_steps = max(1, -(-samples // (batch * workers)))
        self._growth = growth
        if growth is not None:
            self.expected_steps = max(1, round(self.expected_steps * growth.step_share))
        self._last = -(-samples // batch)
        """How many batches the run has."""
        self._batch, self._data_size = batch, data_size
        self._lease = lease
        self._store = store
        self._order = order
        self._rank = rank
        self._everyone = frozenset(range(workers))
        self._live = live or (lambda: self._everyone)
        self._on_repeat = on_repeat
        self._leased = range(0)
        self._missed: frozenset[int] = frozenset()
        """The workers that had died when this one last asked for a lease."""
        self._taken: list[range] = []
        self._drawn = 0
        self._begun: set[int] = set()
        """In a resumed run: leases that were begun before, whose holders may go on with them."""
        self._open = (list[int](), 0)
        """In a resumed run: leases that nobody had taken although later ones were, and the number
        from which on all are free."""

    def open_step(self, step: int) -> bool:
        if not self._leased:
            self._leased = self._take()
        if not self._leased:
            # Other workers hold the batches that are not done yet.
            self.epoch = self._last * self._batch / self._data_size
            return False
        # A lease of a dead worker is old; the epoch, and with it the schedule, never runs back.
        self.epoch = max(self.epoch, self._leased[0] * self._batch / self._data_size)
        return True

    def next_batch(self) -> Indices:
        """One ordinary batch; where batches grow, as many of them as are left, in one."""
        parts = [self._next_ordinary()]
        for _ in range(0 if self._growth is None else self._growth.at(self.epoch) - 1):
            self._leased = self._leased or self._take()
            if not self._leased:
                break
            parts.append(self._next_ordinary())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _next_ordinary(self) -> Indices:
        if self._leased:
            position, self._leased = self._leased[0], self._leased[1:]
        else:
            # The leader of a group holds the last batch, and its members compute batches beyond
            # the end beside it.
            position = self._last + self._store.add("leases/beyond", 1) - 1
        self._drawn += 1
        if isinstance(self._order, OwnSampler):
            return self._order.next(self._rank)
        return self._order.lookup(position * self._batch, self._batch)

    # ------------------------------------------------------------------ taking

    @property
    def _count(self) -> int:
        """How many leases the run has."""
        return -(-self._last // self._lease)

    def _batches(self, number: int) -> range:
        return range(number * self._lease, min((number + 1) * self._lease, self._last))

    def _take(self) -> range:
        """The next lease that nobody has; empty when there is none."""
        missed, self._missed = self._missed, self._everyone - self._live()
        while (number := self._next()) < self._count:
            for rank in missed:
                # It died at least one lease ago, so none of its requests can still arrive.
                self._store.agree(f"lease/below/{rank}", str(number))
            if self._claims(number, 0):
                self._note(number)
                return self._batches(number)
        return self._take_over()

    def _next(self) -> int:
        asked = self._store.add("leases", 1) - 1
        gaps, begin = self._open
        return gaps[asked] if asked < len(gaps) else begin + asked - len(gaps)

    def _note(self, number: int) -> None:
        if self._taken and self._taken[-1].stop == number:
            self._taken[-1] = range(self._taken[-1].start, number + 1)
        else:
            self._taken.append(range(number, number + 1))

    def _claims(self, number: int, turn: int) -> bool:
        """Whether this worker is the first to claim a lease for the first or a further time."""
        mine = str(self._rank)
        return self._store.agree(f"lease/{number}/{turn}", mine) == mine

    def _holder(self, number: int, turn: int) -> int | None:
        key = f"lease/{number}/{turn}"
        text = self._store.get(key)
        return None if text is None else number_from(key, text, len(self._everyone))

    def _take_over(self) -> range:
        dead = self._everyone - self._live()
        for number in self._left_by(dead):
            turn = 0
            while (holder := self._holder(number, turn)) in dead:
                turn += 1
            if holder is None and self._claims(number, turn):
                batches = self._batches(number)
                self._note(number)
                if turn > 0:
                    self._on_repeat(len(batches) * self._batch)
                return batches
        return range(0)

    def _left_by(self, dead: frozenset[int]) -> Iterator[int]:
        """The last lease that each dead worker has held, and the leases that nobody holds.

        A worker may die after it got a number and before it wrote its name there. Its last lease
        has a lower number than that, so the search from the highest number down finds both. Leases
        from `lease/below/RANK` on were given out when the death was known: none is the dead one's.
        """
        gaps, begin = self._open
        for rank in sorted(dead):
            key = f"lease/below/{rank}"
            below = number_from(key, self._store.get(key) or str(self._count))
            # In the reverse order of giving out: a resumed run gives out the gaps first, and the
            # leases that were begun before it was resumed are older than all of these.
            given = chain(range(begin, below)[::-1], (n for n in gaps[::-1] if n < below))
            for number in chain(given, self._begun):
                holder = self._holder(number, 0)
                if holder == rank or (holder is None and number not in self._begun):
                    yield number
                if holder == rank:
                    break

    # ------------------------------------------------------------------ checkpoints

    @property
    def batches(self) -> int:
        """How many batches the run has."""
        return self._last

    @property
    def position(self) -> int:
        """About how many batches all workers together have taken."""
        gaps, begin = self._open
        asked = begin + max(0, self._store.add("leases", 0) - len(gaps))
        return min(self._lease * asked, self._last)

    @property
    def reached(self) -> int:
        """The batch with which this worker's last lease ends; no message is needed to know it."""
        return self._batches(self._taken[-1].stop - 1).stop if self._taken else 0

    def state(self) -> State:
        return {
            "taken": [[run.start, run.stop] for run in self._taken],
            "left": [self._leased.start, self._leased.stop],
            "batches": self._last,
            "drawn": self._drawn,
        }

    def resume(self, own: State, everyone: Sequence[State]) -> None:
        """Go on behind the last lease that anyone had taken; leases before it that nobody had
        taken come first. If a worker is missing because it had died, these were its own and stay
        done: the others have learnt from it.
        """
        self._taken = [range(*run) for run in own["taken"]]
        self._leased, self._drawn = range(*own["left"]), own["drawn"]
        done = {number for one in everyone for run in one["taken"] for number in range(*run)}
        begin = max(done, default=-1) + 1
        is_whole = len(everyone) == len(self._everyone)
        gaps = [number for number in range(begin) if number not in done]
        self._open = (gaps if is_whole else [], begin)
        # Leases that were begun: what is left of one, and the last one, which the end had cut.
        parts = [one["left"][0] for one in everyone] + [own["batches"]]
        self._begun = {part // self._lease for part in parts} & done
        self._lengthen(own["batches"])
        if self._leased:
            self._claims(self._leased.start // self._lease, 0)
        position = self._leased[0] if self._leased else begin * self._lease
        self.epoch = position * self._batch / self._data_size
        if isinstance(self._order, OwnSampler):
            self._order.resume(self._rank, self._drawn)

    def _lengthen(self, before: int) -> None:
        """A longer run goes on with the rest of the lease that its old end had cut."""
        number = before // self._lease
        is_own = any(number in run for run in self._taken)
        is_last = not self._leased or self._leased.stop == before
        if before % self._lease and self._last > before and is_own and is_last:
            start = self._leased.start if self._leased else before
            self._leased = range(start, self._batches(number).stop)


class Batches(Protocol):
    """The batches of one worker, step by step."""

    @property
    def epoch(self) -> float: ...

    @property
    def expected_steps(self) -> int: ...

    def open_step(self, step: int) -> bool:
        """Whether this step is to be made."""
        ...

    def next_batch(self) -> Indices: ...

    def state(self) -> State:
        """For a checkpoint."""
        ...

    def resume(self, own: State, everyone: Sequence[State]) -> None: ...


def make_batches(
    settings: Settings, store: Store, grouping: Grouping, *,
    live: Callable[[], frozenset[int]], live_at: Callable[[int], frozenset[int]],
    is_synchronous: bool, on_repeat: Callable[[int], None],
    noise: Callable[[], float | None] = lambda: None,
) -> Batches:  # fmt: skip
    """The batches of one worker. A group without its leader has processed nothing."""
    assert settings.batch
    rank, size, targets = grouping.rank, grouping.size, settings.task.train.labels
    samples, batch, data_size = settings.samples, settings.batch, len(targets)
    if settings.method.balance:
        order = Order(data_size, settings.seed, batch)
        return BalancedBatches(samples, order, store, rank, size, live_at, live)
    sampler = make_sampler(targets, size, batch, settings.split, settings.seed, is_synchronous)
    schedule, growth = settings.made_schedule, None
    if schedule.is_growing:
        growth = BatchGrowth(schedule, batch * size, noise)
    if is_synchronous:
        agreed = growth and AgreedGrowth(
            growth, store, schedule.largest_multiple, by_noise=schedule.follows_noise
        )
        return RoundBatches(
            samples, batch, data_size, lambda step: grouping.working(live_at(step)), sampler, rank,
            size, agreed,
        )  # fmt: skip
    is_own = isinstance(sampler, OwnSampler)
    order = sampler if is_own else Order(data_size, settings.seed, batch)
    return LeasedBatches(
        samples, batch, data_size, store, order, rank, size, lambda: grouping.working(live()),
        on_repeat,
        # The members of a group take their batches at each step: none is left when it ends.
        lease=1 if grouping.groups else LEASE, growth=growth,
    )  # fmt: skip
