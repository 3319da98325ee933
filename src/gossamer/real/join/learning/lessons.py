"""The part of a loop in methods that look at losses and predictions: `codistill`, `pbt`.

Such a method cannot see the loss, which the loop computes. So the loop reports it, and asks the
worker for what the other workers' models predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from gossamer.errors import ConfigurationError
from gossamer.tasks.calibration import predicting
from gossamer.tasks.metric import scores_in
from gossamer.tasks.task import imitation_loss

if TYPE_CHECKING:
    from gossamer.real.join.loop_session import LoopSession
    from gossamer.replica import Layout
    from gossamer.worker import Gradient, Lesson


class Lessons:
    """What the method wants the loop to learn in a step, and what the loop has reported."""

    def __init__(self, model: nn.Module, layout: Layout, method: str) -> None:
        self._model, self._layout, self._method = model, layout, method
        self._lesson: Lesson | None = None
        self._is_learnt = False
        self.loss: Tensor | None = None
        """What this worker's loop has reported last."""

    def begin(self, lesson: Lesson | None) -> None:
        """The next step has this lesson, or none."""
        self._lesson, self._is_learnt = lesson, False

    def end(self, gradient: Gradient, *, compares_losses: bool) -> None:
        """The loop has made its step: the method gets the loss, and what it needs must be there."""
        if self._lesson is not None and not self._is_learnt:
            raise ConfigurationError(
                f"{self._method} lets workers learn what others predict, and this loop did not "
                "ask; write loss = worker.codistill(loss, output, inputs) before loss.backward()"
            )
        if compares_losses and self.loss is None:
            raise ConfigurationError(
                f"{self._method} compares workers by their losses, and this loop has told none; "
                "call worker.report(loss=...) before worker.step()"
            )
        gradient.loss = self.loss

    def taught(
        self, loss: Tensor, output: Any, inputs: tuple[Any, ...], named: dict[str, Any], *,
        are_classes: bool,
    ) -> Tensor:  # fmt: skip
        """The loss with what the lesson adds."""
        self.loss, self._is_learnt = loss.detach(), True
        lesson = self._lesson
        if lesson is None:
            return loss
        scores = scores_in(output)
        predictions: list[Tensor] = []
        buffers = dict(self._model.named_buffers())
        with predicting(self._model):
            for teacher in lesson.teachers:
                state = {**self._layout.unpack(teacher.to(scores.device)),
                         **{name: held.clone() for name, held in buffers.items()}}  # fmt: skip
                predicted: Any = functional_call(self._model, state, inputs, named)
                predictions.append(scores_in(predicted))
        weight = torch.as_tensor(lesson.weight, device=loss.device, dtype=loss.dtype)
        return loss + weight * imitation_loss(scores, predictions, are_classes=are_classes)


class LearningWords:
    """The words of a joined worker about learning from others."""

    coupling: LoopSession | None

    def tell_loss(self, row: Mapping[str, Any]) -> None:
        """What the loop has reported, for methods that compare losses."""
        if self.coupling is not None and "loss" in row:
            self.coupling.lessons.loss = torch.tensor(float(row["loss"]))

    def codistill(
        self, loss: Tensor, output: Any, *inputs: Any, classes: bool = True, **named: Any
    ) -> Tensor:
        """The loss of a batch with what the method adds: under `codistill`, how far `output` is
        from what the other workers' models predict for these inputs of the model. With any other
        method, and alone, it is the loss itself. Without `classes` outputs are compared by their
        squared distance."""
        if self.coupling is None:
            return loss
        return self.coupling.lessons.taught(loss, output, inputs, named, are_classes=classes)
