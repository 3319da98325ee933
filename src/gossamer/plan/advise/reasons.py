"""Why one candidate is slower than another: the samples that it needs, and its samples per second.

The time to the target is samples / samples per second + the time that collecting the mean takes.
How many samples a candidate needs is a matter of learning: staleness, workers that drift apart, the
learning rate. How many it processes per second is a matter of the machine: waiting, communication.
All figures are read from the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.runs.arrival import seconds_to
from gossamer.runs.result import Result
from gossamer.runs.statistics import show_number

_MATTERS = 1.05
"""A smaller ratio is not named as a reason."""
_STALE = 0.5
_LEAST = 1e-9


@dataclass(frozen=True)
class SlownessFactors:
    """Means over the seeds, up to the moment when the target is reached.

    Those of times, samples and throughputs are geometric, as in the ranking.
    """

    label: str
    total: float
    """Seconds to the target, collecting included."""
    samples: float
    throughput: float
    """Samples per second."""
    waiting: float
    """The share of the time in which a worker has nothing to compute."""
    cause: str
    """What most of the waiting is for."""
    staleness: float
    apart: float
    """The consensus distance."""
    bytes_per_step: float
    collecting: float
    """The seconds that it takes to collect the model that was scored."""


def parts(
    label: str, results: Sequence[Result], target: float, key: str, collecting: float = 0.0
) -> SlownessFactors | None:
    """The factors of a candidate; None unless every seed reaches the target."""
    found: list[tuple[float, ...]] = []
    causes: dict[str, float] = {}
    for result in results:
        history = result.history
        seconds = seconds_to(history, target, key)
        if seconds is None:
            return None
        row = next(row for row in history if row["virtual_seconds"] >= seconds)
        times = [float(one["virtual_seconds"]) for one in history]
        samples = float(np.interp(seconds, times, [float(one["samples"]) for one in history]))
        logs = np.log(np.maximum([seconds + collecting, samples, seconds], _LEAST))
        found.append(
            (
                logs[0],
                logs[1],
                logs[1] - logs[2],
                float(np.mean(row["waiting_seconds"])) / (row["virtual_seconds"] or 1.0),
                _staleness(row),
                float(row["consensus_distance"]),
                float(result.summary["bytes_per_step"]),
            )
        )
        for cause, waited in result.summary["waiting_by_cause"].items():
            causes[cause] = causes.get(cause, 0.0) + waited
    if not found:
        return None
    total, samples, pace, waiting, staleness, apart, sent = map(float, np.mean(found, axis=0))
    return SlownessFactors(
        label, math.exp(total), math.exp(samples), math.exp(pace), waiting,
        max(causes, key=lambda one: causes[one]) if causes else "",
        staleness, apart, sent, collecting,
    )  # fmt: skip


def _staleness(row: Mapping[str, Any]) -> float:
    """The updates of all workers where they were counted, else the worker's own.

    Not a number where neither was counted: every comparison with it is false, so that staleness is
    no reason.
    """
    known = [row.get("mean_global_staleness"), row.get("mean_staleness")]
    return next((float(found) for found in known if found is not None), math.nan)


def why(winner: SlownessFactors, loser: SlownessFactors) -> str:
    """One sentence: how much longer the loser takes, and from which of the factors."""
    samples, pace = loser.samples / winner.samples, winner.throughput / loser.throughput
    clauses: list[str] = []
    if samples >= _MATTERS:
        clauses.append(f"it needs {samples:.2f} times the samples{_learning(winner, loser)}")
    if pace >= _MATTERS:
        clauses.append(
            f"it processes {1 / pace:.2f} times the samples per second{_machine(winner, loser)}"
        )
    if loser.collecting - winner.collecting >= (_MATTERS - 1) * winner.total:
        clauses.append(
            f"the mean of its workers takes {show_number(loser.collecting)} s to collect, "
            f"{winner.label}'s model {show_number(winner.collecting)} s"
        )
    if not clauses:
        clauses.append("neither its pace nor its need of samples differs by more than 5 %")
    # What the loser is better at belongs to the reason, too.
    elif samples <= 1 / _MATTERS:
        clauses.append(
            f"that it needs only {samples:.2f} times the samples does not make up for it"
        )
    elif pace <= 1 / _MATTERS:
        clauses.append(
            f"that it is {1 / pace:.2f} times as quick per sample does not make up for it"
        )
    slower = f"{loser.label} takes {loser.total / winner.total:.2f} times as long as {winner.label}"
    return f"{slower}: {'; '.join(clauses)}."


def _learning(winner: SlownessFactors, loser: SlownessFactors) -> str:
    causes: list[str] = []
    if loser.staleness > max(_STALE, _MATTERS * winner.staleness):
        causes.append(
            f"its gradients are {loser.staleness:.1f} updates old against {winner.staleness:.1f}"
        )
    if loser.apart > _MATTERS * winner.apart and loser.apart > 0.01:
        causes.append(f"its workers are {loser.apart:.3f} apart against {winner.apart:.3f}")
    return f" ({'; '.join(causes)})" if causes else " at its best rate"


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
