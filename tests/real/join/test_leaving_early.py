"""A worker that leaves its loop before the others: no collective waits for it."""

from __future__ import annotations

import json

import pytest

from programs import PROGRAMS, answers_of

GROUPS = [
    ("case_of_means_without_a_leaver", 3, "all_reduce"),
    ("case_of_means_without_a_leaver", 3, "sync_server"),
    ("case_of_means_without_a_leaver", 3, "all_reduce", "torch"),
    ("case_of_means_by_messages", 3, "all_reduce", "torch"),
    ("case_of_leaving_early", 3, "local_sgd:period=2"),
    ("case_of_leaving_early", 3, "d_psgd", "torch"),
    ("case_of_leaving_early", 3, "push_sum"),
    ("case_of_leaving_early", 3, "easgd:synchronous=true"),
    ("case_of_leaving_early", 3, "pull_gossip:groups=1"),
]
ASKED = ("case_of_asking_a_leaver", 3, "all_reduce")
CAUGHT = ("case_of_a_failure_that_is_caught", 3, "all_reduce")
_found: dict[tuple[str | int, ...], dict] = {}


@pytest.fixture(autouse=True, scope="module")
def run_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All groups, one after the other, in one program that imports torch once."""
    groups = [*GROUPS, ASKED, CAUGHT]
    program = PROGRAMS / "join_groups.py"
    found = answers_of(program, json.dumps(groups), places=tmp_path_factory)
    _found.update(zip(groups, found, strict=True))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(map(str, group)))
def test_the_others_go_on_without_it_and_it_gets_their_model(group) -> None:
    """By the mean of those who are left; one of them says so, once."""
    found = _found[group]
    assert found["ends"] == [0] * 3, found["written"]
    assert len({answer["digest"] for answer in found["answers"]}) == 1
    assert found["written"].count("worker 1 has left its loop after 3 steps; the others") == 1


def test_who_has_left_says_so_when_it_is_asked() -> None:
    """It does not compute, and nobody need wait for it."""
    found = _found[ASKED]
    assert found["ends"] == [0] * 3, found["written"]
    (said,) = [json.loads(line) for line in found["written"].splitlines() if line[0] == "{"]
    assert said["worker"] == 1
    waits = [wait["waits_for"] for wait in said["waiting"]]
    assert waits == ["the others: it has made its last step"]


def test_a_loop_that_failed_has_left_although_its_process_lives_on() -> None:
    """The others finish without it, while it waits for them."""
    found = _found[CAUGHT]
    assert found["ends"] == [0] * 3, found["written"]
    first, _, second = found["answers"]
    assert first["digest"] == second["digest"]
