"""Statistics and pictures of comparisons: what they say is what the runs allow, and no more."""

import importlib.util
import math
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.report.pictures import Series, comparison_picture, table_picture
from gossamer.report.statistics import (
    arrival,
    best_of,
    interval,
    measure,
    ranked,
    seconds_to,
    seed_curves,
    show_number,
    t_quantile,
    time_shares,
    verdict,
)

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
few = settings(max_examples=50, deadline=None)
ordinary = st.floats(-1e3, 1e3)


def rows(scores, *, seconds=1.0, key="accuracy"):
    """A history with one evaluation every `seconds`; two workers, one waiting half of its time."""
    history = []
    for at, score in enumerate(scores):
        now = at * seconds
        row = {"virtual_seconds": now, "epochs": float(at), "accuracy": None, "loss": 1.0}
        row["computing_seconds"], row["waiting_seconds"] = [now, now / 2], [0.0, now / 4]
        history.append({**row, key: score})
    return history


def reaching(*times, target=0.9, last=10.0):
    """One history a seed: a straight line from 0 that meets the target at the given time."""
    ends = (0.0, last)
    return [
        [{"virtual_seconds": at, "accuracy": target / time * at} for at in ends] for time in times
    ]


class TestInterval:
    @pytest.mark.parametrize(
        ("freedom", "expected"),
        [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (1000, 1.9623)],
    )
    def test_the_t_quantile_agrees_with_the_published_table(self, freedom, expected):
        """Two-sided 95 % points of Student's distribution, for odd and even degrees of freedom."""
        assert t_quantile(freedom) == pytest.approx(expected, abs=5e-5)

    def test_a_known_sample_has_the_interval_done_by_hand(self):
        """1, 2, 3: mean 2, deviation 1, half width 4.3027 / sqrt(3)."""
        found = interval([1.0, 2.0, 3.0])
        assert found.mean == 2.0
        assert found.high - found.mean == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
        assert found.mean - found.low == pytest.approx(found.high - found.mean)

    def test_one_value_is_its_own_interval(self):
        """A single run says nothing about its spread."""
        found = interval([0.7])
        assert (found.mean, found.low, found.high) == (0.7, 0.7, 0.7)

    @few
    @given(st.lists(ordinary, min_size=2, max_size=6), ordinary, st.floats(0.1, 10.0))
    def test_an_interval_moves_and_stretches_with_its_values(self, values, shift, scale):
        """interval(a x + b) = a interval(x) + b: it does not depend on the unit of time."""
        plain = interval(values)
        moved = interval([scale * value + shift for value in values])
        for name in ("mean", "low", "high"):
            wanted = scale * getattr(plain, name) + shift
            assert getattr(moved, name) == pytest.approx(wanted, rel=1e-6, abs=1e-6)

    def test_a_diverged_run_leaves_no_mean(self):
        """A mean over the survivors would hide the divergence."""
        assert all(map(math.isnan, vars(interval([1.0, math.inf])).values()))

    def test_no_values_are_refused(self):
        """There is no interval of nothing."""
        with pytest.raises(ConfigurationError, match="at least one value"):
            interval([])


class TestSecondsTo:
    @few
    @given(st.floats(0.01, 1.0), st.floats(0.1, 100.0))
    def test_a_straight_line_is_met_where_it_crosses(self, target, seconds):
        """Between two evaluations the score moves on a straight line."""
        found = seconds_to(rows([0.0, 1.0], seconds=seconds), target)
        assert found == pytest.approx(target * seconds, rel=1e-5)

    def test_the_first_crossing_counts(self):
        """A score that falls back later has still been reached."""
        assert seconds_to(rows([0.0, 0.8, 0.2, 0.9]), 0.4) == pytest.approx(0.5)

    def test_a_target_never_reached_has_no_time(self):
        """Nobody is credited with what happens after the end of a run."""
        assert seconds_to(rows([0.0, 0.5, 0.8]), 0.9) is None

    def test_a_target_met_at_the_start_takes_no_time(self):
        """The first evaluation has nothing before it to interpolate from."""
        assert seconds_to(rows([0.95, 0.96]), 0.9) == 0.0

    def test_a_loss_is_reached_from_above(self):
        """For a loss, at or below the target counts."""
        history = rows([4.0, 2.0, 1.0], key="loss")
        assert seconds_to(history, 1.5, "loss") == pytest.approx(1.5)
        assert seconds_to(history, 0.5, "loss") is None

    def test_a_score_rounded_to_32_bits_still_reaches_its_target(self):
        """342 right of 360 is 95 %, although the nearest 32-bit number is a little less."""
        assert seconds_to(rows([0.0, 0.949999988079071]), 0.95) == 1.0

    def test_two_evaluations_at_one_moment_are_no_division_by_zero(self):
        """The end of a run is evaluated twice at the same virtual time."""
        history = rows([0.0, 0.8, 0.95])
        history[2]["virtual_seconds"] = history[1]["virtual_seconds"]
        assert seconds_to(history, 0.9) == 1.0

    def test_evaluations_without_a_finite_score_are_passed_over(self):
        """A loss that overflowed and came back is interpolated between what is known."""
        history = rows([math.inf, 3.0, math.nan, 1.0], key="loss")
        assert seconds_to(history, 2.0, "loss") == pytest.approx(2.0)


class TestReadings:
    def test_a_task_without_accuracy_is_judged_by_its_loss(self):
        """Accuracy where there is one, loss elsewhere."""
        assert measure([rows([0.5])]) == "accuracy"
        assert measure([rows([2.0], key="loss")]) == "loss"

    def test_seeds_are_averaged_as_far_as_all_of_them_go(self):
        """The places are those of the seed that ended first."""
        places, seeds = seed_curves(
            [rows([0.0, 0.4]), rows([0.0, 0.2, 0.6])], "accuracy", "virtual_seconds"
        )
        assert places.tolist() == [0.0, 1.0]
        assert seeds.tolist() == [[0.0, 0.4], [0.0, 0.2]]

    def test_shares_of_time_are_means_over_workers_and_add_up(self):
        """One worker computes all the time, one half of it and waits a quarter."""
        assert time_shares([rows([0.1, 0.2])]) == pytest.approx((0.75, 0.125, 0.125))

    def test_methods_that_fail_some_seeds_rank_behind_those_that_never_fail(self):
        """A mean over the lucky seeds would flatter."""
        lucky = arrival("lucky", [*reaching(1.0), rows([0.0, 0.1])], 0.9, "accuracy")
        never = arrival("never", [rows([0.0, 0.1])], 0.9, "accuracy")
        steady = arrival("steady", reaching(8.0, 9.0), 0.9, "accuracy")
        assert lucky.interval is None
        assert [one.label for one in ranked([never, lucky, steady])] == ["steady", "lucky", "never"]

    @pytest.mark.parametrize(
        ("value", "shown"), [(0.0, "0"), (0.8234, "0.823"), (9.999, "10.0"), (4567.0, "4,567")]
    )
    def test_numbers_are_written_out_with_three_figures(self, value, shown):
        """No exponents where people read seconds."""
        assert show_number(value) == shown


class TestBestOf:
    def test_the_highest_mean_accuracy_at_the_end_wins(self):
        """Neither the best seed nor the fastest start decides, but the mean at the end."""
        runs = {
            0.01: [rows([0.0, 0.5, 0.80]), rows([0.0, 0.5, 0.82])],
            0.03: [rows([0.0, 0.6, 0.85]), rows([0.0, 0.6, 0.87])],
            0.1: [rows([0.0, 0.9, 0.95]), rows([0.0, 0.9, 0.60])],
        }
        assert best_of(runs, 0.7) == 0.03

    def test_among_equals_the_sooner_at_the_target_wins(self):
        """0.3 ends equal and arrives first; 0.1 does not arrive at all in one seed."""
        runs = {
            0.1: [rows([0.0, 0.1, 0.8]), rows([0.0, 0.1, 0.6])],
            0.2: [rows([0.0, 0.2, 0.7]), rows([0.0, 0.2, 0.7])],
            0.3: [rows([0.0, 0.6, 0.7]), rows([0.0, 0.6, 0.7])],
        }
        assert best_of(runs, 0.65) == 0.3

    def test_without_accuracy_the_lowest_mean_loss_wins(self):
        """A rate that diverged comes last, whatever its other seed did."""
        runs = {
            0.01: [rows([2.0, 1.0], key="loss")],
            0.1: [rows([2.0, 0.5], key="loss")],
            1.0: [rows([2.0, 0.1], key="loss"), rows([2.0, math.nan], key="loss")],
        }
        assert best_of(runs, 0.6) == 0.1

    def test_a_rate_without_runs_is_refused(self):
        """A grid with holes is not a fair grid."""
        with pytest.raises(ConfigurationError, match=r"got none for \[0.1\]"):
            best_of({0.01: [rows([0.1])], 0.1: []}, 0.9)


class TestVerdict:
    def test_a_clear_winner_is_named_with_its_interval_and_its_lead(self):
        """The intervals do not overlap, so somebody is first."""
        runs = {"all_reduce": reaching(7.1, 7.2, 7.3), "ad_psgd": reaching(1.78, 1.8, 1.82)}
        assert verdict(runs, 0.9) == (
            "ad_psgd reaches 90 % first, after 1.80 s (1.75-1.85 s); "
            "all_reduce needs 7.20 s, 4.0 times as long."
        )

    def test_the_next_and_the_last_are_both_named(self):
        """The nearest rival belongs beside the most distant one."""
        runs = {"a": reaching(1.0), "b": reaching(2.0), "c": reaching(5.0)}
        assert verdict(runs, 0.9) == (
            "a reaches 90 % first, after 1.00 s in its only run; "
            "next is b with 2.00 s, last is c, which needs 5.00 s, 5.0 times as long."
        )

    def test_overlapping_intervals_are_too_close_to_call(self):
        """A lead within the noise of the seeds is no lead."""
        runs = {
            "easgd": reaching(2.3, 2.5, 2.7),
            "ad_psgd": reaching(1.7, 1.9, 2.1),
            "all_reduce": reaching(8.0, 8.1, 8.2),
        }
        found = verdict(runs, 0.9)
        assert found.startswith("Too close to call between ad_psgd (1.90 s, 1.40-2.40 s) and easgd")
        assert found.endswith("on the way to 90 %; all_reduce needs 8.10 s, 4.3 times as long.")

    def test_a_wide_interval_behind_a_narrow_one_is_still_too_close(self):
        """The overlapping methods need not be neighbours in the ranking."""
        runs = {
            "first": reaching(1.0, 1.01, 1.02),
            "second": reaching(1.5, 1.51, 1.52),
            "noisy": reaching(1.0, 2.0, 3.0),
        }
        found = verdict(runs, 0.9)
        assert "between first (1.01 s, 0.985-1.03 s) and noisy (2.00 s, 0-4.48 s)" in found
        assert found.endswith("; second needs 1.51 s, 1.5 times as long.")

    def test_nobody_at_the_target_is_said_with_the_nearest(self):
        """No winner is made up."""
        runs = {"easgd": [rows([0.1, 0.8])], "ad_psgd": [rows([0.1, 0.933])]}
        assert verdict(runs, 0.95) == "No method reaches 95 %; ad_psgd ends nearest, at 93.3 %."

    def test_nobody_with_every_seed_is_said_with_the_counts(self):
        """Two seeds of three are not a method that reaches the target."""
        runs = {"easgd": [rows([0.1, 0.8])], "ad_psgd": [*reaching(1.0, 2.0), rows([0.0, 0.1])]}
        assert verdict(runs, 0.9) == (
            "No method reaches 90 % with every seed; 2 of 3 seeds of ad_psgd do."
        )

    def test_nobody_finite_is_said_to_have_diverged(self):
        """No nearest is made up either."""
        runs = {"easgd": [rows([2.0, math.nan], key="loss")]}
        assert verdict(runs, 0.1) == "No method reaches a loss of 0.1; every one of them diverged."

    def test_those_that_stay_short_of_the_target_are_named(self):
        """The only one to arrive, then who arrives sometimes, then who never does."""
        runs = {
            "ad_psgd": reaching(1.0, 1.0),
            "easgd": [*reaching(1.0), rows([0.0, 0.1])],
            "downpour": [rows([0.0, 0.1])],
            "d_psgd": [rows([0.0, 0.1])],
        }
        assert verdict(runs, 0.9) == (
            "Only ad_psgd reaches 90 % with every seed, after 1.00 s (1.00-1.00 s); "
            "easgd (1 of 2 seeds) reaches it with some seeds only; "
            "downpour and d_psgd do not reach it."
        )

    def test_one_method_alone_wins_nothing(self):
        """First of one is no finding."""
        assert verdict({"ad_psgd": reaching(2.0)}, 0.9) == (
            "ad_psgd reaches 90 % after 2.00 s in its only run."
        )

    def test_a_comparison_without_runs_is_refused(self):
        """There is nothing to judge."""
        with pytest.raises(ConfigurationError, match="at least one run of each method"):
            verdict({"ad_psgd": []}, 0.9)


def series(label, *histories, rate=0.1):
    return Series(label, histories, 2, {"learning_rate": rate})


def size_of(path):
    """Width and height from the header of a PNG file."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 20_000, "the picture is all but blank"
    return struct.unpack(">II", data[16:24])


FAST, SLOW = rows([0.1, 0.8, 0.9, 0.95]), rows([0.1, 0.8, 0.9, 0.94], seconds=3.0)
NEVER = rows([0.1, 0.3, 0.4, 0.5], seconds=2.0)
FALLING = rows([5.0, 2.0, 1.0, 0.5], key="loss")
DIVERGED = rows([5.0, 1e30, math.nan, math.inf], key="loss")


@needs_matplotlib
class TestComparisonPicture:
    @pytest.mark.parametrize(
        ("runs", "target"),
        [
            pytest.param([series("a", FAST), series("b", SLOW, rate=0.3)], 0.9, id="one-seed"),
            pytest.param([series("a", FAST, NEVER, SLOW), series("b", SLOW)], 0.9, id="seeds"),
            pytest.param([series("a", FALLING), series("b", DIVERGED)], 0.6, id="no-accuracy"),
            pytest.param([series("a", FAST)], 0.9, id="one-method"),
            pytest.param([series("a", FAST), series("b", NEVER)], 0.9, id="never-reached"),
        ],
    )
    def test_a_picture_of_the_promised_size_is_written(self, tmp_path, runs, target):
        """12 by 8 inches at 150 dots, whatever the runs look like."""
        path = tmp_path / "new" / "comparison.png"
        comparison_picture(path, runs, title="Comparison", target=target)
        assert size_of(path) == (1800, 1200)

    def test_the_words_of_the_picture_tell_what_was_reached(self, tmp_path):
        """Times, ratios, failures and rates stand in the picture itself."""
        path = tmp_path / "comparison.svg"
        runs = [series("a", FAST), series("b", SLOW, rate=0.3), series("c", NEVER)]
        runs.append(series("d", FAST, NEVER))
        comparison_picture(path, runs, title="Comparison", target=0.9)
        words = path.read_text()
        for text in ("2.00 s", "6.00 s   3.0×", "not reached in 6.00 s", "1 of 2 seeds reach it"):
            assert f"<!-- {text} -->" in words
        assert "<!-- b (rate 0.3) -->" in words

    def test_a_loss_is_shown_as_lower_is_better(self, tmp_path):
        """A task without accuracy has a logarithmic loss axis, and says which way is good."""
        path = tmp_path / "comparison.svg"
        comparison_picture(path, [series("a", FALLING)], title="Comparison", target=0.6)
        words = path.read_text()
        assert "<!-- Test loss (log scale, lower is better) over epochs -->" in words
        assert "<!-- Virtual seconds to reach a loss of 0.6 -->" in words

    def test_times_far_apart_get_a_logarithmic_axis(self, tmp_path):
        """A method a hundred times slower must not squeeze the others, nor be cut off."""
        path = tmp_path / "comparison.svg"
        slowest = rows([0.1, 0.8, 0.95], seconds=100.0)
        runs = [series("a", FAST), series("b", slowest)]
        comparison_picture(path, runs, title="Comparison", target=0.9)
        assert "<!-- virtual seconds (log scale) -->" in path.read_text()

    def test_an_unknown_kind_of_file_is_refused(self, tmp_path):
        """The message offers kinds that work."""
        with pytest.raises(ConfigurationError, match=r"'a\.doc'; end its name in \.png"):
            comparison_picture(tmp_path / "a.doc", [series("a", FAST)], title="", target=0.9)


class TestPictureInput:
    def test_runs_that_were_never_evaluated_are_refused(self, tmp_path):
        """A run without true gradients has no score to draw."""
        with pytest.raises(ConfigurationError, match="at least one evaluated run"):
            comparison_picture(tmp_path / "a.png", [series("a", [])], title="", target=0.9)

    def test_two_methods_of_one_label_are_refused(self, tmp_path):
        """They could not be told apart."""
        runs = [series("a", FAST), series("a", SLOW)]
        with pytest.raises(ConfigurationError, match="different labels"):
            comparison_picture(tmp_path / "a.png", runs, title="", target=0.9)

    def test_a_missing_matplotlib_is_named_with_the_remedy(self, tmp_path, monkeypatch):
        """Pictures are an optional part of the package."""
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'gossamer\[plot\]'"):
            comparison_picture(tmp_path / "a.png", [series("a", FAST)], title="", target=0.9)

    def test_a_table_with_a_cell_of_zero_is_refused(self, tmp_path):
        """Zero has no place on a logarithmic axis."""
        with pytest.raises(ConfigurationError, match="cells above zero"):
            table_picture(tmp_path / "a.png", "", ["a"], ["x"], {("a", "x"): 0.0}, {})


@needs_matplotlib
class TestTablePicture:
    def test_published_and_our_cells_stand_side_by_side(self, tmp_path):
        """The picture says how far the two are apart, and leaves out what is not known."""
        published = {("a", "x"): 1.0, ("a", "y"): 10.0, ("b", "x"): 100.0}
        ours = {("a", "x"): 1.1, ("a", "y"): 9.0, ("b", "y"): 5.0}
        path = tmp_path / "table.svg"
        table_picture(path, "Table", ["a", "b"], ["x", "y"], published, ours)
        words = path.read_text()
        assert "<!-- ours over published: 0.90 to 1.10 in the 2 cells that both have -->" in words
        assert "<!-- 1.10 -->" in words
        assert "<!-- 100 -->" in words

    def test_rows_beyond_three_go_to_a_second_line(self, tmp_path):
        """Four rows make two lines of panels, 3.2 inches each."""
        cells = {(row, "x"): 1.0 for row in "abcd"}
        path = tmp_path / "table.png"
        table_picture(path, "Table", list("abcd"), ["x"], cells, cells)
        assert size_of(path) == (1800, 1170)
