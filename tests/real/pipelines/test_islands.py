"""FSDP2 inside of islands and a method between them, on CPU processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import join_islands
from programs import run_program
from tiers import wide

pytestmark = pytest.mark.timeout(300)


def ran(*groups: tuple[str, int, str]) -> list[dict[str, Any]]:
    program = str(Path(join_islands.__file__))
    return json.loads(run_program(program, json.dumps(groups), limit_s=110.0))


def trained_alone(workers: int, width: int = 7) -> torch.Tensor:
    """One process that takes the mean gradient of what all of them see."""
    model = join_islands.model_of(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(join_islands.STEPS):
        optimizer.zero_grad()
        losses = [join_islands.loss_of(model, rank, step) for rank in range(workers)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_islands_with_all_reduce_are_one_large_batch() -> None:
    """Two islands of two processes, and one process with four times the batch."""
    (found,) = ran(("sharded", 4, "all_reduce"))
    assert found["ends"] == [0] * 4, found["written"]
    for answer in found["answers"]:
        torch.testing.assert_close(
            torch.tensor(answer["model"]), trained_alone(4), rtol=1e-5, atol=1e-6
        )


@wide
def test_islands_with_a_plan_of_tensors_are_one_large_batch() -> None:
    """Columns of the first layer and rows of the last, on two islands of two processes."""
    (found,) = ran(("planned", 4, "all_reduce"))
    assert found["ends"] == [0] * 4, found["written"]
    for answer in found["answers"]:
        torch.testing.assert_close(
            torch.tensor(answer["model"]), trained_alone(2, width=8), rtol=1e-5, atol=1e-6
        )


@wide
@pytest.mark.parametrize("method", ["diloco:period=4", "local_sgd:period=4", "ad_psgd", "slowmo"])
def test_every_island_ends_with_the_output_model(method: str) -> None:
    """The shards that belong together have the mean of the islands, which has learnt."""
    (found,) = ran(("sharded", 4, method))
    assert found["ends"] == [0] * 4, found["written"]
    models = [torch.tensor(answer["model"]) for answer in found["answers"]]
    assert all(torch.equal(model, models[0]) for model in models)
    untrained = float(join_islands.loss_of(join_islands.model_of(), 0, 99).detach())
    assert all(answer["seen"] < 0.7 * untrained for answer in found["answers"])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("all_reduce", "Sequential has no sharded parameter"),
        ("downpour", "islands have no servers"),
        ("all_reduce:groups=1", "the islands are the replicas"),
    ],
)
def test_what_is_no_island_is_refused(method: str, said: str) -> None:
    (found,) = ran(("unsharded", 2, method))
    assert all(said in answer for answer in found["answers"]), found
