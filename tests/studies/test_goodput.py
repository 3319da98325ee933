"""The published goodputs, by the closed form and in virtual time."""

from __future__ import annotations

import pytest

from gossamer.studies.reproductions.goodput import (
    ARRANGEMENTS,
    closed_form,
    fitted_downtime,
    simulated,
)
from tiers import only


def test_two_fitted_constants_explain_nine_published_cells_within_6_points() -> None:
    assert fitted_downtime(is_elastic=True) == pytest.approx(19.0, abs=0.1)
    assert fitted_downtime(is_elastic=False) == pytest.approx(71.1, abs=0.1)
    assert len(ARRANGEMENTS) == 9
    assert all(abs(closed_form(one) - one.published) <= 6 for one in ARRANGEMENTS)


@pytest.mark.parametrize("one", only((ARRANGEMENTS[7],), ARRANGEMENTS, are_one=True))
def test_the_simulated_goodput_is_within_3_points_of_its_closed_form(one: object) -> None:
    """Of 300 deaths a single learner has a standard error of up to 1.7 points."""
    arrangement = next(own for own in ARRANGEMENTS if own is one)
    ours = simulated(arrangement, seed=0, deaths=300)
    assert ours == pytest.approx(closed_form(arrangement), abs=3.0)
