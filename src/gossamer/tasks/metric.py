"""What a model is judged by beside its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError

_TAKEN = frozenset(
    {"loss", "training_loss", "epochs", "steps", "samples", "bytes", "seconds", "output", "score"}
)
"""Columns of a run's rows that mean something else."""
_IGNORED = -100
"""The target that torch's own losses leave out."""


class ScoreKey(str):
    """The column of a run's rows by which it is judged; it knows which values are better."""

    is_lower_better: bool

    def __new__(cls, name: str, is_lower_better: bool) -> ScoreKey:
        key = super().__new__(cls, name)
        key.is_lower_better = is_lower_better
        return key

    def __reduce__(self) -> tuple[type[ScoreKey], tuple[str, bool]]:
        """A key may travel to another process."""
        return ScoreKey, (str(self), self.is_lower_better)


@dataclass(frozen=True)
class Metric:
    """A figure of a task, under its own name in every table.

    `score(output, targets)` gives one number for each sample, whose mean counts, or one number.
    `output` is what the model returns.
    """

    name: str
    score: Callable[[Any, Any], Tensor | float]
    better: str = "high"
    """Which values are better: high or low."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in _TAKEN:
            raise ConfigurationError(
                f"a metric cannot be named {self.name!r}; choose a word of letters, digits and _ "
                f"that is none of {', '.join(sorted(_TAKEN))}"
            )
        if self.better not in ("high", "low"):
            raise ConfigurationError(
                f"metric {self.name}: better must be 'high' or 'low', got {self.better!r}"
            )

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a share of what is right."""
        return self.name == "accuracy"

    def of(self, output: Any, targets: Any) -> float:
        """Of the whole batch."""
        value = self.score(output, targets)
        return float(torch.as_tensor(value).float().mean())


def fraction_correct(output: Tensor, targets: Tensor) -> Tensor:
    """For each sample the fraction of its targets, one or many, that the output ranks first."""
    hits = (output.argmax(-1) == targets).to(torch.float32)
    return hits.reshape(len(hits), -1).mean(1)


ACCURACY = Metric("accuracy", fraction_correct)


def scores_in(output: Any) -> Any:
    """The scores of the classes in what a model returns: a tensor, or `logits` of an object or a
    dictionary; the output itself where it has none."""
    return _part(output, "logits", output)


def _part(output: Any, name: str, other: Any) -> Any:
    if isinstance(output, Mapping):
        return cast(Mapping[str, Any], output).get(name, other)
    return getattr(output, name, other)


def own_accuracy(output: Any, targets: Any) -> Tensor:
    """As `fraction_correct`, for outputs of any layout: classes last, or second as torch's
    cross-entropy has them. Targets of -100 are left out; a sample of nothing else counts as 0.
    A language model whose own loss is of the next word is judged by the next word."""
    scores = scores_in(output)
    if not isinstance(scores, Tensor) or not isinstance(targets, Tensor):
        raise ConfigurationError(
            "the accuracy needs a tensor of scores and one of classes, got "
            f"{_shape(scores)} and {_shape(targets)}; return the scores, or an object with "
            ".logits, or give a metric of your own"
        )
    if scores.shape[:-1] == targets.shape:
        if _tells_next(output, scores, targets):
            scores, targets = scores[:, :-1], targets[:, 1:]
        chosen = scores.argmax(-1)
    elif scores.dim() > 2 and scores.shape[:1] + scores.shape[2:] == targets.shape:
        chosen = scores.argmax(1)
    else:
        raise ConfigurationError(
            f"the accuracy needs one score for each class of each target, got an output of shape "
            f"{_shape(scores)} for targets of shape {_shape(targets)}; give metric=None to be "
            "judged by the loss, or a metric of your own"
        )
    counted = (targets != _IGNORED).reshape(len(targets), -1)
    hits = (chosen == targets).reshape(len(targets), -1) & counted
    return hits.sum(1) / counted.sum(1).clamp_min(1)


def _tells_next(output: Any, scores: Tensor, targets: Tensor) -> bool:
    """Whether the loss that a model has computed itself is that of each target's next one, as the
    causal language models of `transformers` have it, which are given their inputs as targets."""
    loss = _part(output, "loss", None)
    if (
        not isinstance(loss, Tensor)
        or loss.dim()
        or targets.dim() != 2
        or targets.is_floating_point()
    ):
        return False
    # Sample by sample: the probabilities of all words would take as much memory as the scores.
    sums = torch.stack([one.float().logsumexp(-1) for one in scores])

    def off(sums: Tensor, scores: Tensor, targets: Tensor) -> Tensor:
        counted = targets != _IGNORED
        picked = scores.gather(-1, (targets * counted).unsqueeze(-1)).squeeze(-1).float()
        return (((sums - picked) * counted).sum() / counted.sum() - loss).abs()

    return bool(off(sums[:, :-1], scores[:, :-1], targets[:, 1:]) < off(sums, scores, targets))


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
