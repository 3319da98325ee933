"""Published statements about who is ahead of whom, compared with our numbers.

Where a paper gives curves and no figures, only its words can be compared: a statement agrees, does
not agree, or cannot be judged because a number is missing or a difference could be chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gossamer.studies.reproductions.trainings import error_of

AGREES, DIFFERS, OPEN = "agrees", "does not agree", "cannot say"


@dataclass(frozen=True)
class Number:
    """One measured value and whose it is; None where it was not measured."""

    name: str
    value: float | None
    unit: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name} not trained"
        if math.isinf(self.value):
            return f"{self.name} not reached"
        return f"{self.name} {self.value:.4g} {self.unit}"


def accuracy_of(row: Mapping[str, object]) -> float:
    """The accuracy on the test set in %; NaN where the model diverged."""
    return 100.0 - error_of(row)


def accuracy(name: str, value: float | None) -> Number:
    """Name an accuracy. A model that diverged counts as worse than any other."""
    return Number(name, 0.0 if value is not None and math.isnan(value) else value, "%")


def moment(name: str, value: float | None, unit: str) -> Number:
    """Name the time of an event. An event that did not happen counts as later than any other."""
    return Number(name, math.inf if value is not None and math.isnan(value) else value, unit)


@dataclass(frozen=True)
class PartOfRun:
    """One comparison inside a statement."""

    finding: str
    text: str


@dataclass(frozen=True)
class Margin:
    """How far two numbers of one seed must be apart for their order to mean anything."""

    absolute: float = 0.0
    relative: float = 0.0

    def of(self, one: float, other: float) -> float:
        largest = max(abs(value) for value in (one, other))
        return max(self.absolute, self.relative * largest) if math.isfinite(largest) else 0.0


def less(where: str, small: Number, large: Number, margin: Margin) -> PartOfRun:
    """The claim that one number is clearly below another; infinity stands for never reached."""
    if small.value is None or large.value is None:
        return PartOfRun(OPEN, f"{where}: not trained")
    text = f"{where}: {small}, {large}"
    if small.value == large.value:
        return PartOfRun(OPEN, text)
    apart = large.value - small.value
    if abs(apart) <= margin.of(small.value, large.value):
        return PartOfRun(OPEN, f"{text} (too close)")
    return PartOfRun(AGREES if apart > 0 else DIFFERS, text)


def alike(where: str, one: Number, other: Number, margin: Margin) -> PartOfRun:
    """The claim that two numbers differ by no more than the margin."""
    if one.value is None or other.value is None:
        return PartOfRun(OPEN, f"{where}: not trained")
    text = f"{where}: {one}, {other}"
    if one.value == other.value == math.inf:
        return PartOfRun(OPEN, text)
    near = one.value == other.value or abs(one.value - other.value) <= margin.of(
        one.value, other.value
    )
    return PartOfRun(AGREES if near else DIFFERS, text)


def judged(statement: str, parts: Iterable[PartOfRun]) -> str:
    """Judge a statement: it differs if one part does, and agrees only if every part does."""
    parts = list(parts)
    found = {part.finding for part in parts}
    finding = next((one for one in (DIFFERS, OPEN) if one in found), AGREES)
    if not parts:
        finding = OPEN
    # Several parts may miss the same training; the line names it once.
    decisive = dict.fromkeys(part.text for part in parts if part.finding == finding)
    because = f" ({'; '.join(decisive)})" if decisive else ""
    return f"{statement}: {finding}{because}"
