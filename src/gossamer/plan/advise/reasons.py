"""Why one candidate is slower than another: samples it needs, times what a sample takes.

seconds to target = samples to target / samples per second + collecting the mean. The first is a
matter of learning (staleness, workers that drift apart, the rate), the second of the machine
(waiting, communication). All of it is read off the runs; nothing here is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.runs.arrival import History, seconds_to
from gossamer.runs.result import Result
from gossamer.runs.statistics import show_number

_MATTERS = 1.05
_STALE = 0.5


@dataclass(frozen=True)
class SlownessFactors:
    """Means over the seeds, up to the moment when the target is reached."""

    label: str
    seconds: float
    samples: float
    waiting: float
    """Share of the time in which a worker has nothing to compute."""
    cause: str
    """What most of the waiting is for."""
    staleness: float
    apart: float
    """Consensus distance."""
    bytes_per_step: float
    collecting: float = 0.0
    """Seconds that it takes to have the model that was scored."""

    @property
    def total(self) -> float:
        return self.seconds + self.collecting

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else math.inf


def parts(
    label: str, results: Sequence[Result], target: float, key: str, collecting: float = 0.0
) -> SlownessFactors | None:
    """None unless every seed reaches the target."""
    found: list[tuple[float, ...]] = []
    causes: dict[str, float] = {}
    for result in results:
        seconds = seconds_to(result.history, target, key)
        if seconds is None:
            return None
        row = _first_after(result.history, seconds)
        passed = float(row["virtual_seconds"]) or 1.0
        found.append(
            (
                seconds,
                _samples_at(result.history, seconds),
                float(np.mean(row["waiting_seconds"])) / passed,
                _staleness(row),
                float(row["consensus_distance"]),
                float(result.summary["bytes_per_step"]),
            )
        )
        for cause, waited in result.summary["waiting_by_cause"].items():
            causes[cause] = causes.get(cause, 0.0) + waited
    if not found:
        return None
    seconds, samples, waiting, staleness, apart, sent = (float(v) for v in np.mean(found, axis=0))
    cause = max(causes, key=lambda one: causes[one]) if causes else ""
    return SlownessFactors(
        label, seconds, samples, waiting, cause, staleness, apart, sent, collecting
    )


def _staleness(row: Mapping[str, Any]) -> float:
    """Updates of all workers where they were counted, which is what a server counts; else the
    worker's own. Not a number where neither was, which compares as no reason."""
    known = [row.get("mean_global_staleness"), row.get("mean_staleness")]
    return next((float(found) for found in known if found is not None), math.nan)


def _first_after(history: History, seconds: float) -> Any:
    return next(row for row in history if row["virtual_seconds"] >= seconds)


def _samples_at(history: History, seconds: float) -> float:
    times = [float(row["virtual_seconds"]) for row in history]
    return float(np.interp(seconds, times, [float(row["samples"]) for row in history]))


def why(winner: SlownessFactors, loser: SlownessFactors) -> str:
    """One sentence: how much longer, and from which of the two factors."""
    slower = loser.total / winner.total if winner.total else math.inf
    samples = loser.samples / winner.samples if winner.samples else math.inf
    pace = winner.throughput / loser.throughput if loser.throughput else math.inf
    said = [f"{loser.label} takes {slower:.2f} times as long as {winner.label}"]
    clauses: list[str] = []
    if samples >= _MATTERS:
        clauses.append(f"it needs {samples:.2f} times the samples{_learning(winner, loser)}")
    if pace >= _MATTERS:
        clauses.append(
            f"it gets through {1 / pace:.2f} times the samples a second{_machine(winner, loser)}"
        )
    later = loser.collecting - winner.collecting
    if later >= (_MATTERS - 1) * winner.total:
        clauses.append(
            f"the mean of its workers takes {show_number(loser.collecting)} s to collect, "
            f"{winner.label}'s model {show_number(winner.collecting)} s"
        )
    if not clauses:
        clauses.append("neither its pace nor its need of samples differs by more than 5 %")
    # What it is better at belongs to the reason: the trade did not pay.
    elif samples <= 1 / _MATTERS:
        clauses.append(
            f"that it needs only {samples:.2f} times the samples does not make up for it"
        )
    elif pace <= 1 / _MATTERS:
        clauses.append(
            f"that it is {1 / pace:.2f} times as quick per sample does not make up for it"
        )
    return f"{said[0]}: " + "; ".join(clauses) + "."


def _learning(winner: SlownessFactors, loser: SlownessFactors) -> str:
    causes: list[str] = []
    if loser.staleness > max(_STALE, _MATTERS * winner.staleness):
        causes.append(
            f"its gradients are {loser.staleness:.1f} updates old against {winner.staleness:.1f}"
        )
    if loser.apart > _MATTERS * winner.apart and loser.apart > 0.01:
        causes.append(f"its workers are {loser.apart:.3f} apart against {winner.apart:.3f}")
    return f" ({'; '.join(causes)})" if causes else " at its best rate of the grid"


def _machine(winner: SlownessFactors, loser: SlownessFactors) -> str:
    causes: list[str] = []
    if loser.waiting > winner.waiting + 0.01:
        cause = f", mostly for {loser.cause}" if loser.cause else ""
        causes.append(
            f"it waits {100 * loser.waiting:.0f} % of the time{cause}, "
            f"{winner.label} {100 * winner.waiting:.0f} %"
        )
    if loser.bytes_per_step > _MATTERS * winner.bytes_per_step:
        causes.append(
            f"it sends {show_number(loser.bytes_per_step / 1e3)} kB a step against "
            f"{show_number(winner.bytes_per_step / 1e3)} kB"
        )
    return f" ({'; '.join(causes)})" if causes else ""
