"""Distillation (Hinton et al. 2015): one student learns what several teachers predict.

The student is an ordinary task whose training targets are the labels and the teachers' predictions,
so any method trains it, on any cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.config.cluster import Cluster, load_cluster
from gossamer.config.settings import loaded_task
from gossamer.consolidate.models import Source, TrainedModels
from gossamer.errors import ConfigurationError
from gossamer.methods import MethodSpec
from gossamer.runs.result import Result
from gossamer.sim.simulation import simulate
from gossamer.specs import check_range
from gossamer.tasks import Task
from gossamer.tasks.data import Data
from gossamer.tasks.task import soft_cross_entropy


def distillation_loss(
    output: Tensor, labels_loss: Tensor, teachers: Tensor, *, temperature: float = 4.0,
    soft: float = 0.9,
) -> Tensor:  # fmt: skip
    """(1 - soft) * loss of the labels + soft * T^2 * cross-entropy of the teachers' predictions.

    `teachers` are probabilities at that temperature. The factor T^2 keeps the gradients of both
    parts in proportion, whatever the temperature is (Hinton et al. 2015).
    """
    taught = temperature**2 * soft_cross_entropy(output / temperature, teachers)
    return (1 - soft) * labels_loss + soft * taught


@dataclass(frozen=True)
class _StudentLoss:
    """The loss of a student's task: of training targets with predictions beside the labels, and at
    evaluation of labels alone, as any model of the task is measured."""

    of_labels: Callable[[Any, Any], Tensor]
    temperature: float
    soft: float

    def __call__(self, output: Any, targets: Any) -> Tensor:
        if not isinstance(targets, tuple):
            return self.of_labels(output, targets)
        labels, teachers = targets
        return distillation_loss(
            output, self.of_labels(output, labels), teachers, temperature=self.temperature,
            soft=self.soft,
        )  # fmt: skip


def distilled_task(
    sources: Source | Sequence[Source] | TrainedModels, *, temperature: float = 4.0,
    soft: float = 0.9, student: str | Task | None = None, task: str | Task | None = None,
    data: Path | str | None = None,
) -> Task:  # fmt: skip
    """The task of learning from the mean prediction of trained models.

    `soft` is the share of the loss that is due to the teachers: 1 needs no labels, 0 is training
    without teachers. `student` is the task whose model the student is, by default the teachers'
    own. Teachers see the training samples as they are, without augmentation.
    """
    check_range("temperature", temperature, 1e-3)
    if not 0.0 <= soft <= 1.0:
        raise ConfigurationError(f"soft must be from 0 to 1, got {soft}")
    models = (
        sources if isinstance(sources, TrainedModels)
        else TrainedModels.of(sources, task=task, data=data)
    )  # fmt: skip
    own = models.task
    if not own.has_accuracy:
        raise ConfigurationError(
            f"{own.name} has no classes, and distillation is by the probabilities of classes; "
            "choose runs of a task that is judged by accuracy"
        )
    pupil = own if student is None else loaded_task(student, data)
    _check_fits(own, pupil)
    outputs = torch.stack([models.predictions(one, own.train) for one in models.members])
    teachers = (outputs / temperature).softmax(-1).mean(0)
    return dataclasses.replace(
        pupil, name=f"{pupil.name}-distilled", title=f"{pupil.title}, distilled",
        train=Data(own.train.inputs, (own.train.targets, teachers), own.train.labels_as),
        loss=_StudentLoss(pupil.loss, temperature, soft),
    )  # fmt: skip


def _check_fits(teacher: Task, pupil: Task) -> None:
    first, second = teacher.train.inputs, pupil.train.inputs
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in (first, second)]
    if shapes[0] != shapes[1] or None in shapes:
        raise ConfigurationError(
            f"the student's task {pupil.name} has other samples than the teachers' {teacher.name}; "
            "choose one with the same data"
        )


@dataclass(frozen=True, eq=False)
class Distilled:
    """A student, its teachers, and a model of its kind that had none."""

    task: Task
    """The task that the teachers were trained on."""
    result: Result
    """The student's own run."""
    teachers: int
    scores: dict[str, tuple[float, float]]
    """Loss and accuracy on the test set: of a teacher (the mean of all), of the ensemble, of the
    student, and, if it was asked for, of the student's kind without teachers."""

    def state_dict(self) -> dict[str, Tensor]:
        """The student, for `load_state_dict` of its task's model."""
        return self.result.state_dict()

    def as_dict(self) -> dict[str, Any]:
        return {
            name.replace(" ", "_"): {"loss": loss, "accuracy": accuracy}
            for name, (loss, accuracy) in self.scores.items()
        }

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {accuracy:.4g}" for name, (_, accuracy) in self.scores.items())
        return f"<Distilled: of {self.teachers}, {shown}>"


def distill(
    sources: Source | Sequence[Source], *, temperature: float = 4.0, soft: float = 0.9,
    student: str | Task | None = None, method: str | MethodSpec = "all_reduce",
    cluster: str | Path | Cluster | None = None, alone: bool = False,
    task: str | Task | None = None, data: Path | str | None = None, **choices: Any,
) -> Distilled:  # fmt: skip
    """Train one student on the predictions of trained models; see `distilled_task`.

    `method` and `cluster` train the student, by default one worker alone. With `alone` the same
    model is trained by labels only, in the same way. `choices` are those of `simulate`; the
    learning rate is the least of the task's grid unless another is given, because the teachers'
    part of the loss is steep.
    """
    models = TrainedModels.of(sources, task=task, data=data)
    taught = distilled_task(
        models, temperature=temperature, soft=soft, student=student, data=data
    )  # fmt: skip
    if choices.get("learning_rate") is None:
        choices["learning_rate"] = min(taught.learning_rates)
    where = load_cluster("equal-8" if cluster is None else cluster)
    where = where.changed(workers=1) if cluster is None else where
    result = simulate(taught, method, where, **choices)
    test = models.task.test
    singles = [models.score(one.value, one.buffers, test) for one in models.members]
    scores = {
        "single teacher": _means(singles),
        "ensemble": _means([models.ensemble_score(test)]),
        "student": _means([(result.loss, result.accuracy)]),
    }
    if alone:
        pupil = loaded_task(student, data) if student is not None else models.task
        other = simulate(pupil, method, where, **choices)
        scores["student without teachers"] = _means([(other.loss, other.accuracy)])
    return Distilled(models.task, result, len(models), scores)


def _means(scored: Sequence[tuple[float, float | None]]) -> tuple[float, float]:
    count = len(scored)
    return sum(loss for loss, _ in scored) / count, sum(one or 0.0 for _, one in scored) / count
