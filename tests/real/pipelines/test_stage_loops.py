"""A loop of one's own over pipelines of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
import join_stages
from programs import run_program
from tiers import wide

pytestmark = pytest.mark.timeout(300)


def ran(*groups: tuple[str, int, str]) -> list[dict[str, Any]]:
    program = str(Path(join_stages.__file__))
    return json.loads(run_program(program, json.dumps(groups), limit_s=110.0))


def trained_alone(replicas: int, steps: int) -> torch.Tensor:
    """One process that takes the mean gradient of the batches of all replicas."""
    model = join_stages.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = join_stages.batches()
    for step in range(steps):
        optimizer.zero_grad()
        own = batches[replicas * step : replicas * (step + 1)]
        losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in own]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    "method",
    [
        "all_reduce:stages=2",
        pytest.param("all_reduce:stages=2,pipeline=gpipe,microbatches=4", marks=wide),
        pytest.param("all_reduce:stages=2,pipeline=interleaved", marks=wide),
        pytest.param("all_reduce:stages=2,pipeline=zbv", marks=wide),
    ],
)
def test_two_pipelines_of_two_are_one_large_batch(method: str) -> None:
    """Every process ends with the whole model, and sees the whole one in between."""
    (found,) = ran(("staged", 4, method))
    assert found["ends"] == [0] * 4, found["written"]
    steps = join_stages.STEPS
    for answer in found["answers"]:
        for key, made in (("model", steps), ("seen", steps // 2)):
            expected = trained_alone(2, made)
            torch.testing.assert_close(torch.tensor(answer[key]), expected, rtol=1e-5, atol=1e-6)
    first, second = (found["answers"][rank]["losses"] for rank in (0, 2))
    assert found["answers"][1]["losses"] == first != second


@wide
@pytest.mark.parametrize(
    ("method", "workers"), [("ad_psgd:stages=2", 4), ("local_sgd:period=2,stages=2", 4),
                            ("diloco:period=2,stages=4", 4), ("ensemble:stages=2", 4)],
)  # fmt: skip
def test_every_process_ends_with_the_output_of_its_method(method: str, workers: int) -> None:
    (found,) = ran(("staged", workers, method))
    assert found["ends"] == [0] * workers, found["written"]
    models = [torch.tensor(answer["model"]) for answer in found["answers"]]
    stages = 4 if "stages=4" in method else 2
    if method.startswith("ensemble"):
        assert torch.equal(models[0], models[1])
        assert not torch.equal(models[0], models[2])
    else:
        assert all(torch.equal(model, models[0]) for model in models)
    for answer in found["answers"][::stages]:
        assert answer["losses"][-1] < 0.8 * answer["losses"][0]


@wide
def test_a_loop_goes_on_from_its_checkpoint() -> None:
    """As if it had not been interrupted; with other numbers of processes it does not."""
    method = "all_reduce:stages=2"
    _, found, other = ran(
        ("resumed", 4, method), ("resumed", 4, method), ("resumed", 2, method)
    )  # fmt: skip
    assert found["ends"] == [0] * 4, found["written"]
    for answer in found["answers"]:
        torch.testing.assert_close(
            torch.tensor(answer["model"]), trained_alone(2, join_stages.STEPS), rtol=1e-5, atol=1e-6
        )
    assert all("2 cannot go on with them" in answer["refused"] for answer in other["answers"])


def test_a_replica_ends_with_one_of_its_loops_and_the_others_go_on() -> None:
    (found,) = ran(("dying", 4, "all_reduce:stages=2"))
    assert found["ends"] == [0, 0, 0, 9], found["written"]
    assert found["answers"][:2] == ["finished"] * 2
    assert "the replica of workers 2, 3 has ended with one of them" in found["answers"][2]


REFUSED = {
    "all_reduce:stages=2,pipeline=gpipe": "as example=inputs",
    "all_reduce:stages=2,pipeline=pipedream": "use gossamer train, or a pipeline such as 1f1b",
    "downpour:stages=2,servers=2": "the stages of a loop have no servers",
    "all_reduce:stages=2,tensor=2": "give the mesh to gossamer.join",
    "all_reduce:stages=3": "3 stages do not divide the 2 workers",
    "all_reduce:stages=2,microbatches=3": "cannot be divided into 3 equal",
    "all_reduce:stages=2,cut=1": "Linear cannot be cut into stages",
}


def test_what_stages_of_a_loop_cannot_do_is_said() -> None:
    for found, said in zip(
        ran(*(("refused", 2, method) for method in REFUSED)), REFUSED.values(), strict=True
    ):
        assert all(said in answer for answer in found["answers"]), found


def test_alone_a_batch_goes_through_the_whole_model() -> None:
    """The same script under plain python."""
    model = join_stages.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gossamer.join(model, optimizer, "all_reduce:stages=2") as worker:
        for inputs, targets in worker.shard(join_stages.batches()[: join_stages.STEPS]):
            worker.through_stages(inputs, targets, nn.functional.mse_loss)
            worker.step()
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(found, trained_alone(1, join_stages.STEPS))
