"""When a target counts as reached: a crossing that lasts, whoever looks how often."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.runs.arrival import AROUND, RULE, arrival, evaluations, has_lasted, seconds_to
from gossamer.runs.statistics import best_rate, beyond
from histories import rows

few = settings(max_examples=50)


def noisy(looks: int, seed: int = 0, end: float = 0.97) -> list[dict]:
    """A run of 20 epochs that rises to `end`, with the jumps of a test on 360 images."""
    generator = np.random.default_rng(seed)
    epochs = np.linspace(0.0, 20.0, 2401)
    jumps = np.convolve(generator.normal(0.0, 0.02, 2401), np.ones(8) / 8, "same")
    scores = end * (1 - np.exp(-epochs / 1.5)) + np.where(epochs > 0, jumps, 0.0)
    at = np.linspace(0, 2400, looks + 1).astype(int)
    return [
        {"virtual_seconds": 2.0 * epochs[i], "epochs": epochs[i], "accuracy": scores[i]} for i in at
    ]


class TestTheRule:
    @few
    @given(st.floats(0.01, 0.8), st.floats(0.1, 100.0))
    def test_a_straight_line_is_met_where_it_crosses(self, target, seconds):
        """The average over a window with the moment in its middle is the line itself."""
        found = seconds_to(rows([0.0, 1.0], seconds=seconds), target)
        assert found == pytest.approx(target * seconds, rel=1e-5)

    def test_a_first_touch_that_does_not_last_does_not_count(self):
        """One lucky evaluation is no arrival."""
        lucky = [0.0, 0.5, 0.92, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95, 0.95, 0.95]
        steady = [0.0, 0.5, 0.50, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.95, 0.95, 0.95]
        assert seconds_to(rows(lucky), 0.9) == pytest.approx(seconds_to(rows(steady), 0.9))
        assert seconds_to(rows(lucky), 0.9) > 6.9

    def test_a_run_that_ends_below_the_target_has_not_held_it(self):
        """Whoever falls back has nothing to hand out."""
        assert seconds_to(rows([0.0, *[0.95] * 5, *[0.8] * 5]), 0.9) is None

    def test_a_dip_that_is_made_good_does_not_move_the_time(self):
        """The first moment counts, if the run ends there too."""
        dipped = [0.0, *[0.95] * 6, 0.8, *[0.95] * 6]
        assert seconds_to(rows(dipped), 0.9) == pytest.approx(
            seconds_to(rows([0.0, *[0.95] * 13]), 0.9)
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_more_evaluations_hardly_move_the_time(self, seed):
        """100 against 300: a few per cent; a first touch would come a fifth sooner."""
        often, more = (seconds_to(noisy(looks, seed), 0.95) for looks in (100, 300))
        assert often is not None
        assert more is not None
        assert abs(math.log(often / more)) < 0.1

    def test_the_time_does_not_depend_on_what_an_epoch_is(self):
        """The window is a share of the epochs passed, so that only ratios matter."""
        run = noisy(100)
        longer = [{**row, "epochs": 7.0 * row["epochs"]} for row in run]
        assert seconds_to(longer, 0.95) == pytest.approx(seconds_to(run, 0.95))

    def test_a_target_never_reached_has_no_time(self):
        """Nobody is credited with what happens after the end of a run."""
        assert seconds_to(rows([0.0, 0.5, 0.8]), 0.9) is None

    def test_a_target_met_at_the_start_takes_no_time(self):
        """The first evaluation has nothing before it."""
        assert seconds_to(rows([0.95, 0.96]), 0.9) == 0.0

    def test_a_loss_is_reached_from_above(self):
        """For a loss, at or below the target counts."""
        history = rows([4.0, 3.0, 2.0, 1.0, 0.0], key="loss")
        assert seconds_to(history, 1.5, "loss") == pytest.approx(2.5)
        assert seconds_to(history, 0.05, "loss") is None

    def test_a_score_rounded_to_32_bits_still_reaches_its_target(self):
        """342 right of 360 is 95 %, although the nearest 32-bit number is a little less."""
        assert seconds_to(rows([0.0, *[0.949999988079071] * 3]), 0.95) is not None

    def test_two_evaluations_at_one_moment_are_no_division_by_zero(self):
        """The end of a run is evaluated twice with the same epochs; the last counts."""
        history = rows([0.0, 0.9, 0.9, 0.95])
        history[3]["epochs"] = history[2]["epochs"]
        assert seconds_to(history, 0.9) is not None

    def test_a_run_that_ends_without_a_number_has_held_nothing(self):
        """A loss that overflowed on the way is passed over; at the end it is not."""
        assert seconds_to(rows([math.inf, 3.0, math.nan, 1.0, 1.0], key="loss"), 2.0, "loss")
        assert seconds_to(rows([3.0, 1.0, 1.0, math.nan], key="loss"), 2.0, "loss") is None

    def test_a_run_that_goes_on_has_told_its_time_once_the_window_is_full(self):
        """Stopped then, it has the time that it would have had at its end."""
        run = noisy(100)
        told = next(at for at in range(1, 102) if has_lasted(run[:at], 0.95, "accuracy"))
        assert told < 60
        assert run[told - 1]["accuracy"] >= 0.95
        assert seconds_to(run[:told], 0.95) == pytest.approx(seconds_to(run, 0.95))

    def test_the_rule_is_stated_with_its_width(self):
        """What page and console print is what is computed."""
        assert f"{100 * AROUND:g} %" in RULE

    @pytest.mark.parametrize(("epochs", "looks"), [(1.0, 20), (10.0, 50), (20.0, 100), (90.0, 100)])
    def test_five_evaluations_an_epoch_within_bounds(self, epochs, looks):
        """Few enough to be cheap, often enough not to matter."""
        assert evaluations(epochs) == looks


class TestArrivals:
    def test_the_mean_of_times_is_that_of_their_logarithms(self):
        """Half as long and twice as long cancel; it is never below zero."""
        quick, slow = rows([0.0, 1.0]), rows([0.0, 1.0], seconds=4.0)
        assert arrival("a", [quick, slow], 0.5, "accuracy").mean == pytest.approx(1.0)

    def test_a_mean_over_the_lucky_seeds_is_none(self):
        """It would flatter."""
        found = arrival("a", [rows([0.0, 1.0]), rows([0.0, 0.1])], 0.5, "accuracy")
        assert (found.mean, found.reached) == (None, 1)
        assert found.ends == (1.0, 1.0)


class TestTheBestRate:
    def test_the_rate_that_reaches_the_target_first_wins(self):
        """What is ranked decides, whichever rate ends highest."""
        runs = {
            0.03: [rows([0.0, 0.5, 0.7, 0.8, 0.9, 0.97, 0.97])],
            0.1: [rows([0.0, 0.7, 0.9, 0.95, 0.95, 0.95, 0.95])],
        }
        assert best_rate(runs, 0.9) == 0.1

    def test_not_reached_is_later_than_the_last_evaluation(self):
        """A late arrival is before none, and among those the better end decides."""
        late, never = [0.0, 0.1, 0.2, 0.8, 0.85, 0.9], [0.0, 0.79, 0.79, 0.79, 0.79, 0.79]
        runs = {0.1: [rows(late)], 0.3: [rows(never)], 0.9: [rows([0.0] * 6)]}
        assert best_rate(runs, 0.8) == 0.1
        assert best_rate({rate: runs[rate] for rate in (0.9, 0.3)}, 0.8) == 0.3

    def test_a_rate_that_diverged_comes_last(self):
        """Whatever its other seed did."""
        runs = {
            0.01: [rows([2.0, 1.0], key="loss"), rows([2.0, 1.0], key="loss")],
            1.0: [rows([2.0, 0.1], key="loss"), rows([2.0, math.nan], key="loss")],
        }
        assert best_rate(runs, 0.05) == 0.01
        assert best_rate(runs, 0.6) == 0.01

    @pytest.mark.parametrize(
        ("rate", "further"), [(0.3, 0.9), (0.1, None), (0.03, 0.009), (0.5, None)]
    )
    def test_beyond_the_edge_lies_the_next_rate_of_the_same_ratio(self, rate, further):
        """0.03, 0.1, 0.3 goes on with 0.9; inside of the grid nothing is beyond."""
        assert beyond(rate, [0.03, 0.1, 0.3]) == further

    def test_a_grid_of_one_rate_has_no_edge(self):
        """Whoever names one rate wants that one."""
        assert beyond(0.1, [0.1]) is None
