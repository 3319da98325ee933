"""Batches of a loop in proportion to speed: `balance=speed` where the loop is the user's own.

A round of the loader's pass has as many batches as there are workers. Its samples are put together
and cut anew, a part for each, and what the parts do to the mean is made good in `worker.step()`.

A loader may read ahead, so shares are settled in rounds of the loader and not in steps of the loop:
everyone cuts the same round alike, however far ahead its loader is. What a loader has drawn and the
loop never took counts for nothing; the next pass goes on behind the last round that was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from gossamer.batch_shares import BatchShares, StepTimes, is_settlement, told_for
from gossamer.errors import ConfigurationError
from gossamer.real.join.loader import Coupled, Passes, Positions, shard_of
from gossamer.real.transports.checked_values import broken_value

T = TypeVar("T")


@dataclass(frozen=True)
class LoaderRound:
    """One round of a loader's passes, as it was when it was cut."""

    number: int
    """Counted over all passes."""
    shares: Mapping[int, int]
    """The samples of each member."""
    members: frozenset[int]
    speeds: Sequence[float]


class BalancedPositions(Positions):
    """This worker's part of each round of one loader."""

    def __init__(self, coupled: Coupled, training: Callable[[], frozenset[int]]) -> None:
        """`training` says who makes steps, as far as this worker knows."""
        super().__init__(coupled)
        self._training = training
        self._plan = BatchShares(1, coupled.size)
        self._times = StepTimes()
        self._drawn = deque[LoaderRound]()
        everyone = frozenset(range(coupled.size))
        self._taken = LoaderRound(-1, {}, everyone, list(self._plan.speeds))
        """The round of the batch that the loop has, or had last."""
        self._members = everyone
        self.samples = 0
        """How many samples all workers have taken in the present pass."""

    @property
    def shares(self) -> Mapping[int, int]:
        """How the samples of the loop's present round are shared out, by rank."""
        return self._taken.shares

    def dealt(self, epoch: str, every: Sequence[Any]) -> Iterator[list[Any]]:
        self._drawn.clear()
        self._members, self._plan.speeds = self._taken.members, list(self._taken.speeds)
        self._plan.batch = max(1, len(every[0])) if every else 1
        self.samples = sum(len(batch) for batch in every)
        size, rank, first = self.coupled.size, self.coupled.rank, self._taken.number + 1
        for place in range(self.share(len(every))):
            round_ = [one for batch in every[place * size : (place + 1) * size] for one in batch]
            self._prepare(first + place)
            # What those who are gone would have had is left out, as with equal shares.
            shares = self._plan.among(self._members, len(round_) * len(self._members) // size)
            if rank not in shares:
                return
            self._drawn.append(
                LoaderRound(first + place, shares, self._members, list(self._plan.speeds))
            )
            start = sum(samples for other, samples in shares.items() if other < rank)
            yield round_[start : start + shares[rank]]

    def _prepare(self, number: int) -> None:
        """Tell this worker's speed, or settle the shares anew, where this round asks for it."""
        store, rank = self.coupled.store, self.coupled.rank
        if (settlement := told_for(number)) is not None:
            speed = self._times.speed(settlement)
            if speed is not None:
                store.agree(f"{self.name} speed {settlement} {rank}", repr(speed))
        if is_settlement(number):
            speeds, self._members = self._agreed(number)
            self._plan.settle(speeds, self._members)

    def _agreed(self, number: int) -> tuple[dict[int, float], frozenset[int]]:
        """Speeds and members for a settlement, as the first worker to come has found them."""
        store, key = self.coupled.store, f"{self.name} speeds {number}"
        agreed = store.get(key)
        if agreed is None:
            told = {
                rank: store.get(f"{self.name} speed {number} {rank}") or "-"
                for rank in sorted(self._training())
            }
            agreed = store.agree(key, " ".join(f"{rank}={text}" for rank, text in told.items()))
        try:
            said = {int(rank): text for rank, text in (one.split("=") for one in agreed.split())}
            speeds = {rank: float(text) for rank, text in said.items() if text != "-"}
        except ValueError:
            said, speeds = {-1: ""}, dict[int, float]()
        known = said.keys() <= set(range(self.coupled.size))
        if not said or not known or not all(0 < speed < 1e18 for speed in speeds.values()):
            raise broken_value(key, agreed, "the speeds of workers")
        return speeds, frozenset(said)

    def take(self) -> LoaderRound:
        """The loop gets the next batch that was drawn."""
        self._taken = self._drawn.popleft()
        return self._taken

    def weight(self, one: LoaderRound) -> float:
        return self._plan.weight(self.coupled.rank, one.shares, self._training())

    def measured(self, number: int, samples: int, seconds: float) -> None:
        """A step that ended with this round had so many samples and took so long."""
        self._times.add(number, samples, seconds)

    def state(self) -> Any:
        last = self._taken
        return [self.epoch + 1, last.number, sorted(last.members), list(last.speeds)]

    def resume(self, state: Any) -> None:
        epochs, number, members, speeds = state
        super().resume(epochs)
        self._taken = LoaderRound(number, {}, frozenset(members), list(speeds))


class BalancedLoader(Iterable[T]):
    """A loader over this worker's parts of all rounds; it has what the loader has besides."""

    def __init__(
        self, loader: Iterable[T], positions: BalancedPositions, took: Callable[[], None]
    ) -> None:
        self._loader = loader
        self._positions = positions
        self._took = took

    def __len__(self) -> int:
        return len(cast(Any, self._loader))

    def __iter__(self) -> Iterator[T]:
        for batch in self._loader:
            self._took()
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def shares(self) -> Mapping[int, int]:
        """The samples of each worker in the present round, by rank."""
        return self._positions.shares


class LoopShares(Passes):
    """All balanced loaders of one loop, and the weight of its gradients."""

    def __init__(
        self, training: Callable[[], frozenset[int]],
        told: Callable[[int, int], None] = lambda samples, of: None,
    ) -> None:  # fmt: skip
        """`told` hears of the samples of each batch that the loop takes, and of those of its
        pass."""
        super().__init__()
        self._training, self._told = training, told
        self._source: BalancedPositions | None = None
        """The loader whose batch the loop took last."""
        self._taken: list[LoaderRound] = []
        """The rounds that it has taken of that loader since its last step."""

    def positions(self, loader: Iterable[Any], coupled: Coupled) -> Positions:
        return BalancedPositions(coupled, self._training)

    def shard(self, loader: Iterable[T], coupled: Coupled, seed: int) -> Iterable[T]:
        known = cast("DataLoader[Any]", loader)
        if (
            not isinstance(loader, DataLoader)
            or isinstance(known.dataset, IterableDataset)
            or vars(known).get("batch_sampler") is None
        ):
            raise ConfigurationError(
                f"balance=speed cuts the batches of a round anew, and this {type(loader).__name__} "
                "does not say which samples they have; give worker.shard() a DataLoader over a "
                "dataset with indices that makes the batches, or leave out balance="
            )
        positions = cast(BalancedPositions, self.over(loader, coupled))
        own = shard_of(loader, coupled, seed, self)
        return BalancedLoader(own, positions, lambda: self._took(positions))

    def _took(self, positions: BalancedPositions) -> None:
        if positions is not self._source:
            self._source, self._taken = positions, []
        self._taken.append(positions.take())
        self._told(positions.shares[positions.coupled.rank], positions.samples)

    def weigh(
        self, parameters: Iterable[nn.Parameter], seconds: float, samples: int | None = None
    ) -> None:
        """A step is made: scale its gradient so that the mean over workers is one over samples, and
        note how long it took without waiting for others. Batches that were accumulated count alike.
        `samples` says to how many the time belongs, if not to those of the step."""
        if self._source is None or not self._taken:
            raise ConfigurationError(
                "balance=speed gives each worker its batches by worker.shard(loader), and this "
                "step had none of them; loop over worker.shard(loader), or leave out balance="
            )
        source, taken = self._source, self._taken
        weight = sum(map(source.weight, taken)) / len(taken)
        for parameter in parameters:
            if parameter.grad is not None and weight != 1.0:
                parameter.grad.detach().mul_(weight)
        own = sum(one.shares[source.coupled.rank] for one in taken)
        source.measured(taken[-1].number, samples or own, seconds)
        self._taken = []
