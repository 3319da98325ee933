"""Workers of an elastic run that come during the run: which, when, and as which life.

    gossamer run --elastic 2:8 -n 4 ...      keeps four workers alive here; four more may attach
    gossamer run --attach HOST:PORT -n 2 ... adds two

A worker that dies comes back after a short pause, and so does one that ends with an error. The
pauses double while its lives stay short, and after a few short lives in a row it stays away: what
fails at once will fail again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec

_PAUSE_S = 0.2
_SHORT_S = 10.0
"""A life that lasts less is a short one."""
_SHORT_LIVES = 4
MOST_WORKERS = 256


@dataclass(frozen=True)
class Elastic:
    """How few workers a run goes on with, and for how many there is a place."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> Elastic:
        least, _, most = text.partition(":")
        if not (least.isdecimal() and most.isdecimal()):
            raise ConfigurationError(
                f"--elastic must be LEAST:MOST workers such as 2:8, got {text!r}"
            )
        if not 1 <= int(least) <= int(most) <= MOST_WORKERS:
            raise ConfigurationError(
                f"--elastic must be at least 1 and at most {MOST_WORKERS} workers, the smaller "
                f"number first, got {text!r}"
            )
        return Elastic(int(least), int(most))


def why_not_elastic(spec: MethodSpec, options: Mapping[str, Any]) -> str | None:
    """The sentence that refuses a method whose workers must stay those of the beginning."""
    if spec.method.is_synchronous(options):
        why = "its workers step together, and who comes later would not be in step"
    elif spec.groups:
        why = "its groups are made of the workers of the beginning"
    elif spec.shape.machines > 1:
        why = "its replicas are made of the workers of the beginning"
    elif spec.balance:
        why = "its shares of the data are those of the workers of the beginning"
    else:
        return None
    return (
        f"{spec} cannot have workers that come during the run: {why}; take an asynchronous method "
        "without groups, such as ad_psgd, or leave out --elastic"
    )


@dataclass
class Revivals:
    """When the workers of one launcher that have died are to come back."""

    least: int
    """With fewer workers than this the run cannot go on."""
    _due: dict[int, float] = field(default_factory=dict[int, float])
    """By rank, on the monotonic clock."""
    _short: dict[int, int] = field(default_factory=dict[int, int])
    """How many short lives in a row each rank has had."""

    def __bool__(self) -> bool:
        return bool(self._due)

    @property
    def ranks(self) -> frozenset[int]:
        """Those who are to come back."""
        return frozenset(self._due)

    @property
    def next(self) -> float:
        """When the next one is due."""
        return min(self._due.values())

    def ended(self, rank: int, lived_s: float) -> bool:
        """A life has ended otherwise than well. Return whether the worker comes back."""
        short = self._short[rank] = self._short.get(rank, 0) + 1 if lived_s < _SHORT_S else 1
        if short > _SHORT_LIVES:
            return False
        self.at(rank, time.monotonic() + _PAUSE_S * 2 ** (short - 1))
        return True

    def at(self, rank: int, moment: float) -> None:
        self._due[rank] = moment

    def take(self) -> list[int]:
        """The ranks that are due now."""
        now = time.monotonic()
        ranks = sorted(rank for rank, moment in self._due.items() if moment <= now)
        for rank in ranks:
            del self._due[rank]
        return ranks

    def clear(self) -> None:
        self._due.clear()
