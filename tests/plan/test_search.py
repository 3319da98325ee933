"""The search on made-up runs: what it runs, what it concludes, what it keeps when cut short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_up import MadeUp, one_by_one, several_at_a_time

from gossamer.config.settings import make_settings
from gossamer.errors import Stalled
from gossamer.plan.advise.budget import SearchPlan
from gossamer.plan.advise.candidates import Candidate
from gossamer.plan.advise.findings import SearchFindings
from gossamer.plan.advise.halving import Rung
from gossamer.plan.advise.search import OutOfTime, Search, SearchStep
from gossamer.plan.advise.sensitivity import scenes
from support import cluster_of, digits
from tiers import only

METHODS = {
    "all_reduce": (1.0, 2.0),
    "ad_psgd": (0.8, 20.0),
    "downpour": (0.1, 21.0),
    "local_sgd:period=8": (0.9, 4.0),
    "push_sum": (0.9, 3.0),
}
PLAN = SearchPlan(10, (Rung(1 / 3, 6), Rung(1.0, 4)), 5, 2, 3, 3, 2, 1.0)


def search_of(
    run: Any, target: float = 0.9, steps: list[SearchStep] | None = None, make: Any = one_by_one
) -> Search:
    base = make_settings(digits(), "all_reduce", cluster_of(8), seed=7)
    found = [Candidate(method, rate) for method in METHODS for rate in (0.1, 0.3)]
    seen: list[SearchStep] = [] if steps is None else steps
    return Search(base, found, PLAN, target, make(run), seen.append)


def ran(run: Any, target: float = 0.9, make: Any = one_by_one) -> SearchFindings:
    search = search_of(run, target, make=make)
    search.run(scenes(search.base.cluster))
    return SearchFindings(search, {})


def test_the_quickest_in_time_wins_though_others_need_fewer_samples() -> None:
    findings = ran(MadeUp(METHODS))
    first = findings.as_dict()["ranking"][0]
    assert (first["method"], first["learning_rate"]) == ("ad_psgd", 0.1)
    assert first["low"] <= first["seconds_to_target"] <= first["high"]
    assert findings.verdict().startswith("ad_psgd reaches 90 % first")


def test_the_same_seed_gives_the_same_answer() -> None:
    assert ran(MadeUp(METHODS)).as_dict() == ran(MadeUp(METHODS)).as_dict()


@pytest.mark.parametrize(
    ("target", "fails"),
    only([(0.9, "")], [(0.9, ""), (0.6, ""), (0.9, "ad_psgd"), (0.6, "downpour")]),
)
def test_runs_beside_each_other_give_the_same_answer(target: float, fails: str) -> None:
    """When a run may end follows from runs before it. A run beside those does not know them yet: it
    goes on for longer, and what it told after that moment does not count."""
    alone, beside = MadeUp(METHODS, fails), MadeUp(METHODS, fails)
    one, several = ran(alone, target), ran(beside, target, several_at_a_time)
    assert several.as_dict() == one.as_dict()
    assert alone.evaluations < beside.evaluations


def test_a_finalist_that_fails_leaves_runs_that_do_not_count() -> None:
    """They began beside the one that failed."""

    class FailsLater(MadeUp):
        def __call__(self, settings: Any, stop: Any, name: str | None) -> Any:
            self.fails = "ad_psgd" if settings.seed == 8 else ""
            return super().__call__(settings, stop, name)

    one, several = (ran(FailsLater(METHODS), make=make) for make in (one_by_one, several_at_a_time))
    assert several.as_dict() == one.as_dict()
    assert one.search.superfluous == []
    assert several.search.superfluous == ["ad_psgd-seed9", "ad_psgd-seed10"]


def test_the_final_has_fresh_seeds_and_only_it_is_kept() -> None:
    """The seed that chose the finalists would flatter them."""
    made = MadeUp(METHODS)
    ran(made)
    kept = {(seed, name) for _, _, seed, _, name in made.runs if name is not None}
    assert {seed for seed, _ in kept} == {8, 9, 10}
    assert {seed for _, _, seed, workers, name in made.runs if name is None and workers == 8} >= {7}


def test_every_kind_has_its_best_in_the_final() -> None:
    """A reader wants to see how far behind the other ways are."""
    kinds = {row["kind"] for row in ran(MadeUp(METHODS)).as_dict()["ranking"]}
    assert kinds == {
        "synchronous", "asynchronous gossip", "asynchronous server", "local updates",
        "gossip in rounds",
    }  # fmt: skip


def test_a_run_stops_when_its_arrival_has_lasted() -> None:
    """The crossing counts once the window around it is full; nothing later can change its time."""
    made = MadeUp(METHODS)
    findings = ran(made)
    for one in findings.ranking:
        for result, seconds in zip(one.results, one.arrival.seconds, strict=True):
            if seconds is None:
                continue
            length = result.history[-1]["virtual_seconds"]
            assert seconds + one.collecting < length < 1.3 * seconds + one.collecting
            assert result.history[-1]["accuracy"] >= 0.9


def test_a_hopeless_candidate_is_given_up_once_enough_have_arrived() -> None:
    """It would be out anyway; all runs to their end would be more work."""
    made = MadeUp(METHODS)
    ran(made)
    assert made.evaluations < len(made.runs) * 51 * 0.6


def test_the_reason_names_the_factor_by_which_the_runner_up_loses() -> None:
    """Nearly as good per sample, five times slower per second."""
    methods = {"ad_psgd": (1.0, 20.0), "all_reduce": (1.0, 4.0)} | {
        method: (0.1, 0.1) for method in METHODS if method not in ("ad_psgd", "all_reduce")
    }
    findings = ran(MadeUp(methods))
    said, second = findings.reason(), findings.as_dict()["ranking"][1]
    ratio = f"{second['times_the_first']:.2f}"  # one figure, in the table and in the sentence
    assert said.startswith(f"all_reduce takes {ratio} times as long as ad_psgd")
    assert "0.20 times the samples per second" in said
    assert "times the samples (" not in said


def test_where_nobody_arrives_the_nearest_is_first_and_a_way_out_is_named() -> None:
    findings = ran(MadeUp(METHODS), target=0.99)
    told = findings.as_dict()
    assert all(row["seconds_to_target"] is None for row in told["ranking"])
    best = [row["best"] for row in told["ranking"]]
    assert best == sorted(best, reverse=True)
    assert "No method reaches 99 %" in told["verdict"]
    assert "--target 0.95" in told["proposal"]
    assert "--epochs 60" in told["proposal"]


def test_a_method_that_fails_is_told_and_left_behind() -> None:
    """What the cluster did to it is a result about it; the others go on."""
    findings = ran(MadeUp(METHODS, fails="ad_psgd"))
    assert findings.ranking[0].candidate.method != "ad_psgd"
    assert any("ad_psgd" in what for what in findings.search.failures)
    assert "nobody can go on" in next(iter(findings.search.failures.values()))


@pytest.mark.parametrize(("ending", "ended"), [(KeyboardInterrupt, "interrupted"),
                                               (OutOfTime, "out of time")])  # fmt: skip
@pytest.mark.parametrize("after", only([12], [3, 12, 20, 40]))
def test_a_search_that_is_cut_short_gives_the_best_so_far(
    after: int, ending: type[BaseException], ended: str
) -> None:
    """In every stage; only seeds that all finalists have count."""
    made = MadeUp(METHODS)

    def run(*arguments: Any) -> Any:
        if len(made.runs) == after:
            raise ending
        return made(*arguments)

    findings = ran(run)
    assert findings.search.ended == ended
    assert findings.ended()
    assert findings.as_dict()["ranking"][0]["method"]
    assert len({len(one.results) for one in findings.ranking}) == 1


@pytest.mark.parametrize("after", [1, 12])
def test_before_the_final_nobody_has_won(after: int) -> None:
    """One candidate of many is no winner, and nothing is recommended; what there is is named."""
    made = MadeUp(METHODS)

    def run(*arguments: Any) -> Any:
        if len(made.runs) == after:
            raise KeyboardInterrupt
        return made(*arguments)

    findings = ran(run)
    said = [findings.verdict(), *findings.remarks()]
    assert findings.verdict().startswith("Interrupted when ")
    assert not any("winner:" in line or "gossamer train" in line for line in said)
    assert not any(" first" in line for line in said)
    assert findings.as_dict()["command"] == ""


def test_one_seed_of_the_final_names_no_winner() -> None:
    """Interrupted in the second: one run each says nothing about chance."""
    made = MadeUp(METHODS)

    def run(*arguments: Any) -> Any:
        if sum(name is not None for *_, name in made.runs) == 6:
            raise KeyboardInterrupt
        return made(*arguments)

    findings = ran(run)
    assert "with one seed, so no winner is named" in findings.verdict()


def test_progress_names_the_stage_and_the_best_so_far() -> None:
    steps: list[SearchStep] = []
    search = search_of(MadeUp(METHODS), steps=steps)
    search.run(scenes(search.base.cluster))
    stages = list(dict.fromkeys(step.stage for step in steps))
    assert stages == [
        "search 1/2", "search 2/2", "rates beyond the grid", "final", "changed clusters"
    ]  # fmt: skip
    assert steps[0].best == ""
    assert steps[-1].best == "ad_psgd at 0.1"
    for stage in stages:
        left = [step.left for step in steps if step.stage == stage]
        assert left == list(range(len(left), 0, -1))


def test_another_answer_above_a_number_of_workers_is_told() -> None:
    """The command to choose differently comes with where it was measured."""

    class Crowded(MadeUp):
        def __call__(self, settings: Any, stop: Any, name: str | None) -> Any:
            is_crowded = settings.cluster.workers > 8 and str(settings.method) == "ad_psgd"
            self.methods = {**METHODS, "ad_psgd": (0.8, 0.5 if is_crowded else 20.0)}
            return super().__call__(settings, stop, name)

    changes = ran(Crowded(METHODS)).changes()
    assert any(line.startswith("above 8 workers choose ") for line in changes)
    assert any(line.startswith("with 4 workers: still ad_psgd") for line in changes)


def test_a_fast_method_is_a_finalist_although_its_kind_has_a_faster_one() -> None:
    """The leading methods are those of the last rung's order; what that rung kept only as the best
    of its kind comes after them."""
    methods = METHODS | {
        "ad_psgd": (0.8, 20.0),
        "push_gossip": (0.8, 19.0),
        "downpour": (0.8, 18.0),
    }
    base = make_settings(digits(), "all_reduce", cluster_of(8), seed=7)
    found = [Candidate(method, rate) for method in methods for rate in (0.1, 0.3)]
    plan = SearchPlan(12, (Rung(1.0, 1),), 5, 2, 2, 0, 2, 1.0)
    search = Search(base, found, plan, 0.9, one_by_one(MadeUp(methods)), lambda step: None)
    search.run([])
    kept = {one.method for one in search.halving.stages[-1].kept}
    assert "push_gossip" not in kept  # the rung keeps one, and the best of every other kind
    assert [one.method for one in search.finalists][:2] == ["ad_psgd", "push_gossip"]


def widened(made: MadeUp, target: float = 0.9) -> SearchFindings:
    search = search_of(made, target)
    search.run([])
    return SearchFindings(search, {})


def test_a_target_that_the_untrained_model_reaches_is_said_to_be_too_easy() -> None:
    """No time is a multiple of none."""
    findings = ran(MadeUp(METHODS), target=0.0)
    findings.alone = (Candidate("all_reduce", 0.1), 0.0)
    assert findings.ranking[0].arrival.mean == 0.0
    assert findings.baseline().endswith("before its first step: give a harder --target.")


@pytest.mark.parametrize("best", [0.1, 0.033])
def test_the_grid_grows_by_one_rate_where_the_best_is_at_its_edge(best: float) -> None:
    """Each finalist at the outermost rate runs at that and at the next one, with a seed that
    neither search nor final uses; the better one goes to the final. If that is at the edge of the
    grid again, the user is told so."""
    made = MadeUp(METHODS, best=best)
    findings = widened(made)
    search = findings.search
    tried = [(method, rate) for method, rate, seed, _, _ in made.runs if seed == 7 + 3 + 1]
    assert tried == [(one.method, rate) for one in search.widened for rate in (0.1, 0.033)]
    assert len(search.widened) == len(search.finalists) > 2
    assert {one.learning_rate for one in search.finalists} == {best}
    assert ("try --lr 0.011,0.033,0.1,0.3" in findings.edge()) == (best == 0.033)
    assert "Also tried" in findings.widened()
    assert len(findings.as_dict()["widened"]) == len(search.widened)


class OtherBeyond(MadeUp):
    """At the rate beyond the grid every method learns by another rule."""

    def __init__(self, rule: Callable[[float], float], fails: bool = False) -> None:
        super().__init__(METHODS)
        self._rule, self._fails = rule, fails

    def __call__(self, settings: Any, stop: Any, name: str | None) -> Any:
        self.is_beyond = settings.learning_rate == 0.033
        if self.is_beyond and self._fails:
            raise Stalled("nobody can go on")
        return super().__call__(settings, stop, name)

    def _row(self, epochs: float, learning: float, pace: float, settings: Any) -> Any:
        row = super()._row(epochs, learning, pace, settings)
        return row | {"accuracy": self._rule(row["accuracy"])} if self.is_beyond else row


@pytest.mark.parametrize(
    ("made", "target", "rate"),
    [
        (OtherBeyond(lambda score: 1.3 * score), 0.9, 0.033),  # twice as quick
        (OtherBeyond(lambda score: 1.15 * score), 0.9, 0.1),  # 20 % quicker, perhaps by chance
        (OtherBeyond(lambda score: min(1.5 * score, 0.85)), 0.9, 0.1),  # ahead, but never there
        (OtherBeyond(lambda score: min(1.5 * score, 0.995)), 0.99, 0.033),  # the only one to arrive
        (OtherBeyond(lambda score: min(1.5 * score, 0.97)), 0.99, 0.033),  # nearest, nobody arrives
        (OtherBeyond(lambda score: 0.9 * score), 0.99, 0.1),  # nobody arrives, and not nearer
        (OtherBeyond(lambda score: score, fails=True), 0.9, 0.1),
    ],
)
def test_a_rate_beyond_the_grid_must_clearly_arrive_first_or_else_end_nearer(
    made: OtherBeyond, target: float, rate: float
) -> None:
    """Whole runs are judged: a rate that is ahead early has not won. One seed decides between the
    two rates, so a small lead may be chance; where the own rate fails, the rule of `compare` does.
    """
    search = widened(made, target).search
    assert "ad_psgd" in {one.method for one in search.widened}
    assert {one.learning_rate for one in search.finalists if one.method == "ad_psgd"} == {rate}


def test_a_search_that_ends_among_the_rates_beyond_tells_what_ran() -> None:
    """Those rates are no candidates of the search, and one that never ran was not tried."""
    made = MadeUp(METHODS)

    def run(*arguments: Any) -> Any:
        if sum(seed == 11 for _, _, seed, _, _ in made.runs) == 3:
            raise KeyboardInterrupt
        return made(*arguments)

    findings = ran(run)
    assert findings.verdict().startswith("Interrupted when 10 of 10 candidates had been measured")
    assert len(findings.search.widened) == 1
