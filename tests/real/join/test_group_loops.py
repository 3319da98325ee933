"""`groups=` in a user's own loop: the group's members compute at one point, its leader speaks."""

from __future__ import annotations

import json
import signal

import pytest

from programs import PROGRAMS, answers_of
from tiers import looks_at, wide

EXACT = [
    "all_reduce:groups=2", "all_reduce:groups=1", "all_reduce:groups=host", "local_sgd:groups=1",
    "sync_server:groups=2", "sync_server:groups=2,servers=3",
]  # fmt: skip
OTHERS = [
    "d_psgd:groups=2", "push_sum:groups=2", "ad_psgd:groups=2", "pull_gossip:groups=4",
    "easgd:groups=2", "downpour:groups=2", "diloco:groups=2",
]  # fmt: skip
FEW_EXACT = ["all_reduce:groups=2", "local_sgd:groups=1", "sync_server:groups=2,servers=3"]
FEW_OTHERS = ["d_psgd:groups=2", "ad_psgd:groups=2", "downpour:groups=2"]
SHARDED = ["all_reduce:groups=2", "ad_psgd:groups=2", "downpour:groups=1"]
CHECKPOINTS = ["case_of_no_interruption", "case_of_saving", "case_of_loading"]
LOWERED = "softsync:lower_momentum=true"
RUNS = [
    *(("case_of_one_big_worker", 4, method) for method in EXACT),
    *(("case_of_training", 4, method) for method in OTHERS),
    *(("case_of_one_point", 4, method) for method in ("ad_psgd:groups=2", "d_psgd:groups=2")),
    *(("case_of_shards", 4, method) for method in SHARDED),
    *((case, 4, "all_reduce:groups=2") for case in CHECKPOINTS),
    ("case_of_scaling", 4, "all_reduce:groups=2"),
    ("case_of_a_dying_leader", 4, "all_reduce:groups=2"),
    ("case_of_a_dying_member", 4, "all_reduce:groups=2"),
    ("case_of_an_asynchronous_server", 2, LOWERED),
    ("case_of_an_asynchronous_server", 4, f"{LOWERED},groups=2"),
]
WIDE = [
    *(("case_of_one_big_worker", 4, method) for method in EXACT if method not in FEW_EXACT),
    *(("case_of_training", 4, method) for method in OTHERS if method not in FEW_OTHERS),
]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int, str], dict]:
    """All of them one after the other, in one program that imports torch once."""
    program, runs = PROGRAMS / "group_loops.py", looks_at(request, WIDE, RUNS)
    told = answers_of(program, json.dumps(runs), places=tmp_path_factory)
    return dict(zip(runs, told, strict=True))


def answers(found: dict, case: str, method: str, size: int = 4) -> list[dict]:
    run = found[case, size, method]
    assert run["ends"] == [0] * size, run["written"]
    return run["answers"]


@pytest.mark.parametrize(
    "methods", [FEW_EXACT, pytest.param(EXACT, marks=wide)], ids=["some", "all"]
)
def test_groups_that_average_exactly_are_one_big_worker(found: dict, methods: list[str]) -> None:
    """The checks inside the workers pass, and all end with one model."""
    for method in methods:
        digests = {answer["digest"] for answer in answers(found, "case_of_one_big_worker", method)}
        assert len(digests) == 1, method


@pytest.mark.parametrize(
    "methods", [FEW_OTHERS, pytest.param(OTHERS, marks=wide)], ids=["some", "all"]
)
def test_every_member_ends_with_the_output_of_any_method(found: dict, methods: list[str]) -> None:
    """Leaving `with` gives all of them the same bits, after a step for each of their batches."""
    for method in methods:
        ran = answers(found, "case_of_training", method)
        assert len({answer["digest"] for answer in ran}) == 1, method
        assert len({answer["steps"] for answer in ran}) == 1, method


@pytest.mark.parametrize("method", ["ad_psgd:groups=2", "d_psgd:groups=2"])
def test_a_group_computes_at_one_point(found: dict, method: str) -> None:
    """Also where peers change the leader's parameters at any moment; groups are apart."""
    points = [answer["points"] for answer in answers(found, "case_of_one_point", method)]
    assert points[0] == points[1]
    assert points[2] == points[3]
    assert points[0] != points[2]


@pytest.mark.parametrize("method", SHARDED)
def test_the_members_of_a_group_get_equal_numbers_of_batches(found: dict, method: str) -> None:
    """And each batch goes to one worker; less than a round of a group is left out."""
    taken = [answer["taken"] for answer in answers(found, "case_of_shards", method)]
    assert len(taken[0]) == len(taken[1])
    assert len(taken[2]) == len(taken[3])
    every = sorted(number for own in taken for number in own)
    assert len(set(every)) == len(every)
    assert len(every) > 37 - 4


def test_a_resumed_loop_with_groups_goes_on_bit_for_bit(found: dict) -> None:
    """Saved between two steps and loaded by other processes, as if nothing had been."""
    whole, _, loaded = (answers(found, case, "all_reduce:groups=2") for case in CHECKPOINTS)
    assert [one["digest"] for one in loaded] == [one["digest"] for one in whole]


def test_gradient_scaling_works_in_a_group(found: dict) -> None:
    """Its checks pass inside the workers."""
    ran = answers(found, "case_of_scaling", "all_reduce:groups=2")
    assert len({answer["digest"] for answer in ran}) == 1


def test_a_group_ends_with_its_leader_in_one_sentence(found: dict) -> None:
    """Its member's next step raises; the other group goes on to one model."""
    run = found["case_of_a_dying_leader", 4, "all_reduce:groups=2"]
    assert run["ends"] == [0, 0, -signal.SIGKILL, 0], run["written"]
    first, second, _, orphan = run["answers"]
    assert first == second
    assert orphan == {
        "said": "worker 2 is lost: it led the group of workers 2, 3, which ends with it; the other "
        "groups go on",
        "finite": True,
    }


def test_a_group_goes_on_without_a_member(found: dict) -> None:
    """All who live end with one model."""
    run = found["case_of_a_dying_member", 4, "all_reduce:groups=2"]
    assert run["ends"] == [0, 0, 0, -signal.SIGKILL], run["written"]
    assert len({answer["digest"] for answer in run["answers"][:3]}) == 1


def test_a_servers_momentum_is_lowered_by_what_asynchrony_adds(found: dict) -> None:
    """1 - n (1 - 0.9) for n workers, or groups, that push for themselves."""
    alone = answers(found, "case_of_an_asynchronous_server", LOWERED, 2)
    grouped = answers(found, "case_of_an_asynchronous_server", f"{LOWERED},groups=2")
    momenta = [momentum for ran in (alone, grouped) for one in ran for momentum in one["momenta"]]
    assert momenta == pytest.approx([0.8] * 4)
