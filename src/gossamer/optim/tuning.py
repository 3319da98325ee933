"""Hyper-parameters that a method changes during a run, each by a factor of its own.

A factor stands beside what was asked for, so schedules and a user's own changes go on. Of a share
below 1, such as a momentum, the factor scales its distance from 1: 0.9 times 0.5 is 0.95.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gossamer.optim.optimiser import Optimiser

RATE, SCHEDULE = "learning_rate", "schedule"
_SCALED = ("weight_decay", "trust")
_SHARES = ("momentum", "beta1", "beta2", "alpha")
_LEAST_SHARE = 1e-6
"""Never 0, because an optimiser without momentum has no memory for it."""


def tunable_names(options: Mapping[str, Any], *, has_schedule: bool) -> tuple[str, ...]:
    """The learning rate, the numbers of an optimiser that are not 0, and, where there is one, the
    pace of the schedule: how many of its epochs pass in one."""
    own = [name for name in (*_SCALED, *_SHARES) if _is_number(options.get(name))]
    return (RATE, *own, *([SCHEDULE] if has_schedule else []))


def _is_number(value: object) -> bool:
    return isinstance(value, float) and value != 0.0


def tuned_value(name: str, value: float, factor: float) -> float:
    """What a factor makes of a value."""
    if factor == 1.0:
        return value
    if name in _SHARES:
        return max(_LEAST_SHARE, 1.0 - (1.0 - value) * factor)
    return value * factor


def tuned_optimiser(asked: Optimiser, factors: Mapping[str, float]) -> Optimiser:
    """The optimiser with its own numbers changed; the learning rate is not among them."""
    own = {
        name: tuned_value(name, getattr(asked, name), factor)
        for name, factor in factors.items()
        if name not in (RATE, SCHEDULE)
    }
    return dataclasses.replace(asked, **own) if own else asked
