"""What the models are worth at a moment: the output model, the workers, how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.replica import OF_RUN
from gossamer.rules import mean_of_models
from gossamer.tasks.data import Data
from gossamer.tasks.flat_model import FlatModel, blamed_on, checked_loss, drawing_from
from gossamer.tasks.metric import Metric, scores_in
from gossamer.tasks.task import Task

BUFFER_POLICIES = {
    "recomputed": "those of the output model itself, on batches of training data",
    "averaged": "the mean of the workers' statistics",
    "local": "those of the first living worker",
}
_BATCHES = 8
# Of the workers a sample is evaluated: they are there to see how far they lag behind the output.
_MOST_WORKERS = 8
_MOST_SAMPLES = 1000
_COUNTED, _AVERAGE = f"{OF_RUN}models in the average", f"{OF_RUN}average of output models"
_ROUNDING = 1e-9


def buffer_policy(text: str) -> tuple[str, int]:
    """A policy by name, and on how many batches it recomputes: `recomputed:16` says so."""
    name, _, number = text.partition(":")
    if name not in BUFFER_POLICIES:
        raise unknown_name("buffers policy", name, BUFFER_POLICIES)
    if not number and ":" not in text:
        return name, _BATCHES
    if name != "recomputed" or not number.isdecimal() or int(number) == 0:
        raise ConfigurationError(
            f"buffers policy {text!r} is not understood; only recomputed takes a number of "
            "batches, at least 1, as in recomputed:16"
        )
    return name, int(number)


@dataclass
class Scores:
    """Loss and metric of the output model, and the metric of some workers, on the test set."""

    loss: float
    metric: float | None
    worker_metric: float | None
    consensus_distance: float
    beside: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further metrics of the task, of the output model."""

    def row(self, task: Task) -> dict[str, Any]:
        """The columns of a run's row. A metric of the task's own has a column by its name, and the
        row says that it is what the run is judged by."""
        is_accuracy = task.has_accuracy
        row: dict[str, Any] = {
            "loss": self.loss,
            "accuracy": self.metric if is_accuracy else None,
            "worker_accuracy": self.worker_metric if is_accuracy else None,
            "consensus_distance": self.consensus_distance,
        }
        if task.metric is not None and not is_accuracy:
            row |= {
                task.score: self.metric,
                f"worker_{task.score}": self.worker_metric,
                "score": str(task.score),
                "lower_is_better": task.score.is_lower_better,
            }
        return row | dict(self.beside)


@dataclass
class Held:
    """What workers and servers hold at a moment, of those that are alive."""

    workers: Tensor
    """One row each; for push-sum the numerators."""
    weights: Sequence[float]
    buffers: Tensor
    servers: Sequence[Tensor]
    scores: Sequence[float] = ()
    """What each worker's model is worth, less being better; empty where nobody asks."""


def output_parameters(
    output: str, workers: Tensor, weights: Sequence[float], servers: Sequence[Tensor],
    scores: Sequence[float] = (),
) -> Tensor:  # fmt: skip
    """The model that a method declares as its output: what its servers hold, that of the best
    worker, or the workers' mean.

    Everyone who combines the same values gets the same bits.
    """
    if servers and output in ("centre", "server", "moving average"):
        return torch.cat(list(servers))
    if output == "best" and scores:
        return workers[best_of(scores)].clone()
    return mean_of_models(workers, weights)


def best_of(scores: Sequence[float]) -> int:
    """The first of those with the least score."""
    return min(range(len(scores)), key=scores.__getitem__)


Answers = list[tuple[Any, Data]]
"""What a model returned, with the data that it was for."""
Answer = Callable[[Tensor, Tensor, Data], Any]
"""Gives the output for parameters, statistics and data."""


class InParts:
    """Data that a model evaluates portion by portion."""

    def __init__(self, data: Data, size: int) -> None:
        self._data = data
        self._parts = list(data.parts(size))

    def answers(self, value: Tensor, buffers: Tensor, answer: Answer) -> Answers:
        """What one model makes of the data: in one piece where it returns tensors."""
        outputs = [answer(value, buffers, part) for part in self._parts]
        return whole(outputs, self._data, self._parts)


def whole(outputs: Sequence[Any], data: Data, parts: Sequence[Data]) -> Answers:
    """Outputs for all data at once, if they are tensors of a row for each sample; else in parts."""
    is_in_rows = all(
        isinstance(output, Tensor) and output.dim() > 0 and len(output) == len(part)
        for output, part in zip(outputs, parts, strict=True)
    )
    if is_in_rows:
        return [(torch.cat(list(outputs)), data)]
    return list(zip(outputs, parts, strict=True))


def judged(model: FlatModel, answers: Answers) -> tuple[float, float | None]:
    """Loss and metric; over several parts the mean, by their numbers of samples."""
    task = model.task
    losses = [
        float(checked_loss(task, output, data.targets, judges=True)) for output, data in answers
    ]
    metric = None if task.metric is None else scored(task.metric, answers)
    return _mean(losses, answers), metric


def scored(metric: Metric, answers: Answers) -> float:
    found = [
        # The largest of nothing is the first class: a diverged model would seem to know it.
        math.nan if _has_nan(output) else metric.of(output, data.targets)
        for output, data in answers
    ]
    return _mean(found, answers)


def _has_nan(output: Any) -> bool:
    scores = scores_in(output)
    return isinstance(scores, Tensor) and bool(scores.isnan().any())


def _are_equal(rows: Tensor) -> bool:
    return bool((rows == rows[0]).all())


def _mean(values: Sequence[float], answers: Answers) -> float:
    if len(values) == 1:
        return values[0]
    counts = [len(data) for _, data in answers]
    return sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)


class OutputAverage:
    """Stochastic weight averaging (Izmailov et al. 2018): the running mean of the output models of
    all evaluations from some epoch on is the output instead of the last one.

    It is kept in the memory of a replica, which checkpoints keep.
    """

    def __init__(self, memory: dict[str, Tensor], from_epoch: float) -> None:
        self._memory = memory
        self._from_epoch = from_epoch

    def add(self, model: Tensor, epoch: float) -> None:
        """Take one more model into the mean, if it is time."""
        if epoch < self._from_epoch - _ROUNDING:
            return
        count = self._memory.setdefault(_COUNTED, torch.zeros(1))
        count += 1
        known = self._memory.get(_AVERAGE)
        if known is None:
            self._memory[_AVERAGE] = model.clone()
        else:
            known += (model - known) / count.to(known)

    @property
    def model(self) -> Tensor | None:
        """The mean; None before the first model."""
        return self._memory.get(_AVERAGE)


class Evaluator:
    """Evaluates the model that the method declares as its output, or the mean of its moments."""

    average: OutputAverage | None = None

    def __init__(
        self, model: FlatModel, output: str, buffers: str, *, is_trained_itself: bool = False
    ) -> None:
        """`is_trained_itself`: every gradient is taken at the output model, so that the statistics
        which the workers gather are its own and need not be recomputed."""
        self._model = model
        self._output = output
        self._buffer_policy, self._batches = buffer_policy(buffers)
        if is_trained_itself and self._buffer_policy == "recomputed":
            self._buffer_policy = "averaged"
        test, size = model.task.test, model.task.test_batch
        self._test = InParts(test, size)
        self._few = InParts(test.first(_MOST_SAMPLES), size)

    def output_parameters(self, held: Held) -> Tensor:
        """The output model as a flat vector; an ensemble has none, so its mean stands in."""
        averaged = None if self.average is None else self.average.model
        return self._present(held) if averaged is None else averaged

    @property
    def output(self) -> str:
        """What the model is that the scores are about."""
        is_averaged = self.average is not None and self.average.model is not None
        return f"averaged {self._output}" if is_averaged else self._output

    def _present(self, held: Held) -> Tensor:
        return output_parameters(
            self._output, held.workers, held.weights, held.servers, held.scores
        )

    def reached(self, held: Held, epoch: float) -> None:
        """Hear of the moment of an evaluation, at which the output model may join an average."""
        if self.average is not None:
            self.average.add(self._present(held), epoch)

    def score(self, held: Held, *, has_workers: bool = True) -> Scores:
        """Measure the output model and, unless told otherwise, some workers' own models."""
        values, buffers = held.workers, held.buffers
        if any(weight != 1.0 for weight in held.weights):
            values = values / values.new_tensor(held.weights).unsqueeze(1)
        output = self.output_parameters(held)
        with (
            torch.no_grad(), drawing_from(0, output.device), blamed_on(self._model.task),
            self._model.evaluated() as answer,
        ):  # fmt: skip
            own = self._of_workers(values, buffers, answer) if has_workers else None
            beside = dict[str, float]()
            if self._output == "ensemble":
                loss, metric = self._of_ensemble(values, buffers, answer)
            else:
                statistics = self._statistics(output, buffers)
                answers = self._test.answers(output, statistics, answer)
                loss, metric = judged(self._model, answers)
                beside = {one.name: scored(one, answers) for one in self._model.task.beside}
        mean = values.mean(0)
        spread = (values - mean).pow(2).sum(1).mean().sqrt()
        distance = spread / mean.norm().clamp_min(1e-30)
        return Scores(loss, metric, own, float(distance), beside)

    def _of_workers(self, values: Tensor, buffers: Tensor, answer: Answer) -> float | None:
        """The mean of the own metrics of some workers, on some of the test samples."""
        metric = self._model.task.metric
        if metric is None:
            return None
        some = torch.linspace(0, len(values) - 1, min(_MOST_WORKERS, len(values))).long()
        values, buffers = values[some], buffers[some]
        are_equal = _are_equal(values) and _are_equal(buffers)
        different = 1 if are_equal else len(values)
        found = [
            scored(metric, self._few.answers(value, own, answer))
            for value, own in zip(values[:different], buffers[:different], strict=True)
        ]
        found *= len(values) // different
        return sum(found) / len(found)

    def _of_ensemble(
        self, values: Tensor, buffers: Tensor, answer: Answer
    ) -> tuple[float, float | None]:
        """Of the mean of all models' predictions; of classes their probabilities are averaged."""
        task = self._model.task
        members: list[Tensor] = []
        for value, own in zip(values, buffers, strict=True):
            prediction = self._test.answers(value, own, answer)[0][0]
            if not isinstance(prediction, Tensor):
                raise ConfigurationError(
                    f"an ensemble averages predictions, and the model of task {task.name} returns "
                    f"a {type(prediction).__name__}; return a tensor and give Task.of a loss, or "
                    "choose another method"
                )
            members.append(prediction)
        mixed = torch.stack(members)
        prediction = mixed.softmax(-1).mean(0).log() if task.has_accuracy else mixed.mean(0)
        return judged(self._model, [(prediction, task.test)])

    def _statistics(self, output: Tensor, buffers: Tensor) -> Tensor:
        """BatchNorm statistics for the output model, by the declared policy."""
        if not self._model.has_buffers or self._buffer_policy == "local":
            return buffers[0]
        averaged = buffers.mean(0)
        if self._buffer_policy == "averaged":
            return averaged
        return self._model.recomputed(output, averaged, self._batches)

    def state_dict(self, held: Held, output: Tensor) -> dict[str, Tensor]:
        """The output model by the names that the task's own model has, as it was scored; that of an
        ensemble has every member's, as a `ModuleList` of them would name them."""
        if self._output != "ensemble":
            with torch.no_grad(), drawing_from(0, output.device):
                return self._model.state_dict(output, self._statistics(output, held.buffers))
        return {
            f"{number}.{name}": tensor
            for number, (value, own) in enumerate(zip(held.workers, held.buffers, strict=True))
            for name, tensor in self._model.state_dict(value, own).items()
        }
