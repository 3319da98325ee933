"""From a budget to a plan."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossamer.config.settings import make_settings
from gossamer.errors import ConfigurationError
from gossamer.plan.advise.budget import make_plan, nominal_seconds
from gossamer.quantities import seconds
from support import digits

COMMON = {"epochs": 20.0, "candidates": 114, "rates": 3, "kinds": 6, "scenes": 5}


@given(st.floats(60.0, 1e5), st.floats(0.1, 20.0))
def test_a_plan_costs_no_more_than_its_budget(budget: float, run: float) -> None:
    """By its own nominal cost; a budget too small for any plan is refused."""
    try:
        plan = make_plan(budget, run, **COMMON)
    except ConfigurationError:
        return
    assert plan.nominal_s <= budget
    assert plan.candidates % 3 == 0
    assert plan.rungs[-1].share == 1.0
    assert plan.seeds >= 2
    assert all(early.keep >= late.keep for early, late in itertools.pairwise(plan.rungs))


def test_a_small_budget_shortens_the_rungs_before_it_drops_candidates() -> None:
    """The menu shrinks only where the shortest rungs are too dear."""
    whole, shorter, fewer = (make_plan(budget, 1.0, **COMMON) for budget in (600, 120, 60))
    assert whole.candidates == shorter.candidates == 114
    assert len(whole.rungs) < len(shorter.rungs)
    assert fewer.candidates < 114


def test_a_budget_that_pays_for_nothing_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(ConfigurationError, match=r"give --budget \d+s or more"):
        make_plan(5.0, 1.0, **COMMON)


@settings(max_examples=100)
@given(
    st.floats(0.01, 1e4), st.floats(0.05, 20.0), st.integers(1, 60), st.integers(1, 5),
    st.floats(1.0, 100.0), st.integers(0, 6),
)  # fmt: skip
@example(budget=1.0, run=1.0, menu=2, rates=5, epochs=14.0, scenes=0)  # three rungs dearer than one
def test_the_budget_that_a_refusal_names_is_accepted_and_so_is_every_larger_one(
    budget: float, run: float, menu: int, rates: int, epochs: float, scenes: int
) -> None:
    """Whoever does as told is not sent away again, and more money never buys less."""
    common = {"epochs": epochs, "candidates": menu * rates, "rates": rates, "kinds": 6}
    try:
        named = budget
        make_plan(budget, run, **common, scenes=scenes)
    except ConfigurationError as error:
        (said,) = re.findall(r"give --budget (\d+[sm]) or more", str(error))
        named = seconds(said, "--budget")
    plans = [make_plan(named * more, run, **common, scenes=scenes) for more in (1, 1.1, 1.5, 4)]
    searches = [(plan.candidates, -len(plan.rungs)) for plan in plans]
    assert searches == sorted(searches)


def test_rungs_are_not_shorter_than_a_curve_needs_to_show_itself() -> None:
    plan = make_plan(60.0, 1.0, **COMMON | {"epochs": 4.0})
    assert plan.rungs[0].share * 4.0 >= 1.0


def test_the_seeds_can_be_chosen() -> None:
    assert make_plan(600.0, 1.0, **COMMON, seeds=9).seeds == 9


def test_a_plan_pays_for_the_rates_beyond_the_grid() -> None:
    """Where there is a grid, each finalist may need two runs more; they are counted beforehand."""
    grid, one = (make_plan(600.0, 1.0, **COMMON | {"rates": rates}, seeds=3) for rates in (3, 1))
    assert (grid.widenings, one.widenings) == (2 * 9, 0)
    bare = make_plan(600.0, 1.0, **COMMON | {"scenes": 0}, seeds=3)
    assert [rung.share for rung in bare.rungs] == [1]  # one whole run of each candidate
    assert bare.nominal_s == 114 + 9 * (3 + 2)
    assert bare.most_runs(scenes=0) == bare.nominal_s


def test_the_nominal_cost_follows_the_counted_work() -> None:
    """Twice the samples and evaluations cost twice as much; no clock is asked."""
    once = make_settings(digits(), "all_reduce", "equal-8", epochs=4, evaluations=10)
    twice = dataclasses.replace(once, epochs=8.0, evaluations=20)
    assert nominal_seconds(twice) == pytest.approx(2 * nominal_seconds(once))
    assert nominal_seconds(once) == nominal_seconds(once)
