"""The figures of a run as flat names and plain values, which tables and trackers can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gossamer.runs.json_files import number, numbers

Scalar = float | int | str | bool
Facts = dict[str, Scalar | None]

LABELS = ("method", "learning_rate", "seed")
"""What differs between the runs of a comparison; every row has it beside the run's name."""
_HISTOGRAMS = frozenset({"staleness", "staleness_histogram"})


def flat(row: Mapping[str, Any]) -> Facts:
    """Numbers and texts as they are; a list over workers as its mean, minimum and maximum.

    An object becomes one name for each member, such as `waiting_by_cause/reply`. Everything else
    (the bytes of each network card, histograms) stays in the run folder. NaN and infinity become
    None, as in the run folder.
    """
    found: Facts = {}
    for name, value in row.items():
        if name in _HISTOGRAMS:
            continue
        if isinstance(value, Mapping):
            found |= _members(name, cast(Mapping[str, Any], value))
        elif isinstance(value, list):
            found |= _spread(name, numbers(cast(list[Any], value)))
        elif isinstance(value, bool | str):
            found[name] = value
        elif value is None or isinstance(value, int | float):
            found[name] = value if number(value) is not None else None
    return found


def _members(name: str, value: Mapping[str, Any]) -> Facts:
    if value and all(key.isdecimal() for key in value):
        return _spread(name, numbers(list(value.values())))  # by worker
    return {f"{name}/{key}": one for key, one in flat(value).items()}


def _spread(name: str, values: list[float]) -> Facts:
    if not values:
        return {}
    mean = sum(values) / len(values)
    return {f"{name}_mean": mean, f"{name}_min": min(values), f"{name}_max": max(values)}


def timed(row: Mapping[str, Any]) -> Facts:
    """An evaluation or a summary with epochs and seconds first, virtual or real."""
    known = flat(row)
    virtual, seconds = known.pop("virtual_seconds", None), known.pop("seconds", None)
    first: Facts = {
        "epochs": known.pop("epochs", None),
        "seconds": virtual if seconds is None else seconds,
    }
    return first | known


def labels(*sources: Mapping[str, Any]) -> Facts:
    """The labels of a run, each from the first source that has it."""
    known = [flat(source) for source in sources]
    return {
        name: next((one[name] for one in known if one.get(name) is not None), None)
        for name in LABELS
    }
