"""Who is first, as far as the seeds allow: the arithmetic, the error rates and the sentences."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import simulate
from gossamer.runs.arrival import Arrival, seconds_to
from gossamer.runs.ranking import LEVEL, LOOKS, Ranking, holm, probability_beyond, t_quantile
from gossamer.runs.verdict import verdict

few = settings(max_examples=50)
README = {
    "ad_psgd": (0.54, 0.44, 0.65), "easgd": (0.79, 0.75, 0.78), "downpour": (1.00, 0.87, 0.76),
    "local_sgd": (2.54, 1.47, 1.64), "all_reduce": (2.17, 1.83, 1.74),
    "push_sum": (1.72, 1.48, 2.60), "d_psgd": (2.56, 2.19, 2.46), "diloco": (5.02, 4.22, 4.69),
}  # fmt: skip
"""Eight methods with three seeds, of which local_sgd is 2.5 to 4.7 times slower on each."""


def ranking(times, level=LEVEL, end=10.0):
    return Ranking(
        [Arrival(label, tuple(own), ends=(end,) * len(own)) for label, own in times.items()], level
    )


def said(times, target=0.9, key="accuracy", ends=None, **more):
    return verdict(ranking(times), target, key, ends or {}, **more)


class TestTheModel:
    @pytest.mark.parametrize(
        ("t", "freedom", "chance"),
        [(12.7062, 1, 0.05), (4.3027, 2, 0.05), (2.1448, 14, 0.05), (2.9768, 14, 0.01), (0, 5, 1)],
    )
    def test_the_chance_beyond_t_agrees_with_the_published_table(self, t, freedom, chance):
        """Two-sided points of Student's distribution."""
        assert probability_beyond(t, freedom) == pytest.approx(chance, abs=2e-5)

    def test_a_method_slower_on_every_seed_is_told_from_the_first(self):
        """Seeds are shared: what counts is what a method does with the same seed as the others."""
        close = {one.label for one in ranking(README).close}
        assert "local_sgd" not in close
        assert close <= {"ad_psgd", "easgd"}

    def test_the_interval_is_that_of_the_pooled_residuals(self):
        """Done by hand: 2 methods, 3 seeds, residuals of +-0.1 in the logarithm, 2 degrees."""
        logs = {"a": (0.1, -0.1, 0.0), "b": (0.9, 1.1, 1.0)}
        found = ranking({k: [math.exp(v) for v in own] for k, own in logs.items()})
        deviation = math.sqrt(4 * 0.01 / 2)
        half = t_quantile(2) * deviation / math.sqrt(3)
        first = found.places[0].span
        assert first is not None
        assert (first.mean, first.high) == pytest.approx((1.0, math.exp(half)))
        assert first.low == pytest.approx(math.exp(-half))

    @few
    @given(
        st.lists(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=2), min_size=2, max_size=5),
        st.floats(0.01, 100.0),
    )
    def test_intervals_are_above_zero_and_know_no_unit(self, times, unit):
        """Two seeds far apart have a wide interval, not a negative one; minutes change nothing."""
        plain = ranking({str(at): own for at, own in enumerate(times)})
        scaled = ranking({str(at): [unit * t for t in own] for at, own in enumerate(times)})
        for one in plain.places:
            assert one.span is not None
            assert 0.0 <= one.span.low <= one.span.mean <= one.span.high
        assert {one.label for one in plain.close} == {one.label for one in scaled.close}

    def test_a_hard_seed_that_is_hard_for_all_hides_nothing(self):
        """The second seed takes ten times as long for everybody; the ratio is what it was."""
        found = ranking({"a": (1.0, 10.0, 1.1), "b": (1.5, 15.2, 1.64)})
        assert found.winner is not None
        assert found.winner.label == "a"

    def test_equal_times_are_no_victory(self):
        """Rounding is not evidence."""
        assert ranking({"a": (1.0, 2.0), "b": (1.0, 2.0 + 1e-12)}).winner is None

    def test_only_seeds_that_all_have_are_compared(self):
        """Of the third seed nobody knows what the other would have done."""
        a = Arrival("a", (1.0, 1.1, 99.0), seeds=(0, 1, 2))
        b = Arrival("b", (2.2, 2.0), seeds=(1, 0))
        found = Ranking([a, b])
        assert found.seeds == 2
        assert [one.arrival.seconds for one in found.places] == [(1.0, 1.1), (2.0, 2.2)]
        assert Ranking([a, Arrival("c", (5.0,), seeds=(7,))]).seeds == 0

    def test_holm_ends_at_the_first_that_fails(self):
        """0.04 alone would pass, after a failure it does not."""
        chances = {("a", "b"): 0.01, ("a", "c"): 0.03, ("b", "c"): 0.04}
        assert holm(chances, 0.05) == {("a", "b")}
        assert holm({**chances, ("a", "c"): 0.02}, 0.05) == set(chances)


class TestNotReached:
    def test_a_missing_seed_ranks_behind_all_that_never_miss(self):
        """However quick its other seeds are."""
        found = ranking({"lucky": (1.0, None), "never": (None, None), "steady": (8.0, 9.0)})
        assert [one.label for one in found.places] == ["steady", "lucky", "never"]

    def test_a_miss_counts_as_the_end_of_the_run_at_least(self):
        """Far behind even so it is slower; where it might be level it is too close to call."""
        times = {"a": (1.0, 1.1, 1.05), "b": (1.2, 1.3, 1.25)}
        far = ranking({**times, "some": (9.0, 8.0, None)})
        near = ranking({**times, "some": (1.0, 1.1, None)})
        assert "some" not in {one.label for one in far.close}
        assert "some" in {one.label for one in near.close}

    def test_an_end_before_the_first_arrives_proves_nothing(self):
        """A run that ended sooner may have been about to arrive."""
        times = {"a": (5.0, 5.1, 5.05), "b": (2.0, None, None)}
        assert "b" in {one.label for one in ranking(times, end=2.5).close}


def null(generator, methods, seeds, arrives=1.0):
    """The same method so many times: effects of the seeds, and chance, nothing else."""
    effects = generator.normal(1.0, 0.3, seeds)
    times = np.exp(effects + generator.normal(0.0, 0.15, (methods, seeds)))
    reached = generator.random((methods, seeds)) < arrives
    return {
        str(at): [float(t) if ok else None for t, ok in zip(own, there, strict=True)]
        for at, (own, there) in enumerate(zip(times, reached, strict=True))
    }


class TestFalseWinners:
    @pytest.mark.parametrize(
        ("methods", "seeds", "arrives"), [(8, 3, 1.0), (2, 3, 1.0), (8, 3, 0.9), (2, 3, 0.5)]
    )
    def test_the_same_method_many_times_has_a_winner_in_five_per_cent_at_most(
        self, methods, seeds, arrives
    ):
        """Nor is one of them called slower more often; 1.7 points are three errors of 400 draws."""
        generator = np.random.default_rng(1)
        winners = slower = 0
        for _ in range(400):
            found = ranking(null(generator, methods, seeds, arrives))
            contest = [one for one in found.places if one.arrival.reached]
            winners += found.winner is not None
            slower += bool(found.close) and len(found.close) < len(contest)
        assert winners / 400 <= LEVEL + 0.017
        assert slower / 400 <= LEVEL + 0.017

    def test_several_looks_share_the_level(self):
        """Looking at 3, 6 and 12 seeds until somebody seems first is wrong no more often."""
        generator = np.random.default_rng(2)
        winners = 0
        for _ in range(400):
            times = null(generator, 2, LOOKS[-1])
            looks = ({k: v[:seeds] for k, v in times.items()} for seeds in LOOKS)
            winners += any(ranking(own, LEVEL / len(LOOKS)).winner for own in looks)
        assert winners / 400 <= LEVEL + 0.017


class TestTheVerdict:
    def test_a_clear_winner_is_named_with_its_interval_and_its_lead(self):
        """Every other method is clearly slower."""
        runs = {"all_reduce": (7.1, 7.2, 7.3), "ad_psgd": (1.78, 1.8, 1.82)}
        assert said(runs) == (
            "ad_psgd reaches 90 % first, after 1.80 s (1.79-1.81 s); "
            "all_reduce takes 4.0 times as long."
        )

    def test_the_nearest_and_the_last_are_both_named(self):
        """And how many there are between."""
        runs = {"a": (1.0, 1.1), "b": (2.0, 2.21), "c": (3.0, 3.3), "d": (5.0, 5.5)}
        assert said(runs).endswith("; 3 others take 2.0 (b) to 5.0 (d) times as long.")

    def test_all_that_may_be_first_are_named(self):
        """A sentence that counts the rest hides those one asks about."""
        runs = {
            k: (1.0 + d, 1.3, 1.1 - d) for k, d in {"a": 0.1, "b": 0.2, "c": 0.0, "d": 0.3}.items()
        }
        found = said({**runs, "slow": (9.0, 9.9, 8.8)})
        assert found == (
            "Too close to call between d, b, a and c (1.11 to 1.13 s to 90 %); "
            "slow takes 8.3 times as long."
        )

    def test_of_a_crowd_the_table_tells(self):
        """A headline is no list."""
        runs = {f"m{at}": (1.0 + at / 100, 1.2 - at / 100) for at in range(9)}
        assert "between the first 9 of the table" in said(runs)

    def test_with_one_seed_no_winner_is_named(self):
        """One run says nothing about chance, however far the others are behind."""
        found = said({"a": (1.0,), "b": (5.0,)})
        assert found == (
            "Each method ran with one seed, so no winner is named: to 90 % a took 1.00 s and "
            "b 5.00 s."
        )

    def test_what_was_cut_short_has_no_winner(self):
        """The reason comes first, then what there is."""
        why = {"cut_short": "Interrupted when 2 of 8 methods had run"}
        assert said({"a": (1.0, 1.1), "b": (9.0, 9.9)}, **why).startswith(
            "Interrupted when 2 of 8 methods had run, so no winner is named: to 90 % a took"
        )
        assert said({"a": (None,)}, **why).endswith("; none of them has reached 90 % yet.")

    def test_nobody_at_the_target_is_said_with_the_nearest(self):
        """No winner is made up."""
        ends = {"easgd": 0.8, "ad_psgd": 0.933}
        assert said({"easgd": (None,), "ad_psgd": (None,)}, 0.95, ends=ends) == (
            "No method reaches 95 %; ad_psgd ends nearest, at 93.3 %."
        )

    def test_nobody_with_every_seed_is_said_with_the_counts(self):
        """Two seeds of three are not a method that reaches the target."""
        assert said({"easgd": (None,) * 3, "ad_psgd": (1.0, 2.0, None)}) == (
            "No method reaches 90 % with every seed; 2 of 3 seeds of ad_psgd do."
        )

    def test_nobody_finite_is_said_to_have_diverged(self):
        """No nearest is made up either."""
        assert said({"easgd": (None,)}, 0.1, "loss", {"easgd": math.nan}) == (
            "No method reaches a loss of 0.1; every one of them diverged."
        )

    def test_those_that_stay_short_of_the_target_are_named(self):
        """The only one to arrive, then who arrives sometimes, then who never does."""
        runs = {
            "ad_psgd": (1.0, 1.0, 1.01), "easgd": (7.0, 8.0, None),
            "downpour": (None,) * 3, "d_psgd": (None,) * 3,
        }  # fmt: skip
        found = said(runs)
        assert found.startswith("Only ad_psgd reaches 90 % with every seed, after 1.00 s (")
        assert found.endswith(
            "; easgd (2 of 3 seeds) reaches it with some seeds only; "
            "downpour and d_psgd do not reach it."
        )

    def test_one_method_alone_wins_nothing(self):
        """First of one is no finding."""
        assert said({"ad_psgd": (2.0,)}) == "ad_psgd reaches 90 % after 2.00 s in its only run."


@pytest.mark.slow
def test_one_method_under_several_names_has_no_winner_in_virtual_time():
    """With the times of true runs, each with a seed of its own: of 20 comparisons of two, 5 winners
    would come once in 400 times; of 5 of eight, one is too many."""
    times = [
        seconds_to(
            simulate(
                "digits-logistic", "ad_psgd", "one-slow-of-8", seed=seed, epochs=3.0,
                learning_rate=0.1, evaluations=40,
            ).history,
            0.85,
        )
        for seed in range(120)
    ]  # fmt: skip

    def winners(methods):
        tables = np.array(times, dtype=object).reshape(-1, methods, 3)
        found = [ranking({str(at): row for at, row in enumerate(table)}) for table in tables]
        return sum(one.winner is not None for one in found)

    assert None not in times
    assert winners(2) <= 4
    assert winners(8) == 0
