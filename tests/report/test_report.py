"""Statistics and pictures of comparisons: what they say is what the runs allow, and no more."""

import importlib.util
import math
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigurationError
from gossamer.report.pictures.run_pictures import Series, comparison_picture, table_picture
from gossamer.runs.arrival import arrival
from gossamer.runs.ranking import Ranking, t_quantile
from gossamer.runs.statistics import interval, measure, seed_curves, show_number
from histories import rows
from tiers import wide

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
few = settings(max_examples=50)
ordinary = st.floats(-1e3, 1e3)


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


class TestReadings:
    def test_a_task_without_accuracy_is_judged_by_its_loss(self):
        """Accuracy where there is one, loss elsewhere."""
        assert measure([rows([0.5])]) == "accuracy"
        assert measure([rows([2.0], key="loss")]) == "loss"

    def test_scores_that_were_taken_often_are_drawn_as_averages(self):
        """A curve that jumps at every evaluation becomes the line that it jumps around."""
        jumping = rows([0.5 + 0.1 * (-1) ** at for at in range(81)])
        _, seeds = seed_curves([jumping], "accuracy", "epochs")
        assert np.abs(seeds[0, 40:] - 0.5).max() < 0.02
        _, raw = seed_curves([jumping[:20]], "accuracy", "epochs")
        assert np.abs(raw[0] - 0.5).min() == pytest.approx(0.1)

    def test_a_mean_goes_on_to_the_last_seed_and_those_that_ended_keep_their_value(self):
        """A run that stopped at its target has it from then on: the mean reaches the line too."""
        places, seeds = seed_curves(
            [rows([0.0, 0.4]), rows([0.0, 0.2, 0.6])], "accuracy", "virtual_seconds"
        )
        assert places.tolist() == [0.0, 1.0, 2.0]
        assert seeds.tolist() == [[0.0, 0.4, 0.4], [0.0, 0.2, 0.6]]

    @pytest.mark.parametrize(
        ("value", "shown"), [(0.0, "0"), (0.8234, "0.823"), (9.999, "10.0"), (4567.0, "4,567")]
    )
    def test_numbers_are_written_out_with_three_figures(self, value, shown):
        """No exponents where people read seconds."""
        assert show_number(value) == shown


def series(label, *histories, rate=0.1):
    shares = {"computing": 0.5, "waiting": 0.25, "other": 0.25}
    return Series(label, histories, 2, rate, shares)


def drawn(path, runs, target, title="Comparison"):
    key = measure([history for one in runs for history in one.histories])
    ranking = Ranking([arrival(one.label, one.histories, target, key) for one in runs])
    comparison_picture(path, runs, title=title, target=target, ranking=ranking.places)


def size_of(path):
    """Width and height from the header of a PNG file."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 20_000, "the picture is all but blank"
    return struct.unpack(">II", data[16:24])


FAST = rows([0.1, 0.7, 0.8, 0.9, 1.0])
SLOW = rows([0.1, 0.7, 0.8, 0.9, 1.0], seconds=3.0)
NEVER = rows([0.1, 0.3, 0.4, 0.5, 0.5], seconds=2.0)
FALLING = rows([5.0, 2.0, 1.0, 0.5, 0.5], key="loss")
DIVERGED = rows([5.0, 1e30, math.nan, math.inf], key="loss")


@needs_matplotlib
class TestComparisonPicture:
    @pytest.mark.parametrize(
        ("runs", "target"),
        [
            pytest.param(
                [series("a", FAST), series("b", SLOW, rate=0.3)], 0.9, id="one-seed", marks=wide
            ),
            pytest.param([series("a", FAST, NEVER, SLOW), series("b", SLOW)], 0.9, id="seeds"),
            pytest.param([series("a", FALLING), series("b", DIVERGED)], 0.6, id="no-accuracy"),
            pytest.param([series("a", FAST)], 0.9, id="one-method", marks=wide),
            pytest.param(
                [series("a", FAST), series("b", NEVER)], 0.9, id="never-reached", marks=wide
            ),
        ],
    )
    def test_a_picture_of_the_promised_size_is_written(self, tmp_path, runs, target):
        """12 by 8 inches at 150 dots, whatever the runs look like."""
        path = tmp_path / "new" / "comparison.png"
        drawn(path, runs, target)
        assert size_of(path) == (1800, 1200)

    def test_the_words_of_the_picture_tell_what_was_reached(self, tmp_path):
        """Times, ratios, failures and rates stand in the picture itself."""
        path = tmp_path / "comparison.svg"
        runs = [series("a", FAST, FAST), series("b", SLOW, SLOW, rate=0.3)]
        runs += [series("c", NEVER, NEVER), series("d", FAST, NEVER)]
        drawn(path, runs, 0.9)
        words = path.read_text()
        for text in ("3.00 s", "9.00 s   3.0×", "not reached in 8.00 s", "1 of 2 seeds reach it"):
            assert f"<!-- {text} -->" in words
        assert "<!-- b (rate 0.3) -->" in words

    def test_a_loss_is_shown_as_lower_is_better(self, tmp_path):
        """A task without accuracy has a logarithmic loss axis, and says which way is good."""
        path = tmp_path / "comparison.svg"
        drawn(path, [series("a", FALLING)], 0.6)
        words = path.read_text()
        assert "<!-- Test loss (log scale, lower is better) over epochs -->" in words
        assert "<!-- Virtual seconds to reach a loss of 0.6 -->" in words

    def test_times_far_apart_get_a_logarithmic_axis(self, tmp_path):
        """A method a hundred times slower must not squeeze the others, nor be cut off."""
        path = tmp_path / "comparison.svg"
        slowest = rows([0.1, 0.8, 0.95, 0.95], seconds=100.0)
        runs = [series("a", FAST), series("b", slowest)]
        drawn(path, runs, 0.9)
        assert "<!-- virtual seconds (log scale) -->" in path.read_text()

    def test_an_unknown_kind_of_file_is_refused(self, tmp_path):
        """The message offers kinds that work."""
        with pytest.raises(ConfigurationError, match=r"'a\.doc'; end its name in \.png"):
            drawn(tmp_path / "a.doc", [series("a", FAST)], 0.9)


class TestPictureInput:
    def test_a_missing_matplotlib_is_named_with_the_remedy(self, tmp_path, monkeypatch):
        """Pictures are an optional part of the package."""
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ConfigurationError, match="run `pip install matplotlib`"):
            drawn(tmp_path / "a.png", [series("a", FAST)], 0.9)

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
