"""The committed table of questions whose answer flips: `benchmarks/turning_points.py` makes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import turning_points

from tiers import wide

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "docs" / "benchmarks" / "turning-points.json").read_text())


def test_the_page_shows_the_kept_figures() -> None:
    """Line by line, as the script prints them."""
    page = (ROOT / "docs" / "advice.md").read_text()
    assert turning_points.table(KEPT) in page


QUESTIONS = pytest.mark.parametrize("question", turning_points.QUESTIONS, ids=lambda one: one.axis)


def kept(question: turning_points.Question) -> Any:
    (found,) = (one for one in KEPT if one["axis"] == question.axis)
    return found


@QUESTIONS
def test_the_answer_flips_between_the_ends(question: turning_points.Question) -> None:
    """Every crossing lies there, and the adviser names one method at the one end and the other at
    the other."""
    found, least, most = kept(question), question.values[0], question.values[-1]
    assert all(least < at < most for kind in ("steps", "target") for at in found[kind].values())
    assert tuple(one["method"] for one in found["advice"]) == question.methods


@wide
@QUESTIONS
def test_forms_and_simulations_cross_where_they_did(question: turning_points.Question) -> None:
    """In time alone, and within a tenth of each other."""
    steps = kept(question)["steps"]
    formed, simulated = turning_points.step_turns(question)
    assert formed == pytest.approx(steps["closed_forms"])
    assert simulated == pytest.approx(steps["simulated"])
    assert formed == pytest.approx(simulated, rel=0.11)
