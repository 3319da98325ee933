"""The time of a gradient as a line over the batch: fixed seconds, and seconds per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLine:
    """The line through the time at one size of the batch, nearest to those at other sizes."""

    per_sample: float
    times: dict[int, float]
    """What it was drawn through, by size of the batch."""
    error: float
    """How far the line is from the worst of them."""


def batch_line(batch: int, seconds: float, others: Mapping[int, float]) -> BatchLine | None:
    """Through the time at this batch, with the least squares at the others; None without any.

    A sample takes no more than its share of a step, and not less than nothing.
    """
    if not others:
        return None
    rise = sum((size - batch) * (took - seconds) for size, took in others.items())
    slope = rise / sum((size - batch) ** 2 for size in others)
    slope = min(max(0.0, slope), seconds / batch)
    error = max(abs((seconds + slope * (size - batch)) / took - 1) for size, took in others.items())
    return BatchLine(slope, dict(sorted({**others, batch: seconds}.items())), error)


def other_sizes(batch: int, most: int) -> list[int]:
    """A smaller and a larger batch, from which the time of one more sample follows."""
    return sorted({max(1, batch // 4), max(1, min(2 * batch, most))} - {batch})
