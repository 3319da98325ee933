"""Over the torch transport: deaths in the middle of large sums, by messages and in shared memory,
and a failure that ends the interpreter in good order."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from programs import PROGRAMS, answers_of
from tiers import looks_at, only

EXIT_CODE = 3
MESSAGES, SHARED = (
    {"GOSSAMER_REDUCTION": name, "GOSSAMER_LOCAL_SIZE": "3"} for name in ("messages", "auto")
)
AMID = "scenario_a_death_in_the_middle_of_a_large_sum"
LARGE = "scenario_a_death_at_any_moment_of_large_sums"
MANY = "scenario_a_death_at_any_moment_of_many_all_reduces"
FAILS = "scenario_a_process_that_ends_without_closing_is_dead"
LAWS = [
    (AMID, MESSAGES), (LARGE, MESSAGES), (MANY, MESSAGES), (FAILS, MESSAGES), (LARGE, SHARED),
    (FAILS, SHARED),
]  # fmt: skip
FEW = [0, 3, 4]
"""The places of those that every `make test` looks at."""


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of each group, by its place."""
    program = PROGRAMS / "torch_groups.py"
    places = list(range(len(LAWS)))
    places = looks_at(request, [place for place in places if place not in FEW], places)
    groups = json.dumps([(3, [LAWS[place][0]], LAWS[place][1]) for place in places])
    return dict(zip(places, answers_of(program, groups, places=tmp_path_factory), strict=True))


@pytest.mark.parametrize("place", only(FEW, range(len(LAWS))))
def test_survivors_keep_the_law(place: int, answers: Any) -> None:
    """They pass the scenario and end well; process 1 ends as it was told to."""
    name, answer = LAWS[place][0], answers[place]
    said = "\n".join(answer["written"])
    assert answer["ends"] == [0, EXIT_CODE if name == FAILS else -signal.SIGKILL, 0], said
    assert [f"passed {name}\n" in text for text in answer["written"]] == [True, False, True], said
