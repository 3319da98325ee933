"""What reaching a target costs, and which methods no other beats in time and money."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.runs.arrival import charged, seconds_to
from gossamer.runs.contest import Contest, Entry
from gossamer.runs.expense import (
    Expense,
    economy,
    pareto_front,
    show_dollars,
    show_joules,
    spent_to,
)
from gossamer.runs.kept_runs import Run
from histories import rows

maybe = st.none() | st.integers(0, 6).map(float)


def spent(label: str, seconds: float | None, dollars: float | None) -> Expense:
    return Expense(label, seconds, {"dollars": dollars}, {"dollars": dollars})


def priced(scores: list[float], rate: float, **more: Any) -> list[dict[str, Any]]:
    """A history that spends so many dollars a second, and 10 J."""
    return [
        {**row, "dollars": rate * row["virtual_seconds"], "joules": 10 * row["virtual_seconds"]}
        for row in rows(scores, **more)
    ]


@given(st.lists(st.tuples(maybe, maybe), max_size=7))
def test_the_front_is_what_no_other_beats(points: list[tuple[float | None, float | None]]) -> None:
    """Against the definition: on the front is who is faster or cheaper than every other one that
    differs, and whoever is not there is beaten by somebody who is."""
    found = [spent(f"m{at}", *point) for at, point in enumerate(points)]
    front = pareto_front(found)
    known = {
        one.label: (one.seconds, one.dollars)
        for one in found
        if one.seconds is not None and one.dollars is not None
    }
    times = [known[label] for label in front]
    assert times == sorted(times)
    for label, (seconds, dollars) in known.items():
        others = [point for point in known.values() if point != (seconds, dollars)]
        assert (label in front) == all(s > seconds or d > dollars for s, d in others)
    assert set(front) <= known.keys()
    assert bool(front) == bool(known)


@given(st.floats(0.1, 5.0), st.floats(0.05, 0.9))
def test_money_to_the_target_follows_the_time_to_it(rate: float, target: float) -> None:
    """Where money grows in proportion to time, so does the money to the target."""
    history = priced([0.0, 0.2, 0.5, 0.8, 0.9, 1.0], rate)
    seconds = seconds_to(history, target, "accuracy")
    assert seconds is not None
    assert spent_to(history, target, "accuracy", "dollars") == pytest.approx(rate * seconds)
    later = charged(history, 2.0, {"dollars": rate, "joules": 10.0})
    assert spent_to(later, target, "accuracy", "dollars") == pytest.approx(rate * (seconds + 2))
    assert spent_to(history, 1.1, "accuracy", "dollars") is None
    assert spent_to(rows([0.0, 1.0]), 0.5, "accuracy", "dollars") is None


def contest(**rates: float) -> Contest[Run]:
    """A fast method that pays one rate, and one half as fast that pays another."""
    entries = {
        label: Entry(
            label,
            {0.1: [Run(label, {}, {}, priced([0.0, 0.5, 1.0, 1.0], rate, seconds=1.0 + at))]},
        )
        for at, (label, rate) in enumerate(rates.items())
    }
    return Contest(entries, 0.5)


def test_the_sentence_names_the_cheapest_where_it_is_not_the_fastest() -> None:
    """With its price, its share of the fastest one's, and its loss of time."""
    said = contest(quick=4.0, thrifty=1.0).economy()
    assert said.startswith("thrifty is the cheapest: it reaches the target for $2.00, 50 % of what")
    assert "quick, the fastest, costs ($4.00), and takes 2 times as long" in said
    assert contest(quick=1.0, dear=4.0).economy() == "quick is also the cheapest, at $1.00."
    assert economy([]) == ""
    assert economy([spent("nobody", None, None)]) == ""


def test_a_ranking_has_the_columns_only_where_every_run_tells() -> None:
    """One method without prices takes them from all."""
    both = contest(quick=4.0, thrifty=1.0)
    assert [row["on_front"] for row in both.rows()] == [True, True]
    assert [row["dollars_to_target"] for row in both.rows()] == [4.0, 2.0]
    assert [row["joules"] for row in both.rows()] == [30.0, 60.0]
    both.entries["thrifty"].results[0.1][0].history[-1].pop("dollars")
    both.entries["thrifty"].results[0.1][0].history[-1].pop("joules")
    mixed = Contest(both.entries, 0.5)
    assert not mixed.expenses
    assert not {"dollars", "on_front", "joules_to_target"} & mixed.rows()[0].keys()


def test_amounts_are_shown_with_three_digits_and_a_unit() -> None:
    """Joules become kWh where people pay for them."""
    assert [show_dollars(value) for value in (0.00123, 12.3456, 45678.0, None)] == [
        "$0.00123", "$12.3", "$45,678", "-",
    ]  # fmt: skip
    assert [show_joules(value) for value in (12.0, 1234.0, 3.6e6, None)] == [
        "12.0 J", "1.23 kJ", "1.00 kWh", "-",
    ]  # fmt: skip
