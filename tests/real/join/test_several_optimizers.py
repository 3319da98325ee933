"""Several optimisers over one model, and several models with an optimiser each, in one loop."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import gossamer
from gossamer.errors import ConfigurationError
from join_cases import batch, loss_of, net, plain
from join_several import (
    Both,
    halves_of,
    models,
    optimizers_of,
    pair_of,
    play,
    step_by_scaler,
)
from programs import PROGRAMS, answers_of

PAIR, MODELS = "case_of_muon_and_adamw", "case_of_two_models"
SCALED = "case_of_a_scaler"
MOVING = "case_of_methods_that_move_all"
METHODS = ["all_reduce", "sync_server", "sync_server:servers=2", "downpour", "ad_psgd"]
GROUPS = [
    *((PAIR, 2, method) for method in METHODS),
    *((MODELS, 2, method) for method in METHODS),
    (SCALED, 2, "all_reduce"),
    (MOVING, 2, "eamsgd"),
    (MOVING, 2, "sync_server:server_optimiser=adam"),
]
_found: dict[tuple[str | int, ...], dict] = {}


@pytest.fixture(autouse=True, scope="session")
def run_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All groups, one after the other, in one program that imports torch once."""
    program = PROGRAMS / "join_groups.py"
    found = answers_of(program, json.dumps(GROUPS), places=tmp_path_factory)
    _found.update(zip(GROUPS, found, strict=True))


def answers(*group: str | int) -> list[dict]:
    """What each worker returned, after all ended well."""
    assert _found[group]["ends"] == [0] * int(group[1]), _found[group]["written"]
    return _found[group]["answers"]


@pytest.mark.parametrize("method", METHODS)
def test_two_optimisers_train_one_model(method: str) -> None:
    """Synchronous workers equal one process (checked inside); each optimiser's state is whole."""
    zero, one = answers(PAIR, 2, method)
    assert zero["digest"] == one["digest"]
    assert zero["saved"] == [2, 2]


@pytest.mark.parametrize("method", METHODS)
def test_each_of_two_models_descends_in_steps_of_its_own(method: str) -> None:
    """Synchronous workers equal one process (checked inside); every step is one of the method."""
    zero, one = answers(MODELS, 2, method)
    assert zero["digest"] == one["digest"]
    assert [zero["made"], one["made"]] == [9, 9]


def test_gradients_are_unscaled_once_by_whatever_name_the_loop_unscales_them() -> None:
    """Its own optimisers, what stands for each or for all, or only some: the model is that of one
    process without a scaler on all batches (checked inside)."""
    zero, one = answers(SCALED, 2, "all_reduce")
    assert zero["digest"] == one["digest"]


@pytest.mark.parametrize("group", GROUPS[-2:], ids=str)
def test_a_method_that_moves_all_parameters_refuses_steps_of_one_optimiser(group) -> None:
    """With the reason, and a step of all is made."""
    for answer in answers(*group):
        assert "would move the parameters of the other optimisers too" in answer["said"]


# ---------------------------------------------------------------------- alone


def test_alone_several_optimisers_are_bit_for_bit_what_they_were() -> None:
    """Muon and AdamW step together, a generator and its judge apart."""
    found = []
    for is_joined in (False, True):
        model, both = net(0), models(0)
        pair, parts = pair_of(model), optimizers_of(*both)
        with gossamer.join(model, pair) as worker:
            for step in range(3):
                model.zero_grad()
                loss_of(model, *batch(0, step)).backward()
                for one in [worker] if is_joined else pair:
                    one.step()
        with gossamer.join(both, parts) as worker:
            steps = [one.step for one in (worker.optimizers if is_joined else parts)]
            play(*both, parts, steps, lambda number: batch(0, number))
        found.append([*model.parameters(), *nn.ModuleList(both).parameters()])
    for before, joined in zip(*found, strict=True):
        assert torch.equal(before, joined)


def test_alone_gradients_are_unscaled_once_too() -> None:
    """The bits are those of the loop without a scaler, whose scale is a power of two."""
    model, alone = net(0), net(0)
    own = halves_of(model)
    with gossamer.join(model, own) as worker:
        steps = step_by_scaler(worker, model, own, 0)
    plain(alone, Both(halves_of(alone)), 1, steps=steps)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_alone_only_the_optimiser_with_infinite_gradients_makes_no_step() -> None:
    """As where a loop calls the scaler for one after the other."""
    both = models(0)
    parts = optimizers_of(*both)
    before = [[p.detach().clone() for p in model.parameters()] for model in both]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with gossamer.join(both, parts) as worker:
        for model, factor in zip(both, (1.0, float("inf")), strict=True):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 8.0 * factor)
        scaler.scale(torch.ones(1))
        worker.step(scaler)
    moved = [
        [not torch.equal(p, old) for p, old in zip(model.parameters(), olds, strict=True)]
        for model, olds in zip(both, before, strict=True)
    ]
    assert all(moved[0])
    assert not any(moved[1])


def test_optimisers_that_cannot_go_together_are_refused() -> None:
    """One sentence each."""
    model = net(0)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="held by two of the optimisers"):
        gossamer.join(model, [first, second])
    with pytest.raises(ConfigurationError, match="empty list of optimisers"):
        gossamer.join(model, [])
    sparse = torch.optim.SparseAdam(list(model[2].parameters()))
    with pytest.raises(ConfigurationError, match="SparseAdam takes sparse gradients only"):
        gossamer.join(model, [second, sparse])
    with (
        gossamer.join(model, first) as worker,
        pytest.raises(ConfigurationError, match="was not joined"),
    ):
        worker.step(optimizer=second)
