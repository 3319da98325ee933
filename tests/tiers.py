"""Which cases every `make test` looks at, and which only `make test-all`: those marked `wide`.

A promise keeps at least one case that is not wide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import pytest

wide = pytest.mark.wide


def only(fast: Container[Any], cases: Iterable[Any], *, are_one: bool = False) -> list[Any]:
    """All cases; those that are not among the fast ones are wide. `are_one` for tuples that are
    one argument each."""
    return [
        case if case in fast else pytest.param(case, marks=wide) if are_one else _wide(case)
        for case in cases
    ]


def looks_at(
    request: pytest.FixtureRequest, wide_ones: Container[Any], cases: list[Any]
) -> list[Any]:
    """For a fixture that runs all cases at once: the wide ones are left out where no test that is
    selected asks for them."""
    is_wide = any(item.get_closest_marker("wide") for item in request.session.items)
    return cases if is_wide else [case for case in cases if case not in wide_ones]


def every(step: int, *axes: Sequence[Any]) -> list[Any]:
    """All combinations; one of `step` is not wide, with every value of every axis among them."""
    combinations = itertools.product(*(list(enumerate(axis)) for axis in axes))
    return [
        case if sum(place for place, _ in parts) % step == 0 else _wide(case)
        for parts in combinations
        for case in [parts[0][1] if len(parts) == 1 else tuple(value for _, value in parts)]
    ]


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], object]) -> list[Any]:
    """The first case of every kind."""
    found: dict[object, Any] = {}
    for case in cases:
        found.setdefault(kind(case), case)
    return list(found.values())


def _wide(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=wide)
