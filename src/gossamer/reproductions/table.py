"""What a published table is, and what a reproduction of it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One number of a table, theirs and ours."""

    row: str
    column: str
    published: float | None
    """None where the paper gives no number for the cell."""
    ours: float
    evidence: str = ""
    """How we know the published number: read in the paper, or quoted from memory of it."""

    @property
    def deviation(self) -> float | None:
        return None if self.published is None else self.ours / self.published - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "column": self.column,
            "published": self.published,
            "ours": self.ours,
            "deviation": self.deviation,
            "evidence": self.evidence,
        }


Progress = Callable[[str], None]


@dataclass(frozen=True)
class PublishedTable:
    """A table that `gossamer reproduce` can compute."""

    name: str
    title: str
    source: str
    unit: str
    settings: str
    """Every setting that matters, and what the paper leaves open and we chose."""
    cells: int
    compute: Callable[[int, Progress], list[Cell]]
    """From a seed; calls back after each cell."""
