"""Staleness against waiting: parameter servers with random or permanent stragglers.

A server that waits for everybody wastes time, one that waits for nobody gets stale gradients. Which
is worse depends on the kind of straggler, so the same methods meet three: random ones, one worker
that is slow for ever, and step times without memory. Speed is measured without gradients, as no
method decides by their values; what a sample is worth is measured by training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.settings import Settings, make_settings
from gossamer.runs.statistics import (
    History,
    Interval,
    curve,
    final,
    interval,
    is_lower_better,
    measure,
)
from gossamer.sim.kernel import SECOND
from gossamer.sim.simulation import Simulation
from gossamer.specs import check_range
from gossamer.tasks import Task

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STEPS = 200
# The fast workers of SSP with bound 16 must reach their bound before the second half of the run.
_FEWEST_STEPS = 40
# All methods share one optimiser, so that only waiting and staleness differ: by default some
# servers have momentum and others do not, and backup workers evaluate a moving average.
OPTIMISER = "sgd"
_SPECS = {"backup_workers": "backup_workers:decay=0"}
DIAL = ("sync_server", "backup_workers", "ssp:bound=1", "ssp:bound=4", "softsync", "downpour")
BOUNDS = ("ssp:bound=1", "ssp:bound=4", "ssp:bound=16")
_SAME_PACE = 0.1
_ANOTHER_PACE = 2.0
RANDOM, PERMANENT, MEMORYLESS = "random", "permanent", "exponential"


@dataclass(frozen=True)
class StragglerScene:
    """One kind of straggler, and the methods that train with it."""

    name: str
    title: str
    cluster: Cluster
    methods: tuple[str, ...] = DIAL
    trains: bool = True
    """Whether models are trained, or only times are taken."""
    slowest_pace: float | None = None
    """Gradients per second if all workers were as slow as the slow one."""


def scenes(workers: int) -> tuple[StragglerScene, ...]:
    """Make the three kinds of stragglers for so many workers."""
    check_range("workers", workers, 2)
    random = load_cluster("random-stragglers-16").changed(workers=workers)
    permanent = load_cluster("one-slow-of-16").changed(workers=workers)
    usual, slow = random.compute, permanent.faults[0].amount
    memoryless = dataclasses.replace(usual, distribution="exponential", pause_probability=0.0)
    milliseconds = 1000 * usual.seconds
    return (
        StragglerScene(
            RANDOM,
            f"Random stragglers: a step of {milliseconds:g} ms takes "
            f"{1000 * usual.pause_seconds:g} ms longer with probability "
            f"{100 * usual.pause_probability:g} %",
            random,
        ),
        StragglerScene(
            PERMANENT,
            f"Permanent straggler: worker {permanent.faults[0].worker} takes {slow:g} times as "
            "long for every step",
            permanent,
            ("sync_server", "backup_workers", *BOUNDS, "softsync", "downpour"),
            slowest_pace=workers / (permanent.compute.seconds * slow),
        ),
        StragglerScene(
            MEMORYLESS,
            f"Exponential times: {milliseconds:g} ms a step on average",
            dataclasses.replace(random, compute=memoryless),
            trains=False,
        ),
    )


@dataclass(frozen=True)
class StragglerPace:
    """The times of one run without gradients."""

    throughput: float
    """Gradients that entered the parameters per virtual second, without dropped ones."""
    late_throughput: float
    """The throughput of the second half, when the workers of SSP have reached their bound."""
    waiting: float
    dropped: float
    """The share of gradients that were dropped."""
    mean_staleness: float | None
    max_staleness: float | None
    max_clock_gap: float | None
    """None where the method counts no clocks, as `max_queue` where it has no queue."""
    max_queue: float | None


def pace(settings: Settings) -> StragglerPace:
    """Run once, and note the time after every gradient."""
    simulation = Simulation(settings)
    world = simulation.world
    moments: list[tuple[int, int]] = [(0, 0)]

    def look() -> None:
        dropped = world.metrics.told_of("dropped").count
        moments.append((world.kernel.now, world.metrics.steps - dropped))

    world.on_progress = look
    summary = simulation.run().summary
    end_ns, used = moments[-1]
    half_ns, before = next(moment for moment in moments if moment[0] >= end_ns / 2)
    return StragglerPace(
        throughput=used * SECOND / end_ns,
        late_throughput=(used - before) * SECOND / (end_ns - half_ns),
        waiting=summary["waiting_fraction"],
        dropped=summary["dropped_gradients"] / summary["steps"],
        mean_staleness=summary["mean_staleness"],
        max_staleness=summary["max_staleness"],
        max_clock_gap=summary["max_clock_gap"],
        max_queue=summary["max_queue"],
    )


@dataclass
class StragglerEntry:
    """The runs of one method in one scene, over all seeds."""

    label: str
    paces: list[StragglerPace] = field(default_factory=list[StragglerPace])
    histories: dict[float, list[History]] = field(default_factory=dict[float, list[History]])
    """The histories of all seeds by learning rate."""

    def over_seeds(self, name: str) -> Interval:
        """The mean of one number of `StragglerPace` over the seeds, with its interval."""
        return interval([float(getattr(one, name)) for one in self.paces])

    def knows(self, name: str) -> bool:
        """Whether every run has this number."""
        return all(getattr(one, name) is not None for one in self.paces)

    @property
    def best_rate(self) -> float:
        """The rate with the best score on average over the run, the smaller one of equals."""
        key = self.key

        def order(rate: float) -> tuple[float, float]:
            mean = self.average(rate).mean
            worse = mean if is_lower_better(key) else -mean
            return math.inf if math.isnan(mean) else float(f"{worse:.6g}"), rate

        return min(self.histories, key=order)

    @property
    def is_at_edge(self) -> bool:
        """Whether a wider grid might hold a better rate."""
        ends = (min(self.histories), max(self.histories))
        return len(self.histories) > 2 and self.best_rate in ends

    @property
    def key(self) -> str:
        return measure([history for runs in self.histories.values() for history in runs])

    def final(self, rate: float) -> Interval:
        """The score at the end of training."""
        return interval([final(history, self.key) for history in self.histories[rate]])

    def average(self, rate: float) -> Interval:
        """The mean score over all epochs, which counts progress on the way, too."""
        return interval([_average(history, self.key) for history in self.histories[rate]])

    def as_dict(self) -> dict[str, Any]:
        described: dict[str, Any] = {"method": self.label}
        for one in dataclasses.fields(StragglerPace):
            known = self.knows(one.name)
            described[one.name] = dataclasses.asdict(self.over_seeds(one.name)) if known else None
        if self.histories:
            described["learning_rate"] = self.best_rate
            described[self.key] = dataclasses.asdict(self.final(self.best_rate))
            described[f"mean_{self.key}"] = dataclasses.asdict(self.average(self.best_rate))
            described["grid"] = {f"{rate:g}": self.average(rate).mean for rate in self.histories}
        return described


def _average(history: History, key: str) -> float:
    epochs, scores = curve(history, key, "epochs")
    if len(epochs) < len({row["epochs"] for row in history}):
        return math.nan  # the earlier scores of a diverged run do not count
    widths = np.diff(epochs)
    return float((widths * (scores[1:] + scores[:-1]) / 2).sum() / widths.sum())


# ---------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class StragglerRun:
    """One run, which takes times, or trains at a learning rate."""

    scene: StragglerScene
    label: str
    settings: Settings
    rate: float | None = None


@dataclass(frozen=True)
class Study:
    """All runs: every method in every scene with every seed, and at every rate if it trains."""

    task: Task
    scenes: Sequence[StragglerScene]
    seeds: Sequence[int]
    rates: Sequence[float] = RATES
    epochs: float | None = None
    steps: int = STEPS
    """The steps of each worker in the runs without gradients."""

    def jobs(self) -> list[StragglerRun]:
        """Make all runs, and check them before any of them starts."""
        check_range("steps", self.steps, _FEWEST_STEPS)
        return [
            job
            for scene in self.scenes
            for method in scene.methods
            for seed in self.seeds
            for job in self._jobs(scene, method, seed)
        ]

    def _jobs(self, scene: StragglerScene, method: str, seed: int) -> Iterator[StragglerRun]:
        task, cluster = self.task, scene.cluster
        epochs = self.steps * cluster.workers * task.batch / len(task.train)
        spec = _SPECS.get(method, method)
        timed = make_settings(
            task, spec, cluster, seed=seed, epochs=epochs, optimiser=OPTIMISER, engine="none"
        )
        yield StragglerRun(scene, method, timed)
        for rate in self.rates if scene.trains else ():
            trained = make_settings(
                task, spec, cluster, seed=seed, epochs=self.epochs, optimiser=OPTIMISER,
                learning_rate=rate,
            )  # fmt: skip
            yield StragglerRun(scene, method, trained, rate)


Found = Mapping[str, Mapping[str, StragglerEntry]]
"""The entries by scene and method."""


# ---------------------------------------------------------------------- what is claimed


@dataclass(frozen=True)
class Claim:
    """A statement about these methods, and whether our measurement supports it."""

    scene: str
    statement: str
    verdict: str
    """holds, does not hold, or open: the interval of the seeds allows both."""
    measured: Interval
    unit: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def claims(found: Found) -> list[Claim]:
    """Judge the order of methods with random stragglers, and their pace with a permanent one."""
    made: list[Claim] = []
    for scene in (RANDOM, MEMORYLESS):
        if scene in found:
            made += _dial_claims(scene, found[scene])
    if PERMANENT in found:
        made += _pace_claims(found[PERMANENT])
    return made


def _dial_claims(scene: str, entries: Mapping[str, StragglerEntry]) -> list[Claim]:
    sync, backup, tight, loose, softsync, downpour = (entries[name] for name in DIAL)
    steps = ((sync, backup), (backup, tight), (tight, loose), (loose, softsync), (loose, downpour))
    made: list[Claim] = []
    for name, relation, scale, unit in (
        ("throughput", "<", 1.0, "gradients/s"),
        ("waiting", ">", -100.0, "% of time"),
    ):
        for less, more in steps:
            # Differences are taken seed by seed, because a seed may slow all methods alike.
            pairs = zip(less.paces, more.paces, strict=True)
            gain = interval([scale * (getattr(b, name) - getattr(a, name)) for a, b in pairs])
            statement = f"{name}: {less.label} {relation} {more.label}"
            verdict = _verdict(gain.low > 0, gain.high <= 0)
            made.append(Claim(scene, statement, verdict, gain, unit))
    return made


def _pace_claims(entries: Mapping[str, StragglerEntry]) -> list[Claim]:
    sync = entries["sync_server"]
    others = [label for label in entries if label != sync.label and label not in BOUNDS]
    made: list[Claim] = []
    for label in (*BOUNDS, *others):
        pairs = zip(entries[label].paces, sync.paces, strict=True)
        ratio = interval([own.late_throughput / waits.late_throughput for own, waits in pairs])
        if label in BOUNDS:
            statement = f"{label} ends at sync_server's pace ± {100 * _SAME_PACE:g} %"
            holds = max(abs(ratio.low - 1), abs(ratio.high - 1)) <= _SAME_PACE
            fails = ratio.low > 1 + _SAME_PACE or ratio.high < 1 - _SAME_PACE
        else:
            statement = f"{label} ends {_ANOTHER_PACE:g} times as fast or faster"
            holds, fails = ratio.low >= _ANOTHER_PACE, ratio.high < _ANOTHER_PACE
        made.append(Claim(PERMANENT, statement, _verdict(holds, fails), ratio, "times"))
    return made


def _verdict(holds: bool, fails: bool) -> str:
    return "holds" if holds else "does not hold" if fails else "open"
