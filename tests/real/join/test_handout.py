"""What coupled loops hand out: the output of one moment, with statistics of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from programs import PROGRAMS, answers_of
from tiers import looks_at, only

LOOKING = "case_of_looking_after_every_step"
LOOKED_AT = [
    (3, "all_reduce"),
    (3, "all_reduce", "torch"),
    (3, "local_sgd:period=3"),
    (3, "local_sgd:period=3", "torch"),
    (4, "d_psgd"),
    (3, "push_sum"),
    (3, "sync_server"),
    (3, "easgd:synchronous=true"),
]
SAME_FOR_ALL = [
    ("case_of_one_who_looks", 3, "all_reduce"),
    ("case_of_one_who_looks", 3, "all_reduce", "torch"),
    ("case_of_own_statistics", 2, "pull_gossip"),
    ("case_of_own_statistics", 2, "pull_gossip", "torch"),
    ("case_of_layers_called_one_by_one", 2, "pull_gossip"),
    ("case_of_a_weak_coupling", 8, "easgd:period=20"),
]
GROUPS = [*((LOOKING, *group) for group in LOOKED_AT), *SAME_FOR_ALL]
FEW = [LOOKED_AT[2], LOOKED_AT[4], LOOKED_AT[6]]
WIDE = [(LOOKING, *group) for group in LOOKED_AT if group not in FEW]


@pytest.fixture(scope="module")
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str | int, ...], Any]:
    """What became of all of them."""
    program, asked = PROGRAMS / "output_groups.py", looks_at(request, WIDE, GROUPS)
    found = answers_of(program, json.dumps(asked), places=tmp_path_factory)
    return dict(zip(asked, found, strict=True))


def answers(groups: dict[tuple[str | int, ...], Any], *group: str | int) -> list[Any]:
    found = groups[group]
    assert found["ends"] == [0] * int(group[1]), found["written"]
    return found["answers"]


@pytest.mark.parametrize(
    "group", only(FEW, LOOKED_AT, are_one=True), ids=lambda group: "-".join(map(str, group))
)
def test_all_see_the_output_of_the_step_that_they_have_made(groups: Any, group: Any) -> None:
    """Straight after a step, whoever is faster: never a mixture of two steps, the same for all."""
    seen = [answer["seen"] for answer in answers(groups, LOOKING, *group)]
    assert all(one == seen[0] for one in seen)
    assert len(set(seen[0])) > 5  # a centre moves once a period


@pytest.mark.parametrize("group", SAME_FOR_ALL, ids=lambda group: "-".join(map(str, group)))
def test_all_leave_with_the_same_bits(groups: Any, group: Any) -> None:
    """Parameters, recomputed statistics, and buffers that no mean can be made of."""
    assert len({answer["digest"] for answer in answers(groups, *group)}) == 1


def test_the_end_has_everybodys_batches(groups: Any) -> None:
    """Each layer's statistics are the mean over all workers' batches, as the case itself computes
    them; what is counted is worker 0's. Modes, momenta, random states and the loop's own buffers
    are as they were."""
    for answer in answers(groups, "case_of_own_statistics", 2, "pull_gossip"):
        assert answer["steps"] == 3


def test_who_cannot_know_batches_asks_for_them_once(groups: Any) -> None:
    """One worker, one sentence; with batches of the loop's own there is nothing to say."""
    first, second = answers(groups, "case_of_layers_called_one_by_one", 2, "pull_gossip")
    (said,) = first["said"]
    assert "give the worker some with worker.recalibrate(batches)" in said
    assert second["said"] == []


def test_a_centre_that_is_hardly_coupled_is_worth_something(groups: Any) -> None:
    """In a loop's own evaluation and at its end; with averaged statistics it has 11 to 25 %."""
    for answer in answers(groups, "case_of_a_weak_coupling", 8, "easgd:period=20"):
        assert answer["inside"] > 0.45
        assert answer["after"] > 0.45
