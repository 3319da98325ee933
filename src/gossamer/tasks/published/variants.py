"""What every task may be changed by: smoothed labels, ghost batches, normalised weights.

These are options of all tasks, such as "cifar10-resnet20:label_smoothing=0.1,ghost=32".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gossamer.errors import ConfigurationError
from gossamer.specs import bind, check_range
from gossamer.tasks.task import Task, cross_entropy


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The options that every task takes."""

    label_smoothing: float = 0.0
    """The share of a label that is spread over all classes, in training."""
    ghost: int = 0
    """BatchNorm sees at least so many samples at a time; 0: the whole batch of a worker."""
    weight_norm: bool = False
    """Whether weights of linear layers and convolutions are learnt as length and direction."""

    @staticmethod
    def taken_from(name: str, given: dict[str, str]) -> Variant:
        """Read these options, and leave the task's own."""
        own = {key: given.pop(key) for key in Variant.__dataclass_fields__ if key in given}
        values = cast(Mapping[str, Any], bind("task", name, Variant, own))
        made = Variant(**values)
        check_range(f"{name}: label_smoothing", made.label_smoothing, 0.0, 1.0)
        check_range(f"{name}: ghost", made.ghost, 0)
        return made

    def of(self, task: Task) -> Task:
        """The task with these changes; the same where there are none."""
        if self == Variant():
            return task
        changes: dict[str, Any] = {}
        if self.label_smoothing:
            if task.loss is not cross_entropy:
                raise ConfigurationError(
                    f"label_smoothing needs a task whose loss is the cross-entropy of classes, "
                    f"which {task.name} is not; leave it out"
                )
            changes["training_loss"] = smoothed(self.label_smoothing)
        if self.ghost or self.weight_norm:
            changes["make_model"] = lambda: self._model(task)
        return replace(task, **changes)

    def _model(self, task: Task) -> nn.Module:
        model = task.make_model()
        if self.ghost and not with_ghost_batches(model, self.ghost):
            raise ConfigurationError(
                f"ghost batches are of BatchNorm, which the model of {task.name} does not have; "
                "leave out ghost"
            )
        if self.weight_norm:
            with_weight_norm(model)
        return model


def smoothed(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The cross-entropy with labels of which a share is spread over all classes (Szegedy et al.
    2016)."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        scores = output.to(torch.promote_types(output.dtype, torch.float32))
        even = (scores.logsumexp(-1) - scores.mean(-1)).mean()
        return (1.0 - share) * cross_entropy(output, targets) + share * even

    return loss


class GhostBatchNorm(nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
    """BatchNorm over parts of a batch (Hoffer, Hubara and Soudry 2017): each part of `ghost`
    samples or somewhat more is normalised by its own statistics, so that a large batch keeps the
    noise of small ones. Running statistics follow the parts one after the other."""

    ghost: int

    @staticmethod
    def of(layer: nn.Module, ghost: int) -> None:
        """Turn a BatchNorm layer into one over parts, with its parameters and statistics."""
        layer.__class__ = GhostBatchNorm
        vars(layer)["ghost"] = ghost

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected a batch of channels, got {input.dim()} dimensions")

    def forward(self, input: Tensor) -> Tensor:
        """Shape [batch, channel, ...] to the same."""
        parts = len(input) // self.ghost if self.training else 1
        if parts <= 1:
            return super().forward(input)
        return torch.cat([super(GhostBatchNorm, self).forward(one) for one in input.chunk(parts)])


def with_ghost_batches(model: nn.Module, ghost: int) -> int:
    """Let every BatchNorm of a model see parts of this size; return how many there are."""
    layers = [
        one
        for one in model.modules()
        if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    ]
    for layer in layers:
        GhostBatchNorm.of(layer, ghost)
    return len(layers)


def with_weight_norm(model: nn.Module) -> None:
    """Learn the weights of linear layers and convolutions as a length and a direction for each
    output (Salimans and Kingma 2016); the model's function stays what it was."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            parametrizations.weight_norm(layer)
