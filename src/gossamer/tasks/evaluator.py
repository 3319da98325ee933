"""What the models are worth at a moment: the output model, the workers, how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError, unknown_name
from gossamer.rules import mean_of_models
from gossamer.tasks.flat_model import FlatModel, drawing_from

BUFFER_POLICIES = {
    "recomputed": "those of the output model itself, on batches of training data",
    "averaged": "the mean of the workers' statistics",
    "local": "those of the first living worker",
}
_BATCHES = 8
_CHUNK = 1000
# Of the workers a sample is evaluated: they are there to see how far they lag behind the output.
_MOST_WORKERS = 8
_MOST_SAMPLES = 1000


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
    """Loss and accuracy of the output model, and of some workers, on the test set."""

    loss: float
    accuracy: float | None
    worker_accuracy: float | None
    consensus_distance: float


@dataclass
class Held:
    """What workers and servers hold at a moment, of those that are alive."""

    workers: Tensor
    """One row each; for push-sum the numerators."""
    weights: Sequence[float]
    buffers: Tensor
    servers: Sequence[Tensor]


def output_parameters(
    output: str, workers: Tensor, weights: Sequence[float], servers: Sequence[Tensor]
) -> Tensor:
    """The model that a method declares as its output: what its servers hold, or the workers' mean.

    Everyone who combines the same values gets the same bits.
    """
    if servers and output in ("centre", "server", "moving average"):
        return torch.cat(list(servers))
    return mean_of_models(workers, weights)


class Evaluator:
    """Evaluates the model that the method declares as its output."""

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

    def output_parameters(self, held: Held) -> Tensor:
        """The output model as a flat vector; an ensemble has none, so its mean stands in."""
        return output_parameters(self._output, held.workers, held.weights, held.servers)

    def score(self, held: Held) -> Scores:
        values, buffers = held.workers, held.buffers
        if any(weight != 1.0 for weight in held.weights):
            values = values / values.new_tensor(held.weights).unsqueeze(1)
        output = self.output_parameters(held)
        some = torch.linspace(0, len(values) - 1, min(_MOST_WORKERS, len(values))).long()
        test = self._model.task.test
        with torch.no_grad(), drawing_from(0, output.device):
            own = self._logits(values[some], buffers[some], test.inputs[:_MOST_SAMPLES])
            if self._output == "ensemble":
                mixed = self._logits(values, buffers, test.inputs)
                prediction = mixed.softmax(-1).mean(0).log() if self._classifies else mixed.mean(0)
            else:
                statistics = self._statistics(output, buffers)
                prediction = self._logits(output[None], statistics[None], test.inputs)[0]
            loss = self._model.task.loss(prediction, test.targets)
        mean = values.mean(0)
        spread = (values - mean).pow(2).sum(1).mean().sqrt()
        distance = spread / mean.norm().clamp_min(1e-30)
        return Scores(
            float(loss), self._accuracy(prediction),
            self._mean_accuracy(own), float(distance),
        )  # fmt: skip

    @property
    def _classifies(self) -> bool:
        return self._model.task.correct is not None

    def _accuracy(self, prediction: Tensor) -> float | None:
        correct = self._model.task.correct
        if correct is None:
            return None
        if prediction.isnan().any():
            # The largest of nothing is the first class: a diverged model would seem to know it.
            return float("nan")
        targets = self._model.task.test.targets[: len(prediction)]
        return float(correct(prediction, targets).float().mean())

    def _mean_accuracy(self, predictions: Tensor) -> float | None:
        scores = [self._accuracy(prediction) for prediction in predictions]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known else None

    def _logits(self, values: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """Outputs of each model, [models, samples, ...]."""
        self._model.module.eval()
        parts = inputs.split(_CHUNK)
        outputs = [
            torch.cat([self._model.predict(value, own, part) for part in parts])
            for value, own in zip(values, buffers, strict=True)
        ]
        self._model.module.train()
        return torch.stack(outputs)

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
