"""Time to a target against bandwidth: the best of each kind of method, from thin links to fat ones.

What a synchronous method computes does not depend on time. So it is trained once, which says how
many samples it needs, and what these take at each bandwidth follows from runs without gradients.
An asynchronous method goes another way on every network and is trained at a few of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gossamer.config.settings import Settings
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec, parse_method
from gossamer.runs.arrival import History, moment, smoothed
from gossamer.sim.simulation import Simulation
from gossamer.tasks.metric import ScoreKey

METHODS = (
    "all_reduce", "all_reduce+bf16", "all_reduce+int8", "all_reduce+topk:share=0.01",
    "all_reduce+powersgd:rank=2", "local_sgd:period=10", "diloco:period=30",
    "diloco:period=30+int4", "sparse_loco:period=30", "d_psgd", "ad_psgd",
    "downpour+topk:share=0.01",
)  # fmt: skip
"""One of each kind, and a few whose bits differ."""
_BYTE = 8
BANDWIDTHS = tuple(float(f"{bits / _BYTE:.4g}") for bits in np.logspace(6, 11, 16))
"""Bytes a second: 1 Mbit/s to 100 Gbit/s, three to a decade."""
TRAINED_AT = tuple(BANDWIDTHS[at] for at in (0, 4, 8, 12, 15))
"""Those at which asynchronous methods are trained."""
_TIMED_STEPS = 120
"""A run without gradients is so long, or four periods of its method; the rest goes on like it."""
_TARGET_SHARE = 0.7
_CLEARLY = 1.1
"""A kind is ahead of another where it is faster by this factor."""


def kind_of(spec: MethodSpec) -> str:
    """The kind of a method: whom it meets how often, and whether in fewer bits."""
    if spec.method.family == "local updates":
        kind = "local steps"
    elif spec.method.family == "synchronous":
        kind = "all-reduce"
    else:
        kind = "servers" if spec.method.has_server else "gossip"
    return f"{kind}, fewer bits" if spec.compressor is not None else kind


@dataclass(frozen=True)
class BandwidthRun:
    """One training of the study."""

    method: str
    rate: float
    bandwidth: float | None
    """None: of a synchronous method, whose way does not depend on it."""

    @property
    def label(self) -> str:
        where = "" if self.bandwidth is None else f", {show_bandwidth(self.bandwidth)}"
        return f"{self.method} at {self.rate:g}{where}"


@dataclass(frozen=True)
class BandwidthCurve:
    """One method: seconds to the target at each bandwidth; None where it was not trained or does
    not reach it."""

    method: str
    kind: str
    rates: tuple[float | None, ...]
    """The learning rate that was best there."""
    seconds: tuple[float | None, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class BandwidthStudy:
    """What is trained, and what it means for each bandwidth."""

    base: Settings
    """All but the method, the rate and the bandwidth."""
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    target: float | None = None
    """None: what the first method holds after seven tenths of its run."""

    def __post_init__(self) -> None:
        if self.base.cluster.sites.names:
            raise ConfigurationError(
                f"cluster {self.base.cluster.name} has sites, whose links one bandwidth cannot "
                "describe; choose a cluster without [sites]"
            )
        if not self._is_timeless(self.methods[0]):
            raise ConfigurationError(
                f"{self.methods[0]} cannot be the first method, whose run sets the target, because "
                "it is asynchronous; put all_reduce first"
            )

    @property
    def key(self) -> ScoreKey:
        return self.base.task.score

    def _is_timeless(self, method: str) -> bool:
        settings = self.settings(BandwidthRun(method, self.rates[0], None))
        return settings.method.method.is_synchronous(settings.method_options())

    def settings(self, run: BandwidthRun) -> Settings:
        """The settings of one training."""
        cluster = self.base.cluster
        if run.bandwidth is not None:
            wires = dataclasses.replace(cluster.network, bandwidth=run.bandwidth)
            cluster = dataclasses.replace(cluster, network=wires)
        return dataclasses.replace(
            self.base, method=parse_method(run.method), learning_rate=run.rate, cluster=cluster
        ).resolved()

    def runs(self) -> list[BandwidthRun]:
        """All trainings, the first method first."""
        return [
            BandwidthRun(method, rate, at)
            for method in self.methods
            for at in ((None,) if self._is_timeless(method) else TRAINED_AT)
            for rate in self.rates
        ]

    def target_of(self, histories: Mapping[str, History]) -> float:
        """The target, from the first method's best run if nobody gave one; NaN if none ended."""
        if self.target is not None:
            return self.target
        every = [BandwidthRun(self.methods[0], rate, None).label for rate in self.rates]
        scores: list[float] = []
        for history in (histories[label] for label in every if label in histories):
            epochs, _, averages = smoothed(history, self.key)
            if len(epochs) and not math.isnan(averages[-1]):
                scores.append(float(np.interp(_TARGET_SHARE * epochs[-1], epochs, averages)))
        if not scores:
            return math.nan
        return float(f"{(min if self.key == 'loss' else max)(scores):.4g}")

    def curve(self, method: str, histories: Mapping[str, History], target: float) -> BandwidthCurve:
        """What one method's trainings say about every bandwidth."""
        is_timeless = self._is_timeless(method)
        best: dict[float | None, tuple[float, float, float]] = {}
        for run in (one for one in self.runs() if one.method == method):
            found = moment(histories.get(run.label, ()), target, self.key)
            if found is not None:
                own = (found[0] if is_timeless else found[1], found[0], run.rate)
                best[run.bandwidth] = min(best.get(run.bandwidth, own), own)
        rates: list[float | None] = []
        seconds: list[float | None] = []
        for at in BANDWIDTHS:
            known = best.get(None if is_timeless else at)
            rates.append(None if known is None else known[2])
            if known is None or not is_timeless:
                seconds.append(None if known is None else known[0])
            else:
                seconds.append(self._timed(BandwidthRun(method, known[2], at), known[1]))
        if not is_timeless:
            seconds = _between(seconds)
        return BandwidthCurve(method, kind_of(parse_method(method)), tuple(rates), tuple(seconds))

    def _timed(self, run: BandwidthRun, epochs: float) -> float:
        """The time of so many epochs, without gradients."""
        settings = self.settings(run)
        period = max(int(settings.method_options().get(key, 1)) for key in ("period", "inner"))
        samples = len(settings.task.train) / (settings.batch or 1) / settings.cluster.workers
        steps = max(_TIMED_STEPS, 4 * period) // period * period
        short = min(epochs, steps / samples)
        timed = dataclasses.replace(settings, epochs=short, engine="none", evaluations=1)
        return Simulation(timed).run().virtual_seconds * epochs / short


def _between(seconds: Sequence[float | None]) -> list[float | None]:
    """Straight lines of logarithms between neighbouring bandwidths at which a method was trained;
    nothing beside one at which it does not arrive."""
    trained = [BANDWIDTHS.index(at) for at in TRAINED_AT]
    found = list(seconds)
    for first, last in pairwise(trained):
        start, end = seconds[first], seconds[last]
        if start is not None and end is not None:
            for at in range(first + 1, last):
                share = (at - first) / (last - first)
                found[at] = start ** (1 - share) * end**share
    return found


def best_of_kinds(curves: Sequence[BandwidthCurve]) -> dict[str, list[tuple[float, str] | None]]:
    """For each kind its fastest method at each bandwidth, with its seconds."""
    found: dict[str, list[tuple[float, str] | None]] = {}
    for curve in curves:
        best = found.setdefault(curve.kind, [None] * len(curve.seconds))
        for at, seconds in enumerate(curve.seconds):
            if seconds is not None:
                own = (seconds, curve.method)
                best[at] = min(best[at] or own, own)
    return found


def findings(curves: Sequence[BandwidthCurve]) -> list[str]:
    """Where all-reduce ends, where local steps begin, and where bits are needed."""
    kinds = best_of_kinds(curves)
    whole = {kind: best for kind, best in kinds.items() if not kind.endswith("bits")}
    few = {kind: best for kind, best in kinds.items() if kind.endswith("bits")}
    rivals = {kind: best for kind, best in kinds.items() if kind != "all-reduce"}
    local = {kind: best for kind, best in kinds.items() if kind.startswith("local")}
    every_step = {kind: best for kind, best in kinds.items() if not kind.startswith("local")}
    plain = {kind: best for kind, best in kinds.items() if kind == "all-reduce"}
    return [
        _sentence("all-reduce of whole gradients ends", rivals, plain),
        _sentence("local steps begin", local, every_step),
        _sentence("fewer bits are needed", few, whole),
    ]


_Best = Mapping[str, Sequence[tuple[float, str] | None]]


def _fastest(kinds: _Best, at: int) -> float:
    return min((own[0] for best in kinds.values() if (own := best[at])), default=math.inf)


def _sentence(what: str, ahead: _Best, behind: _Best) -> str:
    """The largest bandwidth from which on down the one is clearly faster than the other."""
    largest: float | None = None
    for at, bandwidth in enumerate(BANDWIDTHS):
        if not _CLEARLY * _fastest(ahead, at) < _fastest(behind, at):
            break
        largest = bandwidth
    if largest is None:
        return f"{what}: nowhere here"
    times = _fastest(behind, 0) / _fastest(ahead, 0)
    gain = f"{times:.3g} times as fast" if math.isfinite(times) else "the others do not arrive"
    return (
        f"{what}: at {show_bandwidth(largest)} and below; at {show_bandwidth(BANDWIDTHS[0])} {gain}"
    )


def show_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in bits."""
    bits = _BYTE * bytes_per_second
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.999 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
