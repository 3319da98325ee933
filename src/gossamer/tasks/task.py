"""What a task is: a model, a loss and data, with defaults under which it trains well.

What of a task touches a batch (model, loss, augmentation) is evaluated for many workers together
where it works under `torch.func.vmap`, and for one worker after the other where it does not.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gossamer.errors import ConfigurationError
from gossamer.optim.optimisers import make_optimiser
from gossamer.own_code import calling_place, reference_to
from gossamer.tasks.data import Data
from gossamer.tasks.metric import ACCURACY, Metric, ScoreKey, fraction_correct, own_accuracy
from gossamer.tasks.samples import Reading, held_out, read_samples

__all__ = ["ACCURACY", "Data", "Metric", "Task", "cross_entropy", "fraction_correct"]

_MANY_CLASSES = 512
"""From here on the scores need more memory than anything else, and torch's own function is used."""
NAMELESS = "own"
"""What a task is called that nobody has named."""
_LABELS = "labels"
"""The parameter by which a model that computes its own loss takes the targets."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Something to train.

    `make_model` draws its initial parameters from torch's global generator: seed it first.
    `loss(output, targets)` is the mean over the batch; `output` is what the model returns.
    `training_loss` is what gradients are of, where that is another; models are judged by `loss`.
    `metric` is what a model is judged by; None: by its loss; those `beside` it are columns of a
    run's rows. `augment(inputs, key)` changes
    training inputs and draws from the key alone. `learning_rates` is the small grid that suits
    `optimiser` at `batch` on one worker. `test_batch` is how many test samples are evaluated at
    once. `optimum` is the flat vector of best parameters where that is known. `spec` and `data` are
    what it was made from by `make_task`: its name with options, and where its files are; a task
    that was changed by
    `dataclasses.replace` has neither, because that name stands for another task. `place` is the
    line of the user's own that made it, empty for the tasks of this package.

    `Task.of` makes one from what people have.
    """

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train: Data
    test: Data
    metric: Metric | None
    beside: tuple[Metric, ...] = ()
    augment: Callable[[Any, Tensor], Any] | None = None
    training_loss: Callable[[Any, Any], Tensor] | None = None
    batch: int
    epochs: float
    learning_rates: tuple[float, ...]
    optimiser: str = "sgd:momentum=0.9"
    optimum: Tensor | None = None
    test_batch: int = 1000
    spec: str = field(default="", init=False)
    data: Path | None = field(default=None, init=False)
    place: str = ""

    def named(self, spec: str, data: Path | None = None) -> Task:
        """The same task with the name by which another process can make it again."""
        made = copy.copy(self)
        # A field that `replace` carried over would name the task that was changed.
        object.__setattr__(made, "spec", spec)
        object.__setattr__(made, "data", data)
        return made

    def importable(self) -> Task:
        """The same task with a name by which workers can make it; refused where it has none."""
        return self if self.spec else self.named(reference_to(self, "task"))

    @property
    def has_accuracy(self) -> bool:
        """Whether it is judged by a share of right answers."""
        return self.metric is not None and self.metric.is_accuracy

    @property
    def score(self) -> ScoreKey:
        """The column of a run's rows by which it is judged."""
        if self.metric is None:
            return ScoreKey("loss", True)
        return ScoreKey(self.metric.name, self.metric.better == "low")

    @staticmethod
    def of(
        model: Callable[[], nn.Module] | nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        train: Any,
        test: Any = None,
        *,
        metric: str | Metric | Callable[[Any, Any], Tensor | float] | None = "auto",
        better: str = "high",
        name: str = "",
        title: str = "",
        batch: int = 32,
        epochs: float = 10.0,
        optimiser: str = "adamw",
        learning_rates: Sequence[float] = (1e-3, 3e-3, 1e-2),
        augment: Callable[[Any, Tensor], Any] | None = None,
        inputs: Sequence[str] = (),
        targets: str = "",
        limit: int | None = None,
        holdout: float = 0.1,
        test_batch: int = 256,
    ) -> Task:
        """A task from a model, a loss and data as people have them.

        `model` is a class or a function that makes the model, or a model, which is copied: every
        run then begins with its weights. `loss(output, targets)` gets whatever the model returns;
        None: the model computes it itself, from the targets as its parameter `labels`, and returns
        it as `.loss`, as `["loss"]`, first in a tuple, or alone.

        `train` and `test` are pairs (inputs, targets) of tensors or numpy arrays, where inputs may
        be a dictionary or a tuple of them; or dictionaries with a column of targets; or map-style
        datasets, which are read into memory once; or tables of Hugging Face's `datasets`. `inputs`
        and `targets` name columns, `limit` is the most samples to read of each. Without `test`, the
        share `holdout` of `train` is held out. A dictionary is handed to the model by the names of
        its tensors, a tuple by place.

        `metric` is "accuracy", a function of (output, targets), or a `Metric`; None: the loss. By
        default it is the accuracy where targets are whole numbers. `better` says whether a high or
        a low value of such a function is the good one.
        """
        make_model, known = _factory(model)
        _check_numbers(batch=batch, test_batch=test_batch, epochs=epochs)
        _check_numbers(**{f"learning rate {n}": rate for n, rate in enumerate(learning_rates, 1)})
        make_optimiser(optimiser)
        if not learning_rates:
            raise ConfigurationError("learning_rates must have at least one, got none")
        labels_as = _LABELS if loss is None else ""
        reading = Reading(limit, tuple(inputs), targets, labels_as)
        data = read_samples(train, "train", reading)
        if test is None:
            data, tested = held_out(data, holdout)
        else:
            tested = read_samples(test, "test", reading)
        own = name or known
        return Task(
            name=own,
            title=title or own,
            make_model=make_model,
            loss=own_loss if loss is None else loss,
            train=data,
            test=tested,
            metric=_metric(metric, better, data),
            augment=augment,
            batch=min(batch, len(data)),
            epochs=epochs,
            learning_rates=tuple(learning_rates),
            optimiser=optimiser,
            test_batch=test_batch,
            place=calling_place() or "Task.of",
        )


def _factory(model: Callable[[], nn.Module] | nn.Module) -> tuple[Callable[[], nn.Module], str]:
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model), type(model).__name__
    if not callable(model):
        raise ConfigurationError(
            "model must be a class or a function that makes a model, or a model, got "
            f"{type(model).__name__}"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(model).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = getattr(model, "__name__", NAMELESS)
    named = NAMELESS if named == "<lambda>" else named
    if needed:
        raise ConfigurationError(
            f"model {named} needs {', '.join(needed)}; give a function without arguments, such as "
            f"lambda: {named}({needed[0]}=...)"
        )
    return model, named


def _check_numbers(**values: float) -> None:
    """Here the line can be told that gave them."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigurationError(f"{name} must be a finite number above 0, got {value}")


def _metric(
    metric: str | Metric | Callable[[Any, Any], Tensor | float] | None, better: str, data: Data
) -> Metric | None:
    if metric is None or isinstance(metric, Metric):
        return metric
    if metric == "auto":
        labels = data.targets
        is_classes = isinstance(labels, Tensor) and not labels.is_floating_point()
        return Metric("accuracy", own_accuracy) if is_classes else None
    if metric == "accuracy":
        return Metric("accuracy", own_accuracy)
    if isinstance(metric, str):
        raise ConfigurationError(
            f"metric must be 'accuracy', a function of (output, targets) or None, got {metric!r}"
        )
    named = getattr(metric, "__name__", type(metric).__name__)
    return Metric("metric" if named == "<lambda>" else named, metric, better)


def own_loss(output: Any, targets: Any) -> Tensor:
    """The loss that a model has computed itself."""
    if isinstance(output, Mapping):
        found = cast(Mapping[str, Any], output).get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        found = cast(tuple[Any, ...], output)[0]
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, Tensor):
        raise ConfigurationError(
            f"the task has no loss, and the model's own output ({type(output).__name__}) has none "
            "either; return an object with .loss when labels are given, or give Task.of a loss"
        )
    return found


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the batch (and over positions, where a sample has several).

    Written out, because one softmax kernel over many rows of few classes is several times slower
    than these element-wise ones when the workers are batched.
    """
    if output.shape[-1] >= _MANY_CLASSES:
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten())
    scores = output.to(torch.promote_types(output.dtype, torch.float32))
    chosen = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (scores.logsumexp(-1) - chosen).mean()


def imitation_loss(output: Tensor, teachers: Sequence[Tensor], *, are_classes: bool) -> Tensor:
    """How far an output is from the mean of the teachers' predictions: the cross-entropy against
    their mean probabilities, or the mean squared distance to their mean output."""
    if are_classes:
        mean = torch.stack([one.softmax(-1) for one in teachers]).mean(0)
        return soft_cross_entropy(output, mean)
    return (output - torch.stack(list(teachers)).mean(0)).square().mean()


def soft_cross_entropy(output: Tensor, teachers: Tensor) -> Tensor:
    """Mean cross-entropy against probabilities of the classes, as `cross_entropy` is against one
    class; at its least where the softmax of the output has these probabilities."""
    scores = output.to(torch.promote_types(output.dtype, torch.float32))
    expected = (teachers * scores).sum(-1)
    return (scores.logsumexp(-1) * teachers.sum(-1) - expected).mean()
