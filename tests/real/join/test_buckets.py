"""Gradients reduced in parts during backward end as if they had been reduced at the end."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.real.join import gradient
from gossamer.real.join.binding import ModuleBinding
from join_buckets import PARTS, STEPS
from programs import PROGRAMS, answers_of
from tiers import looks_at, only

EARLY, LATE = "all_reduce", "all_reduce:overlap=false"
ALWAYS = ["parts", "parts_with_adam", "a_combined_clip", "accumulating", "no_numbers"]
"""Loops that leave their gradients alone between backward and step."""
UNTIL = {
    "a_clip": 1, "one_who_clips_once": 5, "two_backward_passes": 1, "a_gradient_replaced": 3,
    "a_batch_left_out": 4, "data_changed": 1, "a_scaler": 1, "unscaling": 1,
    "memory": 1,
}  # fmt: skip
"""Loops that change them, and after how many steps nothing is sent early any more."""
LEFT_OUT, LATER, STALE = "a_layer_left_out", "data_changed_late", "all_reduce:stale=1"
NEVER = ["one_who_cannot", "a_change_before_sending"]
"""Loops in which nothing is sent before the step."""
COMPARED = [*ALWAYS, *UNTIL, *NEVER, LEFT_OUT, "an_end_after_backward"]
FEW = {"parts", "a_combined_clip", "one_who_clips_once", "a_scaler", "one_who_cannot", LEFT_OUT}
"""Those that every `make test` looks at."""
MISUSES = {
    "awaiting_a_part": "awaited before the gradient",
    "changing_a_part": "can only be reduced as it is before the gradient is there",
}
DEATH = "a_death_in_backward"
GROUPS = [
    *((f"case_of_{name}", 2, method, "torch") for name in COMPARED for method in (EARLY, LATE)),
    ("case_of_parts", 3, EARLY, "torch"), ("case_of_parts", 3, LATE, "torch"),
    ("case_of_parts", 2, STALE, "torch"), ("case_of_parts", 2, f"{STALE},overlap=false", "torch"),
    ("case_of_parts", 2, EARLY, "shm"), (f"case_of_{LATER}", 2, EARLY, "torch"),
    (f"case_of_{DEATH}", 3, EARLY, "torch"),
    ("case_of_going_on_stale", 2, STALE, "torch"),
    ("case_of_going_on_stale", 2, f"{STALE},overlap=false", "torch"),
    *((f"case_of_{name}", 2, EARLY, "torch") for name in MISUSES),
]  # fmt: skip
WIDE = {
    (f"case_of_{name}", 2, method, "torch")
    for name in COMPARED if name not in FEW for method in (EARLY, LATE)
}  # fmt: skip


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int, str, str], Any]:
    """All groups, one after the other, in one program that imports torch once."""
    program, groups = PROGRAMS / "join_bucket_groups.py", looks_at(request, WIDE, GROUPS)
    answers = answers_of(program, json.dumps(groups), places=tmp_path_factory)
    return dict(zip(groups, answers, strict=True))


def workers(found: dict, name: str, method: str, size: int = 2, transport: str = "torch") -> list:
    """What each worker returned, after all ended well."""
    group = found[f"case_of_{name}", size, method, transport]
    assert group["ends"] == [0] * size, group["written"]
    return group["answers"]


def only_digest(answers: list[dict]) -> str:
    (digest,) = {answer["digest"] for answer in answers}
    return digest


@pytest.mark.parametrize("name", only(FEW, COMPARED))
def test_the_result_is_that_of_reducing_at_the_end(found, name: str) -> None:
    early, late = (only_digest(workers(found, name, method)) for method in (EARLY, LATE))
    assert early == late


def test_three_workers_too(found) -> None:
    early, late = (only_digest(workers(found, "parts", method, 3)) for method in (EARLY, LATE))
    assert early == late


@pytest.mark.parametrize("name", only(FEW, ALWAYS))
def test_all_parts_are_on_their_way_before_the_step(found, name: str) -> None:
    for answer in workers(found, name, EARLY):
        assert answer["sent"] == [PARTS] * STEPS
    for answer in workers(found, name, LATE):
        assert answer["sent"] == [0] * STEPS


def test_parts_are_one_exchange(found) -> None:
    for method in (EARLY, LATE):
        assert [answer["exchanges"] for answer in workers(found, "parts", method)] == [STEPS] * 2


@pytest.mark.parametrize("name", only(FEW, UNTIL))
def test_a_loop_that_changes_its_gradients_is_reduced_at_the_end_from_then_on(found, name) -> None:
    """By everybody, also where only one of them has changed something."""
    until = UNTIL[name]
    for answer in workers(found, name, EARLY):
        assert answer["sent"] == [PARTS] * until + [0] * (STEPS - until)


def test_parts_wait_for_what_one_worker_has_not_used(found) -> None:
    first, second = (answer["sent"] for answer in workers(found, LEFT_OUT, EARLY))
    assert first == [PARTS] * STEPS
    assert second == [1, PARTS, PARTS] * (STEPS // 3)


def test_a_change_that_torch_does_not_count_is_refused_when_it_is_seen(found) -> None:
    for answer in workers(found, LATER, EARLY):
        assert "changed through .data between backward and worker.step()" in answer["said"]


def test_a_method_that_leaves_its_means_for_later_sends_nothing_early(found) -> None:
    early = workers(found, "parts", STALE)
    assert only_digest(early) == only_digest(workers(found, "parts", f"{STALE},overlap=false"))
    for answer in early:
        assert answer["sent"] == [PARTS] + [0] * (STEPS - 1)


def test_what_is_applied_first_after_going_on_is_not_sent_again(found) -> None:
    """The gradient that was clipped is reduced anew before another takes its place."""
    early, late = (
        only_digest(workers(found, "going_on_stale", method))
        for method in (STALE, f"{STALE},overlap=false")
    )
    assert early == late


@pytest.mark.parametrize("name", only(FEW, NEVER))
def test_nothing_is_sent_before_the_step(found, name: str) -> None:
    for answer in workers(found, name, EARLY):
        assert answer["sent"] == [0] * STEPS


@pytest.mark.parametrize("name", MISUSES)
def test_a_method_that_misuses_parts_is_told(found, name: str) -> None:
    for answer in workers(found, name, EARLY):
        assert MISUSES[name] in answer["said"]


def test_parameters_without_numbers_are_in_a_part_with_others(monkeypatch) -> None:
    monkeypatch.setattr(gradient, "_BYTES", 8)
    named = [(str(n), nn.Parameter(torch.zeros(size))) for n, size in enumerate((0, 0, 3, 1, 2))]
    assert gradient.bucket_ranges(ModuleBinding(named)) == [range(4, 5), range(4)]
    assert gradient.bucket_ranges(ModuleBinding(named[:2])) == [range(2)]
    monkeypatch.setattr(gradient, "_BYTES", 4)
    assert gradient.bucket_ranges(ModuleBinding(named)) == [range(4, 5), range(3, 4), range(3)]


def test_where_nothing_goes_on_by_itself_gradients_stay_in_one_piece(found) -> None:
    answers = workers(found, "parts", EARLY, transport="shm")
    assert [answer["sent"] for answer in answers] == [[0] * STEPS] * 2
    assert only_digest(answers) == only_digest(workers(found, "parts", EARLY))


def test_the_others_go_on_after_a_death_in_the_middle_of_backward(found) -> None:
    group = found[f"case_of_{DEATH}", 3, EARLY, "torch"]
    assert group["ends"] == [0, -signal.SIGKILL, 0], group["written"]
    survivors = [group["answers"][0], group["answers"][2]]
    assert only_digest(survivors)
    assert [answer["sent"] for answer in survivors] == [[PARTS] * STEPS] * 2
