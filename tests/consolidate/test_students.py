"""Distillation: a student's task, its loss, and what it learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import gossamer
from gossamer.consolidate.models import TrainedModels
from gossamer.consolidate.student import distilled_task
from gossamer.contract.small_worlds import cluster_of
from gossamer.errors import ConfigurationError


@pytest.fixture(scope="module")
def ensemble() -> gossamer.Result:
    return gossamer.simulate("digits-mlp", "ensemble", cluster_of(4), epochs=6, evaluations=1)


def test_the_soft_part_is_hintons_up_to_a_constant() -> None:
    """Its gradient is that of T^2 KL(teachers || student) at temperature T."""
    scores = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    teachers = torch.rand(5, 3, dtype=torch.float64).softmax(-1)
    none = torch.zeros((), dtype=torch.float64)
    ours = gossamer.distillation_loss(scores, none, teachers, temperature=3.0, soft=1.0)
    theirs = 9 * functional.kl_div((scores / 3).log_softmax(-1), teachers, reduction="batchmean")
    found = [torch.autograd.grad(loss, scores)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*found)


def test_without_teachers_in_the_loss_the_student_is_a_plain_model(
    ensemble: gossamer.Result,
) -> None:
    """With soft 0 the student ends with the bits of a model that never had teachers."""
    task = distilled_task(ensemble, soft=0.0)
    short = {"epochs": 1, "learning_rate": 0.1, "engine": "loop"}
    taught, plain = (
        gossamer.simulate(one, "all_reduce", cluster_of(2), **short) for one in (task, "digits-mlp")
    )
    assert taught.parameters_digest == plain.parameters_digest
    assert taught.digest == plain.digest


def test_teachers_predict_as_an_ensemble_at_the_temperature(ensemble: gossamer.Result) -> None:
    """The targets are labels and the mean of the members' softmaxes; evaluation is by labels."""
    task = distilled_task(ensemble, temperature=2.0)
    labels, teachers = task.train.targets
    models = TrainedModels.of(ensemble)
    outputs = [models.predictions(one, models.task.train) for one in models.members]
    mean = torch.stack([(output / 2).softmax(-1) for output in outputs]).mean(0)
    assert torch.equal(labels, models.task.train.targets)
    torch.testing.assert_close(teachers, mean)
    output, targets = torch.randn(4, 10), torch.arange(4)
    assert torch.equal(task.loss(output, targets), models.task.loss(output, targets))


def test_a_student_learns_without_any_label(ensemble: gossamer.Result) -> None:
    """With soft 1 only the teachers are heard, and the student knows nearly what they know."""
    found = gossamer.distill(ensemble, soft=1.0, epochs=4, evaluations=1)
    assert found.scores["student"][1] > found.scores["ensemble"][1] - 0.05
    assert math.isfinite(found.scores["student"][0])


def test_real_workers_are_refused_a_task_that_has_no_name(ensemble: gossamer.Result) -> None:
    """Another process could not make the student's task again, so it is refused, not confused."""
    with pytest.raises(ConfigurationError, match="task"):
        gossamer.train(distilled_task(ensemble), "all_reduce", 2)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"soft": 1.5}, "soft must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature must be at least"),
        ({"student": "quadratic"}, "has other samples"),
    ],
)
def test_what_no_student_can_learn_is_refused(
    ensemble: gossamer.Result, choices: dict[str, object], said: str
) -> None:
    """One sentence each."""
    with pytest.raises(ConfigurationError, match=said):
        gossamer.distill(ensemble, **choices)
