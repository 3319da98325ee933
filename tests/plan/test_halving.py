"""Successive halving on made-up curves: whoever is ahead at every moment must not be lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.plan.advise.halving import Halving, HalvingStage, LearningCurve, Rung, curve, order

GOAL = 0.9
QUICK = settings(max_examples=50)
paces = st.floats(0.1, 10.0)
RUNGS = (Rung(1 / 9, 4), Rung(1 / 3, 2), Rung(1.0, 1))


def each(
    halving: Halving[Any], measure: Callable[[Any, Rung, float], LearningCurve]
) -> Callable[[HalvingStage[Any]], Iterator[LearningCurve]]:
    """Measure the entrants of a stage one after the other."""

    def stage(stage: HalvingStage[Any]) -> Iterator[LearningCurve]:
        for one in stage.entrants:
            yield measure(one, stage.rung, halving.limit(stage))

    return stage


def grown(rate: float, pace: float, share: float, points: int = 20) -> LearningCurve:
    """A straight line in time, of a run that needs 10 / pace seconds for all its samples."""
    end = share * 10.0 / pace
    times = [end * at / points for at in range(points + 1)]
    return curve([(time, rate * time) for time in times], is_over=share == 1.0)


@QUICK
@given(st.data())
def test_whoever_is_ahead_at_every_moment_survives(data: st.DataObject) -> None:
    """Even if it processes its samples quickest and so has the shortest curves in seconds."""
    others = data.draw(st.lists(st.tuples(st.floats(0.01, 0.9), paces), min_size=1, max_size=12))
    best = (1.0, data.draw(paces))
    everyone = [*others, best]
    at = data.draw(st.integers(0, len(others)))
    everyone[at], everyone[-1] = everyone[-1], everyone[at]
    halving: Halving[int] = Halving(range(len(everyone)), GOAL)

    survivors = halving.run(
        RUNGS, each(halving, lambda one, rung, limit: grown(*everyone[one], rung.share))
    )

    assert survivors == [at]


@QUICK
@given(st.lists(st.tuples(st.floats(0.01, 1.0), paces), min_size=2, max_size=10, unique=True))
def test_each_rung_keeps_the_first_of_its_order(everyone: list[tuple[float, float]]) -> None:
    """So many go on as the rung says, and nobody who was not in the rung before."""
    halving: Halving[int] = Halving(range(len(everyone)), GOAL)
    halving.run(RUNGS, each(halving, lambda one, rung, limit: grown(*everyone[one], rung.share)))

    entrants = list(range(len(everyone)))
    for stage, rung in zip(halving.stages, RUNGS, strict=True):
        assert stage.entrants == entrants
        assert stage.kept == order(stage.curves, GOAL)[: rung.keep]
        entrants = stage.kept


def test_the_best_of_every_kind_stays_in_until_the_end() -> None:
    """Who is quick at first may never arrive; a slow starter of another kind must not be lost."""
    starters = {
        "sprinter": [(0.0, 0.0), (1.0, 0.7), (9.0, 0.8)],
        "hasty": [(0.0, 0.0), (1.0, 0.6), (9.0, 0.7)],
        "steady": [(0.0, 0.0), (1.0, 0.1), (9.0, 1.0)],
        "lame": [(0.0, 0.0), (1.0, 0.05), (9.0, 0.5)],
    }

    def measure(one: str, rung: Rung, limit: float) -> LearningCurve:
        whole = rung.share == 1.0
        return curve(starters[one] if whole else starters[one][:2], is_over=whole)

    halving: Halving[str] = Halving(list(starters), GOAL, lambda one: one in ("steady", "lame"))
    survivors = halving.run([Rung(1 / 9, 1), Rung(1.0, 1)], each(halving, measure))
    assert halving.stages[1].entrants == ["sprinter", "steady"]
    assert survivors == ["steady", "sprinter"]


def test_equal_samples_do_not_decide() -> None:
    """A method that learns half as much per sample in a tenth of the time is the better one."""
    per_sample = {
        "waits": curve([(0.0, 0.0), (10.0, 0.8)]),
        "hurries": curve([(0.0, 0.0), (1.0, 0.4)]),
    }
    assert order(per_sample, GOAL) == ["hurries", "waits"]


def test_a_run_that_has_nothing_more_to_show_loses_to_one_that_arrives_later() -> None:
    """Ahead when its samples were spent, but never at the goal."""
    curves = {
        "spent": curve([(0.0, 0.0), (1.0, 0.85)], is_over=True),
        "slow": curve([(0.0, 0.0), (9.0, 0.95)], is_over=True),
    }
    assert order(curves, GOAL) == ["slow", "spent"]


def test_how_far_a_run_overshoots_is_no_merit() -> None:
    """The earlier arrival wins, whatever the last evaluation says."""
    curves = {
        "far": curve([(0.0, 0.0), (2.0, 1.0)]),
        "early": curve([(0.0, 0.0), (1.0, 0.91)]),
    }
    assert order(curves, GOAL)[0] == "early"


def test_the_limit_is_the_arrival_of_the_last_that_would_be_kept() -> None:
    """Once two have arrived and two are kept, nobody later can be among them."""
    arrivals = {"a": 5.0, "b": 3.0, "c": 9.0, "d": 4.0}
    limits: list[float] = []

    def measure(one: str, rung: Rung, limit: float) -> LearningCurve:
        limits.append(limit)
        return curve([(0.0, 0.0), (arrivals[one], GOAL)])

    halving: Halving[str] = Halving(list(arrivals), GOAL)
    assert halving.run([Rung(1.0, 2)], each(halving, measure)) == ["b", "d"]
    assert limits == [math.inf, math.inf, 5.0, 5.0]


def test_a_score_that_is_no_number_is_no_progress() -> None:
    """A diverged run keeps what it had."""
    diverged = curve([(0.0, 0.1), (1.0, 0.5), (2.0, math.nan)], is_over=True)
    assert diverged.best == 0.5
    assert diverged.at(1e9) == 0.5
    assert diverged.arrival(0.6) == math.inf


def test_a_curve_is_a_straight_line_between_its_points() -> None:
    risen = curve([(1.0, 0.0), (3.0, 1.0)])
    assert risen.at(2.0) == pytest.approx(0.5)
    assert risen.arrival(0.25) == pytest.approx(1.5)
    assert risen.at(0.5) == -math.inf


def test_an_interrupted_search_still_has_a_standing() -> None:
    """Those who reached the later rung first, then everybody who was measured."""
    everyone = {"best": 1.0, "good": 0.8, "poor": 0.2, "worst": 0.1}
    measured: list[str] = []

    def measure(one: str, rung: Rung, limit: float) -> LearningCurve:
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(one)
        return grown(everyone[one], 1.0, rung.share)

    halving: Halving[str] = Halving(list(everyone), GOAL)
    with pytest.raises(KeyboardInterrupt):
        halving.run([Rung(1 / 3, 2), Rung(1.0, 1)], each(halving, measure))
    assert halving.standing() == ["best", "good", "poor", "worst"]


def test_before_the_first_run_there_is_no_standing() -> None:
    assert Halving(["a"], GOAL).standing() == []
