"""A checkpoint of n workers goes on with m: no sample is forgotten, and the model is the mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer
from gossamer.errors import ConfigurationError
from gossamer.real.train.batches import LEASE, LeasedBatches
from gossamer.real.train.resized_checkpoint import _agreed_on, _model_of, _paces
from gossamer.real.transports.local import LocalStore
from gossamer.tasks.split import Order
from tiers import wide

BATCHES = 60


def leased(store: LocalStore, rank: int, size: int) -> LeasedBatches:
    return LeasedBatches(BATCHES, 1, BATCHES, store, Order(BATCHES, 0, 1), rank, size)


@given(
    before=st.integers(1, 4),
    after=st.integers(1, 5),
    order=st.lists(st.integers(0, 3), max_size=50),
)
def test_every_batch_is_done_and_only_what_was_left_of_leases_is_done_again(
    before: int, after: int, order: list[int]
) -> None:
    """Whoever made how many steps before, and however many go on."""
    store = LocalStore()
    old = [leased(store, rank, before) for rank in range(before)]
    done: list[int] = []
    for rank in order:
        if rank < before and old[rank].open_step(0):
            done.append(int(old[rank].next_batch()[0]))
    states = _paces([one.state() for one in old], after, 1)
    store = LocalStore()
    new = [leased(store, rank, after) for rank in range(after)]
    for worker, state in zip(new, states, strict=True):
        worker.resume(state, states)
    again: list[int] = []
    working = list(new)
    while working:
        for worker in list(working):
            if worker.open_step(0):
                again.append(int(worker.next_batch()[0]))
            else:
                working.remove(worker)
    assert set(done) | set(again) == set(range(BATCHES))
    assert len(again) == len(set(again))
    assert len(set(done) & set(again)) <= max(0, before - after) * (LEASE - 1)


def test_rounds_go_on_behind_those_that_all_have_made() -> None:
    (pace, *others) = _paces([{"claimed": 96, "drawn": 8}] * 3, 2, 4)
    assert pace == {"claimed": 96, "drawn": 12}
    assert others == [pace]


def test_the_model_is_the_weighted_mean_and_only_what_all_know_goes_on() -> None:
    tensors = {
        rank: {
            "worker/value": torch.tensor([float(rank)]),
            "worker/memory/velocity": torch.tensor([7.0]),
            "worker/memory/accrued": torch.tensor([float(rank)]),
        }
        for rank in range(3)
    }
    facts: dict[int, Any] = {
        rank: {"replicas": {"worker": {"weight": weight}}}
        for rank, weight in enumerate((0.5, 1.0, 0.5))
    }
    assert float(_model_of(tensors, facts)) == pytest.approx(1.5)
    assert _agreed_on(list(tensors.values())).keys() == {"velocity"}


@wide
@pytest.mark.parametrize("method", ["d_psgd", "ad_psgd", "ssp:servers=2", "push_sum", "diloco"])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_run_of_three_goes_on_with_others(method: str, workers: int, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"batch": 16, "evaluations": 1}
    run = tmp_path / "run"
    run.mkdir()
    first = gossamer.train(
        "digits-mlp", method, workers=3, epochs=3, folder=run,
        checkpoint_every="20steps", **choices,
    )  # fmt: skip
    found = gossamer.train("digits-mlp", method, workers=workers, epochs=6, resume=run, **choices)
    assert found.summary["living"] == workers
    assert found.summary["samples"] >= 6 * 1437
    assert found.accuracy is not None
    assert first.accuracy is not None
    assert found.accuracy > first.accuracy - 0.02


@wide
def test_members_of_an_ensemble_keep_their_number(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    gossamer.train(
        "digits-mlp", "ensemble", workers=2, epochs=1, folder=tmp_path / "run",
        checkpoint_every="20steps",
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="its models are never averaged; start 2"):
        gossamer.train("digits-mlp", "ensemble", workers=3, epochs=2, resume=tmp_path / "run")
