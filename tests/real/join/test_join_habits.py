"""Habits of users in a coupled loop: nothing goes wrong without a word."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.real.join.checks import check_apart
from gossamer.replica import trainable
from programs import PROGRAMS, answers_of

OTHER_MODELS = "case_of_other_models"
MOVED = [
    "all_reduce",
    "ssp",
    "downpour",
    "ad_psgd:most=inf",
    "easgd",
    "local_sgd:period=1",
    "d_psgd",
]
GROUPS = [
    ("case_of_unfreezing", 2, "all_reduce"),
    ("case_of_unfreezing", 2, "sync_server"),
    ("case_of_replacing_data", 2, "all_reduce"),
    ("case_of_replacing_data", 2, "ad_psgd"),
    (OTHER_MODELS, 2, "ad_psgd"),
    ("case_of_a_step_beside", 2, "easgd"),
    ("case_of_a_step_beside", 2, "ssp"),
    ("case_of_two_optimisers", 2, "all_reduce"),
    *(("case_of_an_old_graph", 2, method) for method in MOVED),
    ("case_of_clamping", 3, "ad_psgd:least=0,most=0"),
    ("case_of_clamping_data", 3, "ad_psgd:least=0,most=0"),
    ("case_of_touching_a_shared_replica", 3, "ad_psgd"),
    ("case_of_loading_inside", 2, "easgd:alpha=0,period=1"),
    ("case_of_loading_inside", 2, "push_sum"),
    ("case_of_changes_that_servers_undo", 2, "sync_server"),
    ("case_of_wrapping_afterwards", 2, "all_reduce"),
    ("case_of_a_visit_in_a_visit", 2, "all_reduce"),
    ("case_of_a_scaler_without_update", 2, "all_reduce"),
    ("case_of_loaders", 2, "all_reduce"),
    ("case_of_climbing", 2, "hogwild"),
    ("case_of_climbing", 2, "eamsgd"),
    ("case_of_climbing", 2, "downpour:n_fetch=4"),
    ("case_of_climbing", 2, "ssp"),
    ("case_of_an_added_group", 2, "sync_server"),
    ("case_of_an_added_group", 2, "all_reduce"),
    ("case_of_a_fused_optimiser", 2, "all_reduce"),
    ("case_of_sparse_adam", 2, "all_reduce"),
    ("case_of_sparse_adam", 2, "sync_server"),
    ("case_of_expanded_buffers", 2, "pull_gossip"),
    ("case_of_own_signals", 2, "all_reduce"),
]
_found: dict[tuple[str | int, ...], dict] = {}


@pytest.fixture(autouse=True, scope="session")
def run_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All groups, one after the other, in one program that imports torch once."""
    program = PROGRAMS / "join_groups.py"
    found = answers_of(program, json.dumps(GROUPS), places=tmp_path_factory)
    _found.update(zip(GROUPS, found, strict=True))


def answers(case: str, size: int, method: str) -> list[dict]:
    """What each worker returned, after all ended well."""
    group = _found[case, size, method]
    assert group["ends"] == [0] * size, group["written"]
    return group["answers"]


@pytest.mark.parametrize(
    "group",
    [group for group in GROUPS if group[0] != OTHER_MODELS],
    ids=lambda group: "-".join(map(str, group)),
)
def test_the_checks_inside_the_workers_pass(group) -> None:
    """Where they end with a model, it is one model."""
    assert len({answer.get("digest") for answer in answers(*group)}) == 1


@pytest.mark.parametrize("method", ["all_reduce", "sync_server"])
def test_a_parameter_unfrozen_too_late_is_named(method: str) -> None:
    found = answers("case_of_unfreezing", 2, method)
    assert any(answer["said"] is not None for answer in found)
    for answer in found:
        if answer["said"] is None:
            continue
        assert "parameter 0.weight was frozen when the model was joined" in answer["said"] or (
            "parameter 0.bias was frozen when the model was joined" in answer["said"]
        )


@pytest.mark.parametrize("method", ["all_reduce", "ad_psgd"])
def test_a_parameter_that_was_taken_elsewhere_is_named(method: str) -> None:
    for answer in answers("case_of_replacing_data", 2, method):
        assert answer["said"].startswith("parameter 2.weight no longer lies where gossamer.join")


@pytest.mark.parametrize("method", ["easgd", "ssp"])
def test_a_step_of_the_optimiser_beside_the_workers_is_refused_before_it_is_made(
    method: str,
) -> None:
    """Instead of the worker's it would train nothing that counts, and beside it twice."""
    for answer in answers("case_of_a_step_beside", 2, method):
        for said in answer["said"]:
            assert said.startswith("optimizer.step() was called inside `with gossamer.join(...)`")


@pytest.mark.parametrize("method", MOVED)
def test_a_graph_from_before_a_step_is_not_gone_back_through(method: str) -> None:
    """The parameters have moved since, and torch says so as without us; those without a gradient,
    too, but where only the optimiser moves them, which leaves them alone."""
    is_left = method in ("all_reduce", "ssp")
    for answer in answers("case_of_an_old_graph", 2, method):
        for said in answer["moved"] if is_left else answer["moved"] + answer["kept"]:
            assert "modified by an inplace operation" in said
        assert method != "all_reduce" or answer["kept"] == ["", ""]


def test_what_a_loop_changes_is_added_to_what_others_have_averaged_meanwhile() -> None:
    """A change of nothing moves no mean."""
    for answer in answers("case_of_touching_a_shared_replica", 3, "ad_psgd"):
        assert answer["mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("case", ["case_of_clamping", "case_of_clamping_data"])
def test_weights_that_the_loop_clamps_are_clamped_where_they_are_published(case: str) -> None:
    """Not only in the private copy, which is given anew in every step."""
    for answer in answers(case, 3, "ad_psgd:least=0,most=0"):
        assert answer["largest"] <= 0.0101


def test_what_servers_would_undo_is_refused() -> None:
    """Whether torch counts the change or not."""
    for answer in answers("case_of_changes_that_servers_undo", 2, "sync_server"):
        for said in answer["said"]:
            assert said.startswith("parameter 2.weight was changed in place between two steps, but")


def test_a_second_optimiser_of_the_model_is_named() -> None:
    """Whether it is stepped or was forgotten; one inside of the joined one, and those of other
    models, are none."""
    for answer in answers("case_of_two_optimisers", 2, "all_reduce"):
        for said in answer["said"]:
            assert said.startswith("a second optimiser (AdamW) holds the model's parameter 2.weigh")


def test_wrapping_a_joined_model_in_ddp_is_refused_at_the_first_step() -> None:
    """It would be coupled twice."""
    for answer in answers("case_of_wrapping_afterwards", 2, "all_reduce"):
        assert answer["said"].startswith("DistributedDataParallel is wrapped around the joined")


def test_processes_that_know_each_other_but_no_launcher_do_not_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of `mp.spawn` do where `init_process_group` was kept. A group of one is alone."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", place, rank=0, world_size=1)
    try:
        gossamer.join(model, optimizer, "all_reduce")
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        with pytest.raises(ConfigurationError, match="this is one of 4 processes"):
            gossamer.join(model, optimizer, "all_reduce")
    finally:
        torch.distributed.destroy_process_group()


def test_models_of_different_shapes_are_refused_at_the_start() -> None:
    group = _found[OTHER_MODELS, 2, "ad_psgd"]
    assert group["ends"] == [1, 1]
    assert group["written"].count("this worker's model is another than that of the first") == 1


def test_no_step_is_made_while_the_output_is_looked_at() -> None:
    for answer in answers("case_of_a_visit_in_a_visit", 2, "all_reduce"):
        assert answer["said"].startswith("worker.step() was called inside worker.consensus()")


def test_a_scaler_must_be_updated_and_a_closure_is_no_scaler() -> None:
    for answer in answers("case_of_a_scaler_without_update", 2, "all_reduce"):
        first, second, third, fourth, closure = answer["said"]
        assert first == second == third == ""
        assert "without scaler.update() in between" in fourth
        assert "got a function" in closure


def test_every_sample_is_somebodys_whatever_the_loader() -> None:
    """Each once; what cannot be shared out is refused."""
    mine, theirs = answers("case_of_loaders", 2, "all_reduce")
    plain = [(name, 0.0) for name in ("single", "own draws", "handing over")]
    for name, offset in (*plain, ("own class", 0.5)):
        both = mine["found"][name] + theirs["found"][name]
        assert sorted(both) == [number + offset for number in range(40)], name
        assert mine["found"][name] != sorted(mine["found"][name]), name
    assert len(mine["found"]["many"]) == 500
    for answer in (mine, theirs):
        twice, endless = answer["said"]
        assert "DistributedSampler shares the data out already" in twice
        assert "no length and gave more than 100 batches" in endless


@pytest.mark.parametrize("method", ["hogwild", "eamsgd", "downpour:n_fetch=4", "ssp"])
def test_an_optimiser_that_climbs_climbs(method: str) -> None:
    for answer in answers("case_of_climbing", 2, method):
        assert answer["last"] > answer["first"] + 0.5


def test_expanded_buffers_stay_what_they_are() -> None:
    for answer in answers("case_of_expanded_buffers", 2, "pull_gossip"):
        assert answer["ids"] == [[0, 1, 2, 3]] * 2


def test_the_scripts_own_handler_hears_its_signal() -> None:
    for answer in answers("case_of_own_signals", 2, "all_reduce"):
        assert answer["heard"] == ["inside", "after"]


def test_a_seed_of_the_workers_is_another_on_each() -> None:
    """The given one on worker 0, so that alone all is as with torch's own."""

    def drawn(rank: int, seed: int) -> tuple[float, float, float]:
        model = nn.Linear(2, 2)
        worker = gossamer.join(model, torch.optim.SGD(model.parameters(), lr=0.1), "all_reduce")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(worker), "rank", rank)
            worker.manual_seed(seed)
        return float(torch.rand(())), random.random(), float(np.random.rand())

    torch.manual_seed(3)
    first = float(torch.rand(()))
    assert drawn(0, 3)[0] == first
    assert drawn(1, 3) == drawn(1, 3)
    every = [drawn(rank, seed) for rank in range(4) for seed in range(4)]
    assert all(len(set(numbers)) == 16 for numbers in zip(*every, strict=True))


# ---------------------------------------------------------------------- models


def test_parameters_in_one_memory_are_refused() -> None:
    """Tied as one parameter they are fine, and so are neighbours in one vector."""
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight.data = tied[0].weight.data.t()
    with pytest.raises(ConfigurationError, match=r"0\.weight and 1\.weight share memory"):
        check_apart(trainable(tied))
    tied[1].weight = tied[0].weight
    check_apart(trainable(tied))
    flat = torch.zeros(4)
    check_apart([("low", nn.Parameter(flat[:2])), ("high", nn.Parameter(flat[2:]))])
    with pytest.raises(ConfigurationError, match="low and high share memory"):
        check_apart([("high", nn.Parameter(flat[1:])), ("low", nn.Parameter(flat[:2]))])


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (nn.Linear(2, 2, dtype=torch.complex64), r"weight is complex \(torch\.complex64\)"),
        (nn.LazyLinear(2), "weight has no shape yet; run the model once on a batch"),
    ],
)
def test_parameters_that_cannot_be_averaged_are_refused(model: nn.Module, sentence: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with pytest.raises(ConfigurationError, match=sentence):
        gossamer.join(model, optimizer, "all_reduce")
