"""Model soups (Wortsman et al. 2022): the mean of the weights of several trained models.

A soup costs at prediction what one model costs, an ensemble what all of them do. It works only for
models that are linearly connected, such as those with a common ancestor (`gossamer lab path`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from gossamer.consolidate.models import Source, TrainedModel, TrainedModels
from gossamer.errors import ConfigurationError, unknown_name
from gossamer.runs.result import write_model
from gossamer.tasks import Task
from gossamer.tasks.data import Data

KINDS = {
    "greedy": "the best model first, then each that does not make the soup worse",
    "uniform": "all models",
}


@dataclass(frozen=True)
class Scored:
    """What one candidate is worth on the samples that have chosen nothing."""

    name: str
    models: int
    loss: float
    score: float
    """The task's metric; of a task without one, the loss again."""


@dataclass(frozen=True, eq=False)
class Soup:
    """The mean of some models, and what it is worth beside them."""

    task: Task
    kind: str
    chosen: tuple[str, ...]
    """The models in it, in the order in which they joined."""
    table: tuple[Scored, ...]
    """The candidates: the model chosen as the best, the mean of single models, both soups, and the
    ensemble."""
    samples: int
    """The test samples that the table was measured on."""
    state: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        """The soup for `load_state_dict` of the task's model, BatchNorm statistics recomputed."""
        return dict(self.state)

    def save(self, path: Path | str) -> None:
        """Write it as a file of safetensors."""
        write_model(Path(path), self.state)

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task.spec or self.task.name, "kind": self.kind,
            "chosen": list(self.chosen), "test_samples": self.samples,
            "score": str(self.task.score), "candidates": [vars(one) for one in self.table],
        }  # fmt: skip

    def __repr__(self) -> str:
        own = next(one for one in self.table if one.name == f"{self.kind} soup")
        return f"<Soup: {self.kind} of {own.models}, {self.task.score} {own.score:.4g}>"


def soup(
    sources: Source | Sequence[Source], kind: str = "greedy", *, task: str | Task | None = None,
    data: Path | str | None = None,
) -> Soup:  # fmt: skip
    """The mean of the weights of trained models: `uniform` of all, `greedy` of those that help.

    `sources` are run folders, files of weights (then `task` says of what) or results; an ensemble
    gives all its members. The greedy soup chooses on every second test sample, and every figure of
    the table is of the other half.
    """
    if kind not in KINDS:
        raise unknown_name("kind of soup", kind, KINDS)
    models = TrainedModels.of(sources, task=task, data=data)
    if len(models) < 2:
        raise ConfigurationError(
            f"a soup is made of several models, got {len(models)}; name more runs, or one of "
            "`ensemble`, whose folder has every member"
        )
    choosing, judging = halves(models.task.test)
    ranked = _ranked(models, choosing)
    greedy = greedy_choice(models, ranked, choosing)
    made = {"greedy": greedy, "uniform": ranked}
    points: dict[str, TrainedModel] = {}
    for name, chosen in made.items():
        value = mean_of(chosen)
        points[name] = TrainedModel(name, value, models.statistics(value))
    singles = [_scored(models, one.name, one, judging) for one in ranked]
    own = points[kind]
    table = [
        Scored("best single", 1, singles[0].loss, singles[0].score),
        Scored("mean of singles", 1, fmean(one.loss for one in singles),
               fmean(one.score for one in singles)),
        *(_scored(models, f"{name} soup", points[name], judging, len(made[name]))
          for name in KINDS),
        Scored("ensemble", len(ranked), *_filled(*models.ensemble_score(judging))),
    ]  # fmt: skip
    return Soup(
        models.task, kind, tuple(one.name for one in made[kind]), tuple(table), len(judging),
        models.state_dict(own.value, own.buffers),
    )  # fmt: skip


def halves(data: Data) -> tuple[Data, Data]:
    """Every second sample, and the others: neither half is sorted otherwise than the whole."""
    parts = [torch.arange(first, len(data), 2) for first in (0, 1)]
    first, second = (Data(*data.at(index), data.labels_as) for index in parts)
    return first, second


def mean_of(members: Sequence[TrainedModel]) -> Tensor:
    return torch.stack([one.value for one in members]).mean(0)


def greedy_choice(
    models: TrainedModels, ranked: Sequence[TrainedModel], data: Data
) -> list[TrainedModel]:
    """Wortsman et al. 2022, Recipe 1: a model joins if the soup with it is not worse."""
    is_lower_better = models.task.score.is_lower_better
    chosen = [ranked[0]]
    best = _worth(models, chosen, data)
    for one in ranked[1:]:
        worth = _worth(models, [*chosen, one], data)
        if worth <= best if is_lower_better else worth >= best:
            chosen.append(one)
            best = worth
    return chosen


def _worth(models: TrainedModels, members: Sequence[TrainedModel], data: Data) -> float:
    value = mean_of(members)
    buffers = members[0].buffers if len(members) == 1 else models.statistics(value)
    return _filled(*models.score(value, buffers, data))[1]


def _ranked(models: TrainedModels, data: Data) -> list[TrainedModel]:
    worth = {one.name: _worth(models, [one], data) for one in models.members}
    sign = 1 if models.task.score.is_lower_better else -1
    return sorted(models.members, key=lambda one: sign * worth[one.name])


def _scored(
    models: TrainedModels, name: str, member: TrainedModel, data: Data, count: int = 1
) -> Scored:
    return Scored(name, count, *_filled(*models.score(member.value, member.buffers, data)))


def _filled(loss: float, metric: float | None) -> tuple[float, float]:
    return loss, loss if metric is None else metric
