"""Which trainings a sweep consists of, and which of them are trained together.

A grid is every combination of optimiser, learning rate, batch size, delay and seed. What shares an
optimiser and a batch size is one group: its points are rows of one matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.optim.schedules import Schedule, make_schedule
from gossamer.specs import check_range
from gossamer.tasks import Task

SHORT_NAMES = {"sgd": "sgd:momentum=0.9"}
"""The study of delayed gradients calls this SGD; plain SGD is `sgd:momentum=0`."""
DEFAULT_DELAYS = (0, 1, 2, 4, 8, 16)
DEFAULT_RATES = tuple(10.0 ** (half / 2) for half in range(-7, 1))


@dataclass(frozen=True, order=True)
class GridPoint:
    """One training: its place in the grid, and the rate and batch that it uses."""

    optimiser: str
    delay: int
    batch: int
    learning_rate: float
    seed: int
    used_rate: float
    """The rate of the training, which the halving heuristic makes smaller than the grid's."""
    used_batch: int

    @property
    def place(self) -> Place:
        return (self.optimiser, self.delay, self.batch, self.learning_rate)


Place = tuple[str, int, int, float]
"""Optimiser, delay, batch and learning rate of the grid, which all seeds share."""


@dataclass(frozen=True)
class GridGroup:
    """Points of one optimiser and batch size, the least delayed first: rows of one matrix."""

    optimiser: str
    batch: int
    points: tuple[GridPoint, ...]

    @property
    def label(self) -> str:
        return f"{self.optimiser} batch {self.batch}"


@dataclass(frozen=True)
class Grid:
    """The values of each setting; every combination of them is trained."""

    optimisers: tuple[str, ...]
    learning_rates: tuple[float, ...]
    batches: tuple[int, ...]
    delays: tuple[int, ...]
    epochs: float
    seeds: tuple[int, ...] = (0,)
    warmup: float = 0.0
    """The epochs over which the rate rises linearly, from a tenth."""
    halve: bool = False
    """Whether rate and batch are divided by the number of workers, which is the delay + 1."""

    def __post_init__(self) -> None:
        for name in ("optimisers", "learning_rates", "batches", "delays", "seeds"):
            given: tuple[object, ...] = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ConfigurationError(
                    f"the grid needs one or more different {name.replace('_', ' ')}, got "
                    f"{', '.join(map(str, given)) or 'none'}; name each once"
                )
        for optimiser in self.optimisers:
            make_optimiser(optimiser)
        for rate in self.learning_rates:
            _check_above_zero("learning rate", rate)
        for batch in self.batches:
            check_range("batch", batch, 1)
        for delay in self.delays:
            check_range("delay", delay, 0)
        _check_above_zero("epochs", self.epochs)
        self.schedule()

    def schedule(self) -> Schedule:
        return make_schedule(f"constant:warmup={self.warmup!r}", epochs=self.epochs, workers=1)

    def points(self) -> list[GridPoint]:
        combinations = product(
            self.optimisers, self.delays, self.batches, self.learning_rates, self.seeds
        )
        return [self._point(*combination) for combination in combinations]

    def _point(self, optimiser: str, delay: int, batch: int, rate: float, seed: int) -> GridPoint:
        workers = delay + 1 if self.halve else 1
        used_batch = max(1, round(batch / workers))
        return GridPoint(optimiser, delay, batch, rate, seed, rate / workers, used_batch)

    def groups(self) -> list[GridGroup]:
        """The groups in the order of training. But for rounding, no result depends on them."""
        found: dict[tuple[str, int], list[GridPoint]] = {}
        for point in self.points():
            found.setdefault((point.optimiser, point.used_batch), []).append(point)
        # Groups of large batches are the quickest and come first, so that results appear early.
        order = sorted(found, key=lambda key: (self.optimisers.index(key[0]), -key[1]))
        return [
            GridGroup(*key, tuple(sorted(found[key], key=lambda point: (point.delay, point.seed))))
            for key in order
        ]

    def check_fits(self, task: Task) -> None:
        """Refuse a batch that is larger than the data of the task."""
        largest = max(self.batches)
        if largest > len(task.train):
            raise ConfigurationError(
                f"a batch of {largest} is larger than the {len(task.train)} samples of "
                f"{task.name}; choose a smaller one"
            )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(described: Mapping[str, Any]) -> Grid:
        """Make a grid from `as_dict`, also after JSON turned tuples into lists."""
        known = {field.name for field in dataclasses.fields(Grid)}
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in described.items()
            if key in known
        }
        return Grid(**values)


def default_batches(task: Task) -> tuple[int, ...]:
    """The batch of the task, and batches of 4 and 16 times as many samples if the data allow."""
    batches = (task.batch, 4 * task.batch, 16 * task.batch)
    return tuple(batch for batch in batches if batch <= len(task.train))


def steps_of(epochs: float, samples: int, batch: int) -> int:
    """How many steps one worker needs for so many epochs; the last step may exceed them."""
    return max(1, -(-max(1, round(epochs * samples)) // batch))


def named_optimisers(names: Sequence[str]) -> tuple[str, ...]:
    """Turn names and short names of optimisers into specs in their one spelling."""
    return tuple(str(make_optimiser(SHORT_NAMES.get(name, name))) for name in names)


def _check_above_zero(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{what} must be a finite number above 0, got {value}")
