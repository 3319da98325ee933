"""Schedules: the factor on the base rate, as a pure function of the epoch, and how batches grow.

The epoch is a real number: the samples that all workers have processed, over the size of the data
set. So asynchronous workers agree on the rate without counting each other's steps. Every schedule
has two more options. `scale` multiplies all rates: by a number, by the number of `workers` (linear
scaling, Goyal et al., 2017) or by its `square_root` (Krizhevsky, 2014; it suits Adam). With
`warmup` the rate rises linearly over that many epochs from the fraction `start` of the full rate.
Without `start` a scaled schedule rises from the base rate (Goyal et al., 2017) and any other one
from a tenth of it. It never rises from zero, because some methods divide by the rate.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar, Literal

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.specs import bind, check_range, parse_spec, print_dataclass


@dataclasses.dataclass(frozen=True)
class Schedule(ABC):
    """A schedule for one run; `str` gives the spec that makes it again for another."""

    name: ClassVar[str]
    description: ClassVar[str]

    epochs: float
    workers: int
    _: dataclasses.KW_ONLY
    warmup: float = 0.0
    start: float | None = None
    scale: float | Literal["workers", "square_root"] = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.epochs < math.inf:
            raise ConfigurationError(
                f"{self.name}: epochs must be a finite number above 0, got {self.epochs}"
            )
        check_range(f"{self.name}: workers", self.workers, 1)
        check_range(f"{self.name}: warmup", self.warmup, 0.0)
        if self.warmup >= self.epochs:
            raise ConfigurationError(
                f"{self.name}: warmup must be shorter than the run, got warmup={self.warmup:g} "
                f"for {self.epochs:g} epochs; shorten it or run for longer"
            )
        if self.start is not None and not 0.0 < self.start <= 1.0:
            raise ConfigurationError(
                f"{self.name}: start must be above 0 and at most 1, got {self.start}"
            )
        if isinstance(self.scale, int | float) and not 0.0 < self.scale < math.inf:
            raise ConfigurationError(
                f"{self.name}: scale must be a finite number above 0, workers or square_root, got "
                f"{self.scale}"
            )

    def __str__(self) -> str:
        return print_dataclass(self.name, self)

    def factor(self, epoch: float) -> float:
        """The factor on the base rate; after the end of the run it keeps its last value."""
        epoch = min(max(epoch, 0.0), self.epochs)
        scale = self._scale
        if epoch >= self.warmup:
            return scale * self._shape(epoch)
        start = self.start
        if start is None:
            start = 1.0 / scale if scale > 1.0 else 0.1
        return scale * (start + (1.0 - start) * epoch / self.warmup)

    def multiple(self, epoch: float, noise: float | None) -> int:
        """How many ordinary batches a worker's batch has at an epoch; `noise` is the noise scale of
        the gradients in samples, over the samples of an ordinary step of all workers."""
        return 1

    @property
    def is_growing(self) -> bool:
        """Whether batches may grow."""
        return False

    @property
    def follows_noise(self) -> bool:
        """Whether batches follow the noise of gradients."""
        return False

    @property
    def largest_multiple(self) -> int:
        """The most ordinary batches that a batch can have."""
        return 1

    @property
    def step_share(self) -> float:
        """How many steps the run has, of those that it would have with ordinary batches, as far as
        that is known beforehand."""
        return 1.0

    @property
    def _scale(self) -> float:
        match self.scale:
            case "workers":
                return float(self.workers)
            case "square_root":
                return math.sqrt(self.workers)
            case number:
                return number

    @abstractmethod
    def _shape(self, epoch: float) -> float:
        """The fraction of the full rate at an epoch after the warm-up."""

    def _progress(self, epoch: float) -> float:
        """How far the epoch lies between the end of the warm-up, 0, and the end of the run, 1."""
        return (epoch - self.warmup) / (self.epochs - self.warmup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The full rate until the end."""

    name = "constant"
    description = "the same rate until the end"

    def _shape(self, epoch: float) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The rate drops by `gamma` at each epoch of `at`, by default at 1/2 and 3/4 of the run."""

    name = "step"
    description = "the rate is multiplied by gamma at the given epochs"

    at: tuple[float, ...] | None = None
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("step: gamma", self.gamma, 0.0)
        for epoch in self._drops:
            check_range("step: at", epoch, 0.0)
        if any(later <= earlier for earlier, later in pairwise(self._drops)):
            raise ConfigurationError(
                f"step: at must increase from one epoch to the next, got {self._drops_text}"
            )
        if self._drops and self._drops[0] < self.warmup:
            raise ConfigurationError(
                f"step: at must not begin before the warm-up ends, got at={self._drops_text}, "
                f"warmup={self.warmup:g}; shorten the warm-up or drop later"
            )

    @property
    def _drops(self) -> tuple[float, ...]:
        return (self.epochs / 2, self.epochs * 3 / 4) if self.at is None else self.at

    @property
    def _drops_text(self) -> str:
        return "/".join(f"{epoch:g}" for epoch in self._drops)

    def _shape(self, epoch: float) -> float:
        return self.gamma ** bisect.bisect_right(self._drops, epoch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from the full rate to `final` of it (Loshchilov and Hutter, 2017)."""

    name = "cosine"
    description = "half a cosine, from the full rate to the fraction final of it"

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("cosine: final", self.final, 0.0)

    def _shape(self, epoch: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * self._progress(epoch))) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """A straight line from the full rate to zero."""

    name = "linear"
    description = "a straight line, from the full rate to zero"

    def _shape(self, epoch: float) -> float:
        return 1 - self._progress(epoch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Step):
    """Batches grow instead of the rate falling (Smith, Kindermans, Ying and Le, 2018).

    At each epoch of `at`, where `step` would divide the rate by the factor `by`, the batch of every
    worker is multiplied by it, up to `most` ordinary batches; from there on the rate falls. With
    by=noise the batches of all workers together follow the noise scale of the gradients instead, in
    powers of two (McCandlish, Kaplan, Amodei et al., 2018): they never shrink, and the rate stays.
    """

    name = "growth"
    description = "the batch is multiplied by a factor at the given epochs, or follows the noise"

    by: int | Literal["noise"] = 5
    most: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("growth: most", self.most, 1)
        if self.by == "noise":
            if self.at is not None:
                raise ConfigurationError(
                    "growth: with by=noise the gradients say when batches grow, got at="
                    f"{self._drops_text}; leave one of them out"
                )
        elif self.by < 2:
            raise ConfigurationError(f"growth: by must be at least 2 or noise, got {self.by}")
        if self.gamma != Step.gamma:
            raise ConfigurationError("growth has no gamma; by says by how much batches grow")

    @property
    def is_growing(self) -> bool:
        return True

    def multiple(self, epoch: float, noise: float | None) -> int:
        if self.by == "noise":
            whole = int(min(noise or 1.0, self.most))
            return 1 << max(0, whole.bit_length() - 1)
        return min(self.most, self.by ** bisect.bisect_right(self._drops, epoch))

    @property
    def follows_noise(self) -> bool:
        return self.by == "noise"

    @property
    def largest_multiple(self) -> int:
        return self.most if self.by == "noise" else self.multiple(self.epochs, None)

    @property
    def step_share(self) -> float:
        if self.by == "noise":
            return 1.0
        marks = [0.0, *(one for one in self._drops if one < self.epochs), self.epochs]
        steps = sum((end - start) / self.multiple(start, None) for start, end in pairwise(marks))
        return steps / self.epochs

    def _shape(self, epoch: float) -> float:
        if self.by == "noise":
            return 1.0
        wanted = self.by ** bisect.bisect_right(self._drops, epoch)
        return self.multiple(epoch, None) / wanted


class BatchGrowth:
    """The batches of one run, which grow with its epochs or with the noise of its gradients."""

    def __init__(self, schedule: Schedule, samples: int, noise: Callable[[], float | None]) -> None:
        """`samples` are those of an ordinary step of all workers; `noise` says the noise scale."""
        self._schedule, self._samples, self._noise = schedule, samples, noise
        self.step_share = schedule.step_share
        self.now = 1
        """How many ordinary batches a batch has."""

    def at(self, epoch: float) -> int:
        """The same at an epoch; batches never shrink."""
        noise = self._noise()
        ratio = None if noise is None else noise / self._samples
        self.now = max(self.now, self._schedule.multiple(epoch, ratio))
        return self.now


_CLASSES: dict[str, type[Schedule]] = {
    schedule.name: schedule for schedule in (Constant, Step, Cosine, Linear, Growth)
}

SCHEDULES: dict[str, str] = {name: made.description for name, made in _CLASSES.items()}


def make_schedule(spec: str, *, epochs: float, workers: int) -> Schedule:
    """The schedule that a spec such as "step:at=81/122,warmup=5,scale=workers" describes."""
    name, given = parse_spec(spec, "schedule")
    if name not in _CLASSES:
        raise unknown_name("schedule", name, _CLASSES)
    options: dict[str, Any] = bind("schedule", name, _CLASSES[name], given)
    return _CLASSES[name](epochs, workers, **options)
